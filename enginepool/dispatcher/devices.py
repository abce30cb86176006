"""Decide which GPUs the engines may use and how many workers they carry; pure."""

from __future__ import annotations

from collections.abc import Sequence

from enginepool.dispatcher.machine import Gpu, Machine
from enginepool.dispatcher.plan import Device, PlacementRequest
from enginepool.errors import SettingsError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def find_devices(machine: Machine, request: PlacementRequest) -> tuple[Device, ...]:
    """The GPUs to place workers on, in order; none for echo engines and on CPU.

    `CUDA_VISIBLE_DEVICES` restricts and orders them and its entries are kept word for word (UUIDs, MIG names). Where no GPU was
    found it is believed only if `device` is "cuda": schedulers set it on CPU machines too.
    Raises SettingsError for an entry that names no GPU, for a repeated one, and for "cuda" without any GPU.
    """
    if request.engine == "echo" or request.device == "cpu" or (request.device == "auto" and not machine.gpus):
        return ()
    visible = request.environ.get(VARIABLE)
    devices = _all_devices(machine) if visible is None else _named_devices(machine.gpus, visible)
    if not devices and request.device == "cuda":
        shown = "not set" if visible is None else repr(visible)
        raise SettingsError(
            f"device is 'cuda' but no GPU is usable: {len(machine.gpus)} found, {VARIABLE} is {shown}; "
            "check the driver and that variable, or set device to 'cpu'"
        )
    return devices


def count_workers(request: PlacementRequest, num_devices: int) -> tuple[int, str]:
    """How many workers to run, and why in words.

    Raises SettingsError for sizes below 1 and for more workers than the devices carry.
    """
    for name, size in (("tensor_parallel_size", request.tensor_parallel_size), ("pipeline_parallel_size", request.pipeline_parallel_size)):
        if size < 1:
            raise SettingsError(f"{name} is {size}; it must be 1 or more")
    if request.workers == "auto":
        return _automatic(request, num_devices)
    if request.workers < 1:
        raise SettingsError(f"workers is {request.workers}; it must be 1 or more, or 'auto'")
    needed = request.workers * request.ranks
    if num_devices and needed > num_devices:
        raise SettingsError(
            f"workers is {request.workers}: with {_sizes(request)} that takes {needed} devices, but {num_devices} are visible; "
            f"use at most {num_devices // request.ranks} workers or smaller parallel sizes"
        )
    return request.workers, "set by the user"


def _automatic(request: PlacementRequest, num_devices: int) -> tuple[int, str]:
    if request.engine == "echo":
        return 1, "auto: 1 echo engine"
    if not num_devices:
        return 1, "auto: 1 on CPU"
    workers = num_devices // request.ranks
    if not workers:
        raise SettingsError(f"{_sizes(request)} take {request.ranks} devices per worker, but {num_devices} are visible; use smaller sizes")
    return workers, f"auto: {num_devices} devices ÷ {request.ranks} per worker"


def _sizes(request: PlacementRequest) -> str:
    return f"tensor_parallel_size {request.tensor_parallel_size} × pipeline_parallel_size {request.pipeline_parallel_size}"


def _all_devices(machine: Machine) -> tuple[Device, ...]:
    return tuple(Device(str(gpu.index), gpu.numa_node) for gpu in machine.gpus)


def _named_devices(gpus: Sequence[Gpu], visible: str) -> tuple[Device, ...]:
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")) if visible.strip() else ():
        # CUDA reads the list only up to the first -1.
        if name == "-1":
            break
        if name in names:
            raise _unusable(visible, f"{name!r} is listed twice")
        names.append(name)
    return tuple(_resolve(gpus, name, visible) for name in names)


def _resolve(gpus: Sequence[Gpu], name: str, visible: str) -> Device:
    if name.startswith(("GPU-", "MIG-")):
        return Device(name, next((gpu.numa_node for gpu in gpus if _names_gpu(name, gpu)), None))
    if not (name.isascii() and name.isdecimal() and len(name) <= 4):
        raise _unusable(visible, f"{name!r} is neither an index nor a GPU- or MIG- name")
    if gpus and int(name) >= len(gpus):
        raise _unusable(visible, f"there is no device {name}, only 0 to {len(gpus) - 1}")
    return Device(name, gpus[int(name)].numa_node if gpus else None)


def _unusable(visible: str, reason: str) -> SettingsError:
    return SettingsError(f"{VARIABLE} is {visible!r}: {reason}; correct or unset it")


def _names_gpu(name: str, gpu: Gpu) -> bool:
    # CUDA takes shortened UUIDs; older MIG names carry the UUID of their GPU.
    return gpu.uuid is not None and (gpu.uuid.startswith(name) or gpu.uuid in name)
