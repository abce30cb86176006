"""The feeder on a scripted engine: when results leave in each mode, what an abort touches, and how a lying engine is found out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import msgspec
import pytest

from enginepool.clock import EngineStamps, decode_stamps
from enginepool.errors import Code, ItemError
from enginepool.payload import CompletionOutput, GenerateRequest, GenerateResult, Request, decode_parts, decode_result
from enginepool.protocol import Abort, Delta, Done, DoneItem, Drain, Message, Stop, encode
from enginepool.recorder import FlightRecorder
from enginepool.status import Load
from enginepool.worker import feeder as feeder_module
from enginepool.worker.engine import EngineBroken, EngineInfo, Event, Finished, RefusedItem, Streamed
from enginepool.worker.feeder import Feeder, FeederLimits
from enginepool.worker.link import Batch, Command

pytestmark = pytest.mark.timeout(20)

NIL = msgspec.Raw(msgspec.msgpack.encode(None))
STAMPS = EngineStamps(1.0, 2.0)


class ScriptedEngine:
    """Each item's prompt is the number of steps that it takes, or `refuse`, `fail`, `vanish`, `crash`; a stream tells each step."""

    def __init__(self) -> None:
        self.recorder = FlightRecorder.make()
        self.items: dict[int, str] = {}
        self.left: dict[int, int] = {}
        self.num_steps = 0
        self.before_step: Callable[[int], None] = lambda _: None
        self.extra: list[Event] = []
        self.streams: set[int] = set()
        self.scopes: list[str] = []
        self.num_tokens = 0
        self.counts: dict[int, int] = {}

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("scripted", 1, 1, 1)

    @property
    def core_pids(self) -> list[int]:
        return []

    @property
    def step_lag(self) -> int:
        return 1

    @property
    def progress(self) -> int:
        return self.num_tokens

    def token_counts(self) -> dict[int, int]:
        return dict.fromkeys(self.left, 0) | self.counts

    def blocked(self) -> list[int]:
        return []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.left)

    @property
    def scope(self) -> Callable[[str], AbstractContextManager[None]]:
        @contextmanager
        def noted(name: str) -> Iterator[None]:
            self.scopes.append(f"+{name.rpartition(' ')[2]}")
            yield
            self.scopes.append(f"-{name.rpartition(' ')[2]}")

        return noted

    def admit(self, lease: int, request: Request, arrived: float) -> None:
        assert isinstance(request, GenerateRequest)
        prompt = request.prompt or ""
        if prompt == "refuse":
            raise RefusedItem(Code.CONTEXT_LENGTH_EXCEEDED, "too long")
        self.items[lease] = prompt
        self.left[lease] = int(prompt) if prompt.isdigit() else 1
        if request.is_stream:
            self.streams.add(lease)

    def step(self) -> list[Event]:
        self.num_steps += 1
        self.before_step(self.num_steps)
        if "crash" in self.items.values():
            raise RuntimeError("device lost")
        self.left = {lease: left - 1 for lease, left in self.left.items()}
        ended = [lease for lease, left in self.left.items() if left == 0]
        for lease in ended:
            del self.left[lease]
        extra, self.extra = self.extra, []
        streamed = [Streamed(lease, parts_of(f"step {self.num_steps}")) for lease in self.left if lease in self.streams]
        finished = [Finished(lease, self._result(lease), STAMPS) for lease in ended if self.items[lease] != "vanish"]
        return [*streamed, *finished, *extra]

    def abort(self, leases: list[int]) -> None:
        for lease in leases:
            self.left.pop(lease, None)

    def load(self) -> Load:
        return Load(running=len(self.left))

    def close(self) -> None:
        pass

    def _result(self, lease: int) -> GenerateResult | ItemError:
        if self.items[lease] == "fail":
            return ItemError(Code.WORKER_LOST, "this one failed")
        return result_of(f"text {lease}")


def result_of(text: str) -> GenerateResult:
    return GenerateResult([CompletionOutput(0, text, [1], "stop")])


def parts_of(text: str) -> list[CompletionOutput]:
    return [CompletionOutput(0, text, [1])]


