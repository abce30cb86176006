"""Pool's calls on echo workers: order, forms of prompts and params, errors per item, futures, timeouts, status."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from conftest import wait_for

from enginepool import (
    Code,
    EnginePoolWarning,
    ForkedPool,
    InvalidRequest,
    ItemFailed,
    Output,
    Pool,
    PoolClosed,
    PoolState,
    SamplingParams,
    SettingsError,
    WorkerState,
    transport,
)

FIVE = SamplingParams(max_tokens=5)


def test_generate_returns_one_output(echo_pool: Pool) -> None:
    output = echo_pool.generate("hello world", FIVE)
    assert output.ok
    assert (output.text, output.finish_reason, output.token_ids) == ("hello", "length", list(b"hello"))
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (11, 5)


def test_generate_many_keeps_input_order_with_uneven_lengths(echo_pool: Pool) -> None:
    params = [SamplingParams(max_tokens=1 if index % 2 else 40) for index in range(60)]
    outputs = echo_pool.generate_many([f"item {index}: some text" for index in range(60)], params)
    assert [output.index for output in outputs] == list(range(60))
    assert all(str(output.prompt).startswith(f"item {index}:") for index, output in enumerate(outputs))
    assert {output.worker for output in outputs} == {0, 1}


def test_generate_many_of_nothing_is_empty(echo_pool: Pool) -> None:
    assert echo_pool.generate_many([]) == []


@pytest.mark.parametrize(
    ("prompt", "prompt_token_ids"),
    [
        pytest.param("abc", [97, 98, 99], id="text"),
        pytest.param([7, 8], [7, 8], id="token ids"),
        pytest.param((7, 8), [7, 8], id="tuple"),
        pytest.param({"prompt": "ab"}, [97, 98], id="dict text"),
        pytest.param({"prompt_token_ids": [1]}, [1], id="dict ids"),
    ],
)
def test_prompt_forms(echo_pool: Pool, prompt: Any, prompt_token_ids: list[int]) -> None:
    assert echo_pool.generate(prompt, FIVE).prompt_token_ids == prompt_token_ids


def test_bare_string_is_one_prompt(echo_pool: Pool) -> None:
    assert len(echo_pool.generate_many("hello", FIVE)) == 1


def test_bare_integers_say_how_to_write_it(echo_pool: Pool) -> None:
    with pytest.raises(InvalidRequest, match=r"\[\[1, 2, 3\]\]"):
        echo_pool.generate_many([1, 2, 3], FIVE)


def test_bad_items_fail_alone_and_are_summed_up_in_one_warning(echo_pool: Pool) -> None:
    prompts: list[Any] = ["good", "", None, "half \ud83d", "x" * 600, {"prompt": "a", "image": 1}, [1, "2"], [2**70], "good"]
    with pytest.warns(EnginePoolWarning) as caught:
        outputs = echo_pool.generate_many(prompts, FIVE)
    assert [output.ok for output in outputs] == [True, *[False] * 7, True]
    assert [output.error.code for output in outputs if output.error][3] is Code.CONTEXT_LENGTH_EXCEEDED
    assert "U+D83D" in str(outputs[3].error)
    assert "'image'" in str(outputs[5].error)
    assert len(caught) == 1
    assert "7 of 9 items failed" in str(caught[0].message)


def test_failed_item_has_no_text_and_only_reached_stamps(echo_pool: Pool) -> None:
    with pytest.warns(EnginePoolWarning):
        (output,) = echo_pool.generate_many([""], FIVE)
    assert (output.text, output.token_ids, output.finish_reason) == (None, [], "error")
    assert output.error is not None
    assert output.error.blame == "caller"
    assert output.timings.leased is not None
    assert output.timings.first_token is None


def test_params_one_bad_among_many_fails_its_item(echo_pool: Pool) -> None:
    with pytest.warns(EnginePoolWarning, match="1 of 3"):
        outputs = echo_pool.generate_many(["a", "b", "c"], [FIVE, {"temperature": float("nan")}, {"max_tokens": 5}])
    assert "temperature" in str(outputs[1].error)
    assert outputs[2].ok


@pytest.mark.parametrize(
    ("call", "match"),
    [
        pytest.param({"params": {"temprature": 1}}, "temprature", id="unknown field"),
        pytest.param({"params": [FIVE]}, "1 entries for 2", id="too few params"),
        pytest.param({"request_ids": ["a"]}, "request_ids has 1", id="too few ids"),
        pytest.param({"request_ids": "ab"}, "request_ids", id="ids as text"),
        pytest.param({"priorities": [1, 2, 3]}, "priorities has 3", id="too many priorities"),
        pytest.param({"on_error": "ignore"}, "on_error", id="on_error"),
        pytest.param({"timeout_s": float("nan")}, "timeout_s", id="timeout not a number"),
        pytest.param({"deadline_s": 10**400}, "deadline_s", id="endless deadline"),
        pytest.param({"request_ids": iter("ab")}, "request_ids", id="ids as generator"),
    ],
)
def test_a_call_without_meaning_raises(echo_pool: Pool, call: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        echo_pool.generate_many(["a", "b"], **call)


def test_adapter_or_another_model_is_refused_by_name(echo_pool: Pool) -> None:
    with pytest.raises(TypeError, match="lora_request"):
        echo_pool.generate("x", FIVE, lora_request="my-adapter")  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="no field `model`"):
        echo_pool.generate("x", {"model": "my-adapter"})
    output = echo_pool.generate({"prompt": "x", "lora_request": "my-adapter"}, FIVE)
    assert "the prompt's key 'lora_request' is not supported" in str(output.error)


def test_request_ids_are_carried_even_when_equal(echo_pool: Pool) -> None:
    outputs = echo_pool.generate_many(["a", "b"], FIVE, request_ids=["same", "same"])
    assert [(output.request_id, output.prompt) for output in outputs] == [("same", "a"), ("same", "b")]


def test_on_error_raise_has_all_outputs(echo_pool: Pool) -> None:
    with pytest.raises(ItemFailed, match="item 1") as caught:
        echo_pool.generate_many(["a", "", "c"], FIVE, on_error="raise")
    assert len(caught.value.outputs) == 3
    assert caught.value.error.code is Code.INVALID_REQUEST


def test_samples_come_back_with_their_indexes(echo_pool: Pool) -> None:
    output = echo_pool.generate("abc", SamplingParams(n=3, max_tokens=2))
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert output.usage.completion_tokens == 6


def test_cut_off_at_the_default_length_is_told_once(echo_pool: Pool) -> None:
    with pytest.warns(EnginePoolWarning, match="2 of 2 outputs were cut off"):
        echo_pool.generate_many(["long enough prompt"] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        echo_pool.generate_many(["long enough prompt"] * 2, FIVE)


def test_timeout_returns_what_has_finished_and_frees_the_workers(echo_pool: Pool) -> None:
    params = [FIVE, SamplingParams(max_tokens=400_000)]
    with pytest.warns(EnginePoolWarning, match="1 timeout"):
        outputs = echo_pool.generate_many(["a", "b"], params, timeout_s=0.5)
    assert outputs[0].ok
    assert outputs[1].error is not None
    assert outputs[1].error.code is Code.TIMEOUT
    assert outputs[1].prompt == "b"
    assert (outputs[1].timings.e2e_s or 0) >= 0.5
    wait_for(lambda: echo_pool.status().in_flight == 0, "the abort of the late item")


def test_generate_ends_at_its_timeout(echo_pool: Pool) -> None:
    error = echo_pool.generate("late", SamplingParams(max_tokens=400_000), timeout_s=0.2).error
    assert error is not None
    assert error.code is Code.TIMEOUT
    assert echo_pool.generate("in time", FIVE, timeout_s=30).ok


def test_failed_outputs_keep_their_prompt(echo_pool: Pool) -> None:
    prompts: list[Any] = ["half \ud83d", {"prompt": "x" * 600}]
    with pytest.warns(EnginePoolWarning):
        outputs = echo_pool.generate_many(prompts, FIVE)
    assert [output.prompt for output in outputs] == ["half \ud83d", "x" * 600]


def test_chat_messages_say_what_to_do(echo_pool: Pool) -> None:
    error = echo_pool.generate([{"role": "user", "content": "hi"}], FIVE).error  # type: ignore[list-item]
    assert "use chat, chat_many or stream_chat" in str(error)


def test_misspelt_setting_is_suggested_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match="did you mean 'workers'"):
        Pool(engine="echo", worker=2)


def test_deadline_ends_a_running_item_and_spares_its_neighbour(echo_pool: Pool) -> None:
    params = [SamplingParams(max_tokens=400_000), FIVE]
    with pytest.warns(EnginePoolWarning, match="1 deadline_exceeded"):
        outputs = echo_pool.generate_many(["a", "b"], params, deadline_s=[0.3, None])
    assert outputs[0].error is not None
    assert outputs[0].error.code is Code.DEADLINE_EXCEEDED
    assert outputs[1].ok


def test_cancel_aborts_one_item_and_leaves_its_neighbours(echo_pool: Pool) -> None:
    doomed = echo_pool.submit("doomed", SamplingParams(max_tokens=400_000))
    neighbour = echo_pool.submit("neighbour", SamplingParams(max_tokens=50))
    wait_for(lambda: echo_pool.status().in_flight == 2, "both running")
    assert doomed.cancel()
    assert doomed.cancelled()
    assert neighbour.result(timeout=20).ok
    wait_for(lambda: echo_pool.status().in_flight == 0, "the abort")


def test_waiting_for_a_cancelled_future_ends(echo_pool: Pool) -> None:
    future = echo_pool.submit("doomed", SamplingParams(max_tokens=400_000))
    assert future.cancel()
    assert future.cancel()
    assert wait([future], timeout=10).done == {future}


def test_waiting_call_inside_a_callback_is_refused_and_submit_works(echo_pool: Pool) -> None:
    told: list[Any] = []

    def callback(_: object) -> None:
        with pytest.raises(InvalidRequest, match="callback"):
            echo_pool.generate("would wait for itself", FIVE)
        told.append(echo_pool.submit("fine", FIVE))

    echo_pool.submit("first", FIVE).add_done_callback(callback)
    wait_for(lambda: told, "the callback")
    assert told[0].result(timeout=20).ok


def test_submit_resolves_to_an_output_also_for_a_bad_item(echo_pool: Pool) -> None:
    assert echo_pool.submit("good", FIVE, request_id="mine").result(timeout=20).request_id == "mine"
    error = echo_pool.submit("", FIVE).result(timeout=20).error
    assert error is not None
    assert error.code is Code.INVALID_REQUEST


def test_lower_priority_numbers_go_first() -> None:
    with Pool(engine="echo", workers=1, step_s=0.002, max_num_seqs=1) as pool:
        blocker = pool.submit("blocker", SamplingParams(max_tokens=60))
        wait_for(lambda: pool.status().in_flight == 1, "the blocker to run")
        late = [pool.submit(f"late {i}", FIVE, priority=5) for i in range(4)]
        early = pool.submit("early", FIVE, priority=-1)
        finished = [future.result(timeout=20).timings.finished for future in (early, late[1], late[3])]
        assert blocker.result(timeout=20).ok
    assert finished == sorted(stamp for stamp in finished if stamp is not None)


def test_threads_may_share_a_pool(echo_pool: Pool) -> None:
    def one(index: int) -> Output:
        return echo_pool.generate(f"thread item {index}", SamplingParams(max_tokens=14))

    with ThreadPoolExecutor(16) as executor:
        outputs = list(executor.map(one, range(100)))
    assert [output.text for output in outputs] == [f"thread item {index}"[:14].ljust(14, "t")[:14] for index in range(100)]


def test_status_tells_workers_and_counts(echo_pool: Pool) -> None:
    echo_pool.generate("count me", FIVE)
    status = echo_pool.status()
    assert status.state is PoolState.READY
    assert status.finished > 0
    assert 0 < status.rss_bytes < 60 << 20
    for worker in status.workers:
        assert worker.state is WorkerState.READY
        assert worker.pid != status.pid
        assert (worker.rss_bytes or 0) > 1 << 20
        assert worker.cpus


def test_status_counts_tokens_and_rates_while_working(echo_pool: Pool) -> None:
    future = echo_pool.submit("busy", SamplingParams(max_tokens=400_000))
    try:
        wait_for(lambda: sum(worker.running for worker in echo_pool.status().workers) == 1, "one running")
        wait_for(lambda: any(worker.generation_tokens_per_s > 1 for worker in echo_pool.status().workers), "a rate")
    finally:
        future.cancel()


def test_timings_are_wall_clock_and_in_order(echo_pool: Pool) -> None:
    before = time.time()
    timings = echo_pool.generate("stamped", FIVE).timings
    stamps = [
        timings.submitted,
        timings.received,
        timings.leased,
        timings.arrived,
        timings.scheduled,
        timings.first_token,
        timings.last_token,
        timings.finished,
        timings.delivered,
    ]
    told = [stamp for stamp in stamps if stamp is not None]
    assert len(told) == 9
    assert told == sorted(told)
    assert before - 0.05 < told[0] <= told[-1] < time.time() + 0.05
    assert timings.tpot_s is not None


def test_connect_by_argument_environment_and_default(fresh_run_dir: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(engine="echo", workers=1) as first, Pool(engine="echo", workers=1) as second:
        assert first.endpoint != second.endpoint
        with Pool.connect() as default, Pool.connect(second.endpoint) as named:
            assert (default.pool_id, named.pool_id) == (first.pool_id, second.pool_id)
        monkeypatch.setenv("ENGINEPOOL_ENDPOINT", second.endpoint)
        with Pool.connect() as by_environment:
            assert by_environment.pool_id == second.pool_id
            assert by_environment.generate("hello", FIVE).ok
        assert second.generate("still there", FIVE).ok


def test_pool_in_a_forked_child_raises_at_once(echo_pool: Pool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            echo_pool.generate("from the child", FIVE)
        except ForkedPool:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert echo_pool.generate("from the parent", FIVE).ok


@pytest.mark.parametrize("call", ["generate", "generate_many"])
def test_interrupted_call_leaves_a_usable_pool(echo_pool: Pool, call: str) -> None:
    main_thread = threading.get_ident()

    def interrupt() -> None:
        wait_for(lambda: echo_pool.status().in_flight > 0, "the call to run")
        signal.pthread_kill(main_thread, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    endless = SamplingParams(max_tokens=400_000)
    with pytest.raises(KeyboardInterrupt):
        echo_pool.generate("x", endless) if call == "generate" else echo_pool.generate_many(["x"] * 20, endless)
    helper.join()
    wait_for(lambda: echo_pool.status().in_flight == 0, "the abort of the interrupted call", 10)
    assert [output.prompt for output in echo_pool.generate_many(["next"], FIVE)] == ["next"]


def test_close_in_the_middle_of_a_send_does_not_wait_for_itself(echo_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal handler does that closes the pool: the receiving thread can't end before the interrupted send does."""
    pool = Pool.connect(echo_pool.endpoint)
    plain = transport._send

    def interrupted(socket: Any, frames: transport.Frames, flags: int) -> None:
        monkeypatch.setattr(transport, "_send", plain)
        monkeypatch.setattr(pool._connection._thread, "join", lambda _: pytest.fail("waits for itself"))
        pool.close(drain=False)
        plain(socket, frames, flags)

    monkeypatch.setattr(transport, "_send", interrupted)
    future = pool.submit("abc", SamplingParams(max_tokens=100_000))
    with pytest.raises(PoolClosed):
        future.result(timeout=10)
    monkeypatch.undo()
    pool._connection._thread.join(10)
    assert pool._connection.is_ended
