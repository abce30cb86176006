"""enginepool: many vLLM engines behind one queue, nothing lost, nothing left behind."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginepool.client.aio import AsyncPool
    from enginepool.client.aio_sidecar import AsyncSidecar
    from enginepool.client.futures import OutputFuture
    from enginepool.client.many import EnginePoolWarning
    from enginepool.client.outputs import Output, Usage
    from enginepool.client.pool import Pool
    from enginepool.client.progress import Progress
    from enginepool.client.sidecar import Sidecar
    from enginepool.client.stream import AsyncStream, Delta, Stream
    from enginepool.clock import Timings
    from enginepool.errors import (
        Code,
        Draining,
        EndpointInUse,
        EngineMissing,
        EnginePoolError,
        ExitCode,
        ForkedPool,
        InvalidRequest,
        ItemError,
        ItemFailed,
        NoDispatcher,
        Overloaded,
        PoolClosed,
        PoolLost,
        SettingsError,
        StartError,
        StartTimeout,
    )
    from enginepool.payload import CompletionOutput, Logprob
    from enginepool.sampling import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
    from enginepool.status import Iteration, PoolState, PoolStatus, WorkerState, WorkerStatus

_HOMES = {
    "enginepool.client.aio": ("AsyncPool",),
    "enginepool.client.aio_sidecar": ("AsyncSidecar",),
    "enginepool.client.futures": ("OutputFuture",),
    "enginepool.client.many": ("EnginePoolWarning",),
    "enginepool.client.outputs": ("Output", "Usage"),
    "enginepool.client.pool": ("Pool",),
    "enginepool.client.progress": ("Progress",),
    "enginepool.client.sidecar": ("Sidecar",),
    "enginepool.client.stream": ("AsyncStream", "Delta", "Stream"),
    "enginepool.clock": ("Timings",),
    "enginepool.errors": (
        "Code",
        "Draining",
        "EndpointInUse",
        "EngineMissing",
        "EnginePoolError",
        "ExitCode",
        "ForkedPool",
        "InvalidRequest",
        "ItemError",
        "ItemFailed",
        "NoDispatcher",
        "Overloaded",
        "PoolClosed",
        "PoolLost",
        "SettingsError",
        "StartError",
        "StartTimeout",
    ),
    "enginepool.payload": ("CompletionOutput", "Logprob"),
    "enginepool.sampling": ("RepetitionDetectionParams", "SamplingParams", "StructuredOutputsParams"),
    "enginepool.status": ("Iteration", "PoolState", "PoolStatus", "WorkerState", "WorkerStatus"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "AsyncPool",
    "AsyncSidecar",
    "AsyncStream",
    "Code",
    "CompletionOutput",
    "Delta",
    "Draining",
    "EndpointInUse",
    "EngineMissing",
    "EnginePoolError",
    "EnginePoolWarning",
    "ExitCode",
    "ForkedPool",
    "InvalidRequest",
    "ItemError",
    "ItemFailed",
    "Iteration",
    "Logprob",
    "NoDispatcher",
    "Output",
    "OutputFuture",
    "Overloaded",
    "Pool",
    "PoolClosed",
    "PoolLost",
    "PoolState",
    "PoolStatus",
    "Progress",
    "RepetitionDetectionParams",
    "SamplingParams",
    "SettingsError",
    "Sidecar",
    "StartError",
    "StartTimeout",
    "Stream",
    "StructuredOutputsParams",
    "Timings",
    "Usage",
    "WorkerState",
    "WorkerStatus",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import enginepool` stays light for the processes it starts."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'enginepool' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """The public names, for those who explore."""
    return [*__all__, "__version__"]