class Outlet:
    """Commands from a list, answers into a list; runs dry by draining, so that no test hangs."""

    def __init__(self, *commands: Command) -> None:
        self.inbox: deque[Command] = deque(commands)
        self.sent: list[tuple[Done, Sequence[bytes]]] = []
        self.log: list[str] = []
        self.deltas: dict[int, str] = {}

    def take(self, *, wait: bool) -> Command | None:
        if self.inbox:
            return self.inbox.popleft()
        return Drain() if wait else None

    def send(self, message: Message, payloads: Sequence[bytes] = ()) -> None:
        if isinstance(message, Delta):
            self.log += [f"delta {lease}" for lease in message.ids]
            for lease, data in zip(message.ids, payloads, strict=True):
                self.deltas[lease] = self.deltas.get(lease, "") + "".join(part.text for part in decode_parts(data)) + ";"
            return
        assert isinstance(message, Done)
        self.log += [f"done {item.lease}" for item in message.items]
        self.sent.append((message, payloads))

    @property
    def messages(self) -> list[list[int]]:
        return [[item.lease for item in done.items] for done, _ in self.sent]

    @property
    def codes(self) -> dict[int, Code | None]:
        return {item.lease: item.error.code if item.error else None for done, _ in self.sent for item in done.items}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEngine]:
    monkeypatch.setattr(feeder_module, "IDLE_SLEEP_S", 0.0)
    scripted = ScriptedEngine()
    yield scripted
    scripted.recorder.close()


def batch(**prompts: str) -> Batch:
    """`batch(l1="3")` is lease 1 with a prompt that takes three steps."""
    leases = [int(name.removeprefix("l")) for name in prompts]
    return Batch(leases, [GenerateRequest(prompt, None, NIL) for prompt in prompts.values()], 0.0)


def stream(**prompts: str) -> Batch:
    """The same for streams."""
    plain = batch(**prompts)
    return Batch(plain.leases, [GenerateRequest(prompt, None, NIL, is_stream=True) for prompt in prompts.values()], 0.0)


def run(engine: ScriptedEngine, *commands: Command, is_static: bool = False, max_frame_bytes: int = 1000) -> Outlet:
    outlet = Outlet(*commands)
    feeder_of(engine, outlet, is_static=is_static, max_frame_bytes=max_frame_bytes).run()
    return outlet


def feeder_of(engine: ScriptedEngine, outlet: Outlet, *, is_static: bool = False, max_frame_bytes: int = 1000) -> Feeder:
    """A feeder whose flight record stays readable as `engine.recorder`."""
    return Feeder(engine, outlet, engine.recorder, FeederLimits(max_frame_bytes=max_frame_bytes, stall_s=60.0), is_static=is_static)


def during_step(engine: ScriptedEngine, outlet: Outlet, step: int, command: Command) -> None:
    """Let a command arrive while the engine is in its `step`-th step."""
    engine.before_step = lambda number: outlet.inbox.append(command) if number == step else None


# When results leave.


def test_continuous_result_leaves_when_it_is_finished(engine: ScriptedEngine) -> None:
    assert run(engine, batch(l1="1", l2="3", l3="2", l4="3")).messages == [[1], [3], [2, 4]]


def test_static_results_leave_together(engine: ScriptedEngine) -> None:
    assert run(engine, batch(l1="1", l2="3", l3="2"), is_static=True).messages == [[1, 3, 2]]


def test_result_carries_the_engines_answer(engine: ScriptedEngine) -> None:
    ((done, payloads),) = run(engine, batch(l7="1")).sent
    assert decode_result(payloads[0]) == result_of("text 7")
    assert decode_stamps(done.items[0].stamps) == STAMPS


def test_result_that_never_reached_the_engine_has_no_stamps(engine: ScriptedEngine) -> None:
    ((done, _),) = run(engine, batch(l1="refuse")).sent
    assert decode_stamps(done.items[0].stamps) is None


def test_continuous_newcomer_joins_between_steps(engine: ScriptedEngine) -> None:
    outlet = Outlet(batch(l1="4"))
    during_step(engine, outlet, 1, batch(l2="1"))
    feeder_of(engine, outlet).run()
    assert outlet.messages == [[2], [1]]
    assert engine.num_steps == 4


# Streams.


@pytest.mark.parametrize("is_static", [False, True], ids=["continuous", "static"])
def test_stream_tells_each_step_at_once_and_its_end_last(engine: ScriptedEngine, is_static: bool) -> None:
    outlet = run(engine, stream(l1="3"), is_static=is_static)
    assert outlet.log == ["delta 1", "delta 1", "done 1"]
    assert outlet.deltas == {1: "step 1;step 2;"}


def test_stream_beside_whole_items_leaves_their_results_alone(engine: ScriptedEngine) -> None:
    both = stream(l1="2")
    both.leases.append(2)
    both.requests.append(GenerateRequest("3", None, NIL))
    outlet = run(engine, both)
    assert outlet.log == ["delta 1", "done 1", "done 2"]


