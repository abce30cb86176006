"""The report as text: plain sections that read the same in a terminal of 80 columns and in a file."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from enginepool.dispatcher.cpuset import format_cpus
from enginepool.dispatcher.kv_budget import format_bytes
from enginepool.dispatcher.placement import describe
from enginepool.dispatcher.plan import Plan
from enginepool.doctor.facts import Facts
from enginepool.doctor.verdict import Finding

Row = tuple[str, str]
WIDTH = 80
LABEL = 20


def render(facts: Facts, findings: Sequence[Finding], code: int) -> str:
    """All sections, the findings last: they are what stays on the screen."""
    sections = {
        "machine": _machine(facts),
        "plan": _plan(facts.plan) if facts.plan else [],
        "settings that are not default": [(name, f"{value}  ({origin})") for name, (value, origin) in facts.settings.items()],
        "packages": _packages(facts),
        "model and endpoint": _places(facts),
        "folders": _folders(facts),
        "limits": _limits(facts),
        "environment (what the workers get of it)": [(item.name, _fate(item.value, item.worker)) for item in facts.variables],
    }
    parts = [_section(title, rows) for title, rows in sections.items() if rows]
    return "\n".join([*parts, "findings", *_findings(findings), "", verdict(findings, code)])


def verdict(findings: Sequence[Finding], code: int) -> str:
    """The last line."""
    count = Counter(finding.level for finding in findings)
    numbers = ", ".join(f"{count[level]} {level}{'s' * (count[level] != 1)}" for level in ("error", "warning"))
    return f"{numbers}: `enginepool serve` would " + ("start" if code == 0 else f"fail with exit code {code}")


def _section(title: str, rows: Sequence[Row]) -> str:
    return "\n".join([title, *(line for label, text in rows for line in _row(label, text)), ""])


def _row(label: str, text: str) -> list[str]:
    head = f"  {label:<{LABEL}}"
    if len(head.rstrip()) >= LABEL + 2:
        return [f"  {label}", *_wrap(" " * (LABEL + 2), text)]
    return _wrap(head, text)


def _wrap(head: str, text: str, room: str = " " * (LABEL + 2)) -> list[str]:
    # Paths and commands are for copying, so no word is ever cut.
    lines = textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=room, break_on_hyphens=False, break_long_words=False)
    return lines or [head.rstrip()]


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield from _wrap(f"  {finding.level:<8} ", f"{finding.topic}: {finding.text}", " " * 11)
        if finding.remedy:
            yield from _wrap(" " * 11 + "→ ", finding.remedy, " " * 13)


def _machine(facts: Facts) -> list[Row]:
    machine = facts.machine
    quota = "none" if machine.cpu_quota is None else f"{machine.cpu_quota:g} cores"
    memory = f"{_bytes(machine.memory_total_bytes)}, {_bytes(machine.memory_available_bytes)} available"
    rows = [
        ("online cpus", format_cpus(machine.online_cpus)),
        ("cgroup cpuset", "not readable" if machine.cpuset is None else format_cpus(machine.cpuset)),
        ("cgroup quota", quota),
        ("inherited mask", format_cpus(machine.inherited_cpus)),
        ("physical cores", str(len(machine.cores)) if machine.cores else "not readable"),
        *((f"NUMA node {node.id}", f"cpus {format_cpus(node.cpus)}, {_bytes(node.memory_bytes)}") for node in machine.nodes),
        ("memory", memory),
        ("cgroup memory limit", "none" if machine.memory_limit_bytes is None else _bytes(machine.memory_limit_bytes)),
        ("GPUs", "none found" if not machine.gpus else str(len(machine.gpus))),
    ]
    for gpu in machine.gpus:
        node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
        rows.append((f"GPU {gpu.index}", f"{gpu.name or 'unknown'}{node}"))
    if facts.visible_devices is not None:
        rows.append(("CUDA_VISIBLE_DEVICES", facts.visible_devices or "(empty)"))
    return rows


def _plan(plan: Plan) -> list[Row]:
    rows = [(label, text) for label, _, text in (line.partition(": ") for line in describe(plan))]
    rows += [(f"{name} from", origin) for name, origin in plan.origins.items()]
    worker = plan.workers[0]
    return [*rows, ("set for worker 0", " ".join(f"{name}={value}" for name, value in worker.env_set.items()))]


def _packages(facts: Facts) -> list[Row]:
    rows = []
    for name, package in facts.packages.found.items():
        build = f" (built for {package.build})" if package.build and "+" not in package.version else ""
        rows.append((name, package.version + build))
    return rows or [("vllm", "not installed")]


def _places(facts: Facts) -> list[Row]:
    rows: list[Row] = []
    if (model := facts.model) is not None:
        state = "" if model.is_there else ", not there yet"
        rows.append(("model", f"{model.name} ({model.folder or model.kind}{state})" if model.kind != "echo" else "none, echo engine"))
    if (found := facts.endpoint) is not None:
        rows.append(("run directory", f"{found.run_dir}{'' if found.run_dir_exists else ' (would be made)'}"))
        rows.append(("endpoint", found.endpoint))
    return rows


def _folders(facts: Facts) -> list[Row]:
    rows = []
    for folder in facts.folders:
        state = folder.fault or ("there" if folder.exists else "would be made")
        rows.append((folder.name, f"{folder.path}  ({folder.origin}; {state}; {_bytes(folder.free_bytes)} free)"))
    return rows


def _limits(facts: Facts) -> list[Row]:
    limits = facts.limits
    return [
        ("open files", _count(limits.open_files)),
        ("processes", _count(limits.processes) + ("" if limits.num_tasks is None else f", {limits.num_tasks} in use")),
        ("cgroup pids", "no limit" if limits.pids_left is None else f"{limits.pids_left} left"),
        ("address space", "no limit" if limits.address_space_bytes is None else _bytes(limits.address_space_bytes)),
        ("locked memory", "no limit" if limits.locked_memory_bytes is None else _bytes(limits.locked_memory_bytes)),
        ("/dev/shm", f"{_bytes(limits.shm_free_bytes)} free"),
    ]


def _fate(value: str, worker: str) -> str:
    return value if worker == "kept" else f"{value}  ({worker if worker == 'removed' else f'becomes {worker}'})"


def _count(number: int | None) -> str:
    return "no limit" if number is None else str(number)


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else format_bytes(number)
