"""Pool: the way in for Python programs, embedded (it starts and owns a dispatcher) or connected to a running one."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from enginepool import rundir
from enginepool.client.connection import Connection
from enginepool.client.futures import OutputFuture, Waiter
from enginepool.client.loading import shows_loading
from enginepool.client.many import ManyCall, raise_first, warn_of
from enginepool.client.outputs import Output
from enginepool.client.progress import ProgressCallback
from enginepool.client.requests import (
    EncodedParams,
    Params,
    Prompt,
    check_deadline,
    check_priority,
    check_seconds,
    encode_item,
    encode_sampling,
    list_prompts,
    spread,
)
from enginepool.client.settings import make_settings
from enginepool.client.sidecar import Sidecar, start_shown
from enginepool.client.ticket import Sink, Ticket
from enginepool.clock import monotonic
from enginepool.config import PoolSettings
from enginepool.errors import Code, ForkedPool, InvalidRequest, ItemError, PoolClosed, PoolError
from enginepool.protocol import Stop, SubmitItem
from enginepool.sampling import SamplingParams
from enginepool.status import PoolStatus


class _Held:
    """What a pool holds, apart from the pool, so that a finalizer can release it."""

    def __init__(self, connection: Connection | None, sidecar: Sidecar | None) -> None:
        self.connection = connection
        self.sidecar = sidecar
        self.pid = os.getpid()

    def release(self) -> None:
        """Garbage collection and interpreter exit end here: no draining, nothing left behind."""
        if os.getpid() != self.pid:
            return
        if self.connection is not None:
            self.connection.close()
        if self.sidecar is not None:
            self.sidecar.kill()


class Pool:
    """A pool of engines behind one queue.

    `Pool(model, workers=2, **engine_args)` starts one; any vLLM engine argument is given by its own name.
    `Pool.connect()` joins a running one. Thread-safe. Raises SettingsError for a bad setting, StartError when no worker
    boots (EngineMissing when vLLM is not there), EndpointInUse when `endpoint` is taken.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        workers: int | Literal["auto"] = "auto",
        engine: Literal["vllm", "echo"] = "vllm",
        batch_size: int | None = None,
        batch_timeout_s: float | None = None,
        cpu_affinity: str = "auto",
        engine_core: Literal["auto", "inproc", "mp"] = "auto",
        start_timeout_s: float = 600.0,
        drain_timeout_s: float = 300.0,
        shutdown_timeout_s: float = 5.0,
        min_ready: int | None = None,
        progress: bool | None = None,
        **engine_args: Any,
    ) -> None:
        settings = make_settings(
            model,
            workers=workers,
            engine=engine,
            batch_size=batch_size,
            batch_timeout_s=batch_timeout_s,
            cpu_affinity=cpu_affinity,
            engine_core=engine_core,
            start_timeout_s=start_timeout_s,
            drain_timeout_s=drain_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
            min_ready=min_ready,
            **engine_args,
        )
        sidecar = start_shown(settings, progress=shows_loading(progress))
        self._drain_timeout_s = settings.drain_timeout_s
        self._shutdown_timeout_s = settings.shutdown_timeout_s
        try:
            connection = Connection(sidecar.endpoint)
        except BaseException:
            sidecar.kill()
            raise
        self._hold(connection, sidecar)

    @classmethod
    def connect(cls, endpoint: str | None = None) -> Pool:
        """Join a running pool: `endpoint`, else ENGINEPOOL_ENDPOINT, else this user's default endpoint.

        Raises NoDispatcher when nothing answers there.
        """
        pool = cls.__new__(cls)
        pool._drain_timeout_s = PoolSettings().drain_timeout_s
        pool._shutdown_timeout_s = PoolSettings().shutdown_timeout_s
        pool._hold(Connection(endpoint or rundir.default_endpoint()), None)
        return pool

    def _hold(self, connection: Connection, sidecar: Sidecar | None) -> None:
        self._held = _Held(connection, sidecar)
        self._connection = connection
        self._closing = threading.RLock()  # a signal handler may close in the middle of a close
        self._is_closed = False
        self._is_released = False
        self._finalizer = weakref.finalize(self, self._held.release)

    @property
    def endpoint(self) -> str:
        """Where this pool's dispatcher listens; what `Pool.connect` takes."""
        return self._connection.welcome.endpoint

    @property
    def model(self) -> str:
        """What the pool runs."""
        return self._connection.welcome.model

    @property
    def pool_id(self) -> str:
        """The pool's own id."""
        return self._connection.welcome.pool_id

    def generate(self, prompt: Prompt, params: Params = None, *, timeout_s: float | None = None) -> Output:
        """Run one prompt and return its Output (look at `ok`); at `timeout_s` with the error `timeout`.

        Raises PoolLost, PoolClosed, InvalidRequest, and Overloaded or Draining where the pool does not take it.
        """
        if check_seconds("timeout_s", timeout_s) is not None:
            return self._generate_within(prompt, params, timeout_s)
        waiter = Waiter()
        self._usable()
        seq = self._start(waiter, prompt, params, None, 0, None)
        try:
            return waiter.wait()
        except BaseException:
            self._connection.give_up([seq])
            raise

    def generate_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        request_ids: Sequence[str] | None = None,
        priorities: int | Sequence[int] = 0,
        deadline_s: float | Sequence[float | None] | None = None,
        on_error: Literal["return", "raise"] = "return",
        progress: bool | ProgressCallback = False,
        timeout_s: float | None = None,
    ) -> list[Output]:
        """Run many prompts; returns one Output a prompt, in input order, always.

        `params` is one for all or one an item; `deadline_s` counts from the item's submission; lower `priorities` go
        first. With `on_error="raise"` the first failed item raises ItemFailed after all have ended. At `timeout_s` the
        unfinished items end with the code `timeout`. `progress` shows a bar, or is called with a Progress about ten times a
        second and once at the end; what it raises ends the call. Raises InvalidRequest for a call that makes no sense, PoolLost (with
        the finished outputs) when the pool is gone.
        """
        connection = self._usable()
        if on_error not in ("return", "raise"):
            raise InvalidRequest(f"on_error is 'return' or 'raise', not {on_error!r}")
        items = list_prompts(prompts)
        timeout_s = check_seconds("timeout_s", timeout_s)
        if not isinstance(priorities, Sequence):
            check_priority(priorities)
        if not isinstance(deadline_s, Sequence):
            check_deadline(deadline_s)
        encoded = _encode_all(params, len(items))
        call = ManyCall(
            connection,
            items,
            encoded,
            spread("request_ids", _checked_ids(request_ids), len(items)),
            spread("priorities", priorities, len(items)),
            spread("deadline_s", deadline_s, len(items)),
            timeout_s,
        )
        outputs = call.run(progress=progress)
        if on_error == "raise":
            raise_first(outputs)
        warn_of(outputs, encoded, stacklevel=3)
        return outputs

    def submit(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> OutputFuture:
        """Start one prompt and return at once. `cancel()` on the future aborts it; a full backlog raises Overloaded from it."""
        future = OutputFuture()
        seq = self._start(future, prompt, params, request_id, priority, deadline_s)
        connection = self._connection
        future.on_cancel = lambda: connection.give_up([seq])
        return future

    def status(self) -> PoolStatus:
        """What the pool and each of its workers are doing. Raises PoolLost when the dispatcher is gone."""
        return self._usable().status()

    def close(self, drain: bool = True) -> None:
        """Finish this client's items and calls, then let go; an embedded pool stops. May be called twice, from any thread.

        With `drain=False` whatever still waits ends with PoolClosed at once, also when another thread's `close` is draining.
        """
        if os.getpid() != self._held.pid:
            return
        if not drain:
            self._is_closed = True
            self._connection.abandon()
        with self._closing:
            if self._is_released:
                return
            self._is_closed = True
            try:
                if drain:
                    self._connection.wait_idle(self._drain_timeout_s)
            finally:  # an interrupt of the drain must not leave the pool running
                self._is_released = True
                self._release()

    def _release(self) -> None:
        connection, sidecar = self._connection, self._held.sidecar
        if sidecar is not None:
            self._stop(connection, sidecar)
        connection.close()
        if sidecar is not None:
            sidecar.kill()
        self._finalizer.detach()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<Pool {self.model} at {self.endpoint}{' (closed)' if self._is_closed else ''}>"

    def _generate_within(self, prompt: Prompt, params: Params, timeout_s: float | None) -> Output:
        call = ManyCall(self._usable(), [prompt], [encode_sampling(params)], [None], [0], [None], timeout_s)
        return call.run(progress=False)[0]

    def _start(self, sink: Sink, prompt: Prompt, params: Params, request_id: str | None, priority: int, deadline_s: float | None) -> int:
        """Send one item whose result goes to `sink`; returns its number."""
        connection = self._usable(waits=False)
        check_priority(priority)
        check_deadline(deadline_s)
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidRequest(f"request_id is text, not {request_id!r:.40}")
        seq, now = connection.next_seq(), monotonic()
        encoded = encode_item(prompt, encode_sampling(params), connection.welcome.limits.max_frame_bytes)
        ticket = Ticket(seq, 0, str(seq) if request_id is None else request_id, None, None, now, sink)
        if isinstance(encoded, ItemError):
            sink.put(ticket.failed(encoded, connection.welcome.anchor, monotonic()))
            return seq
        ticket.prompt, ticket.prompt_token_ids = encoded.prompt, encoded.prompt_token_ids
        connection.submit([ticket], [SubmitItem(seq, priority, deadline_s, encoded.params.sequences)], [encoded.frame])
        return seq

    def _stop(self, connection: Connection, sidecar: Sidecar) -> None:
        try:
            connection.post(Stop(), even_if_abandoned=True)
        except (PoolError, PoolClosed):
            return
        if sidecar.wait(self._shutdown_timeout_s + 2):
            connection.wait_lost(1.0)  # its last results are read before it is let go

    def _usable(self, *, waits: bool = True) -> Connection:
        if os.getpid() != self._held.pid:
            raise ForkedPool("this Pool belongs to the parent process; in a forked child use Pool.connect(endpoint)")
        if self._is_closed:
            raise PoolClosed("the pool is closed; make a new one or connect again")
        if self._connection.is_own_thread and waits:
            raise InvalidRequest("a future's callback must not wait for the pool: it runs on the thread that receives; use submit")
        return self._connection


def _checked_ids(request_ids: Sequence[str] | None) -> Sequence[str] | None:
    if request_ids is None:
        return None
    if isinstance(request_ids, str) or not isinstance(request_ids, Sequence) or not all(isinstance(name, str) for name in request_ids):
        raise InvalidRequest("request_ids is a list with one string a prompt")
    return request_ids


def _encode_all(params: Any, count: int) -> list[EncodedParams | ItemError]:
    """One for all is checked once and raises; of many, each bad one is its own item's error."""
    if isinstance(params, Mapping | SamplingParams) or not isinstance(params, Sequence):
        return [encode_sampling(params)] * count
    encoded: list[EncodedParams | ItemError] = []
    for one in spread("params", params, count):
        try:
            encoded.append(encode_sampling(one))
        except InvalidRequest as error:
            encoded.append(ItemError(Code.INVALID_REQUEST, str(error)))
    return encoded