def test_stream_in_a_static_batch_does_not_wait_for_it_but_its_end_does(engine: ScriptedEngine) -> None:
    both = stream(l1="2")
    both.leases.append(2)
    both.requests.append(GenerateRequest("4", None, NIL))
    outlet = run(engine, both, is_static=True)
    assert outlet.log == ["delta 1", "done 1", "done 2"]
    assert outlet.messages == [[1, 2]]


def test_deltas_of_a_step_travel_together_before_its_results(engine: ScriptedEngine) -> None:
    outlet = Outlet(stream(l1="3", l2="2"))
    feeder_of(engine, outlet).run()
    assert outlet.log == ["delta 1", "delta 2", "delta 1", "done 2", "done 1"]


@pytest.mark.parametrize("is_static", [False, True], ids=["continuous", "static"])
def test_stream_that_is_aborted_tells_nothing_more(engine: ScriptedEngine, is_static: bool) -> None:
    outlet = Outlet(stream(l1="9"))
    during_step(engine, outlet, 2, Abort([1]))
    feeder_of(engine, outlet, is_static=is_static).run()
    assert outlet.log == ["delta 1", "delta 1", "done 1"]
    assert outlet.codes == {1: Code.ABORTED}


def test_stages_are_profiler_scopes(engine: ScriptedEngine) -> None:
    run(engine, batch(l1="1"))
    assert {name[1:] for name in engine.scopes} == {"pull", "admit", "step", "encode"}
    opened = [name for name in engine.scopes if name.startswith("+")]
    assert len(engine.scopes) == 2 * len(opened)
    assert opened[:3] == ["+admit", "+pull", "+step"]


def test_step_without_news_is_not_encoded(engine: ScriptedEngine) -> None:
    run(engine, batch(l1="3"))
    assert engine.scopes.count("+encode") == 1
    assert engine.scopes.count("+step") == 3


# Items at fault.


@pytest.mark.parametrize("is_static", [False, True], ids=["continuous", "static"])
def test_refused_item_leaves_its_neighbours_alone(engine: ScriptedEngine, is_static: bool) -> None:
    outlet = run(engine, batch(l1="2", l2="refuse", l3="2"), is_static=is_static)
    assert outlet.codes == {1: None, 2: Code.CONTEXT_LENGTH_EXCEEDED, 3: None}


def test_refused_batch_is_answered_without_a_step(engine: ScriptedEngine) -> None:
    outlet = run(engine, batch(l1="refuse", l2="refuse"), is_static=True)
    assert (outlet.messages, engine.num_steps) == ([[1, 2]], 0)


def test_item_that_can_not_be_read_is_refused(engine: ScriptedEngine) -> None:
    torn = Batch([1, 2], [msgspec.DecodeError("torn"), GenerateRequest("1", None, NIL)], 0.0)
    assert run(engine, torn).codes == {1: Code.INVALID_REQUEST, 2: None}


def test_item_that_fails_in_the_engine_carries_its_error(engine: ScriptedEngine) -> None:
    outlet = run(engine, batch(l1="fail", l2="1"))
    assert outlet.codes == {1: Code.WORKER_LOST, 2: None}
    assert outlet.sent[0][1][0] == b""


def test_result_over_the_limit_becomes_that_items_error(engine: ScriptedEngine) -> None:
    outlet = run(engine, batch(l1="1"), max_frame_bytes=5)
    ((done, payloads),) = outlet.sent
    assert (outlet.codes, list(payloads)) == ({1: Code.RESULT_TOO_LARGE}, [b""])
    assert done.items[0].error is not None
    assert "max_frame_bytes (5)" in done.items[0].error.message


# Aborts.


@pytest.mark.parametrize("is_static", [False, True], ids=["continuous", "static"])
def test_abort_ends_one_item_and_no_neighbour(engine: ScriptedEngine, is_static: bool) -> None:
    outlet = Outlet(batch(l1="3", l2="3"))
    during_step(engine, outlet, 1, Abort([1]))
    feeder_of(engine, outlet, is_static=is_static).run()
    assert outlet.codes == {1: Code.ABORTED, 2: None}
    assert outlet.messages == [[1], [2]]


def test_abort_of_the_last_running_item_releases_its_batch(engine: ScriptedEngine) -> None:
    outlet = Outlet(batch(l1="1", l2="9"))
    during_step(engine, outlet, 2, Abort([2]))
    feeder_of(engine, outlet, is_static=True).run()
    assert (outlet.codes, engine.num_steps) == ({1: None, 2: Code.ABORTED}, 2)


def test_abort_of_what_is_not_in_hand_is_not_answered(engine: ScriptedEngine) -> None:
    assert run(engine, batch(l1="2"), Abort([99])).codes == {1: None}


# An engine that can't be trusted any more.


def test_engine_that_loses_items_is_broken_with_both_numbers(engine: ScriptedEngine) -> None:
    with pytest.raises(EngineBroken, match="given 3 items and returned 2; 1 are missing"):
        run(engine, batch(l1="1", l2="vanish", l3="1"), is_static=True)


@pytest.mark.parametrize("foreign", [Finished(99, result_of("whose?"), STAMPS), Streamed(99, parts_of("whose?"))], ids=["end", "delta"])
def test_engine_that_returns_a_foreign_item_is_broken(engine: ScriptedEngine, foreign: Event) -> None:
    engine.extra = [foreign]
    with pytest.raises(EngineBroken, match="lease 99"):
        run(engine, batch(l1="2"))


def test_engine_that_returns_an_item_twice_is_broken(engine: ScriptedEngine) -> None:
    engine.extra = [Finished(1, result_of("again"), STAMPS)]
    with pytest.raises(EngineBroken, match="lease 1"):
        run(engine, batch(l1="1", l2="2"))


def test_exception_out_of_a_step_goes_through(engine: ScriptedEngine) -> None:
    with pytest.raises(RuntimeError, match="device lost"):
        run(engine, batch(l1="crash"))


# Ends.


def test_drain_finishes_what_is_in_hand(engine: ScriptedEngine) -> None:
    assert run(engine, batch(l1="3"), Drain()).codes == {1: None}


def test_stop_returns_without_finishing(engine: ScriptedEngine) -> None:
    outlet = run(engine, batch(l1="3"), Stop(), batch(l2="1"))
    assert outlet.sent == []
    assert 2 not in engine.items


def test_step_that_ran_nothing_sleeps(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(feeder_module, "time", SimpleNamespace(sleep=naps.append))
    monkeypatch.setattr(feeder_module, "monotonic", lambda: 0.0)
    run(engine, batch(l1="3"))
    assert len(naps) == 2


# What the flight recorder and the dispatcher see.


def test_recorder_knows_what_is_being_admitted_when_the_engine_breaks(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "admit", lambda lease, *_: engine.left.update({lease: 9}) if lease == 1 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(engine, batch(l1="9", l2="9"))
    record = engine.recorder.read()
    assert (record.admitting, record.fresh) == (2, (1, 2))


def test_recorder_forgets_newcomers_after_a_step_and_counts_what_ended(engine: ScriptedEngine) -> None:
    run(engine, batch(l1="2"), batch(l2="refuse"))
    record = engine.recorder.read()
    assert (record.admitting, record.fresh, record.num_admissions, record.progress) == (None, (), 4, 1)


@pytest.mark.parametrize(("tokens_a_step", "progress"), [(0, 1), (3, 9)], ids=["empty steps", "tokens"])
def test_steps_that_return_nothing_are_no_progress(engine: ScriptedEngine, tokens_a_step: int, progress: int) -> None:
    def compute(_: int) -> None:
        engine.num_tokens += tokens_a_step

    engine.before_step = compute
    run(engine, batch(l1="9"))
    assert engine.recorder.read().progress == progress


def test_overtaken_item_is_ended_as_timeout_and_the_engine_with_it(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "LOAD_INTERVAL_S", 0.0)
    monkeypatch.setattr(feeder_module, "monotonic", lambda: float(engine.num_steps))
    engine.before_step = lambda number: engine.counts.update({2: number} if 2 in engine.left else {})
    outlet = Outlet(batch(l1="1000", l2="200"))
    with pytest.raises(EngineBroken, match="an item got no token for 60 s"):
        feeder_of(engine, outlet).run()
    assert outlet.codes == {1: Code.TIMEOUT}
    assert engine.num_steps == 61


def test_refusal_with_a_lone_surrogate_can_be_sent() -> None:
    """A template may raise any text."""
    error = RefusedItem(Code.INVALID_REQUEST, "bad \ud83d, fine \U0001f600").error
    assert error.message == "bad \\ud83d, fine \U0001f600"
    assert encode(Done([DoneItem(1, error)]))
