"""The ready file appears once and whole when the pool is up, goes when it takes no work any more, and is never a stale one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from conftest import Serve, wait_for

from enginepool import Pool, PoolState, SamplingParams
from enginepool.dispatcher.ready_file import ReadyFile
from enginepool.errors import ExitCode, SettingsError

LINE = {"state": "ready", "pid": 1}


def _no_warning(text: str) -> None:
    raise AssertionError(text)


def test_file_holds_the_ready_line_and_nothing_is_beside_it(tmp_path: Path) -> None:
    ReadyFile(tmp_path / "ready", _no_warning).write(LINE)
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]
    assert (tmp_path / "ready").read_text() == '{"state":"ready","pid":1}\n'


@pytest.mark.parametrize("stale", ['{"state":"ready","pid":1}\n', ""], ids=["ready-line", "empty"])
def test_stale_file_is_removed_at_the_start(tmp_path: Path, stale: str) -> None:
    (tmp_path / "ready").write_text(stale)
    ReadyFile(tmp_path / "ready", _no_warning)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["my notes", "[1]", '{"name": "x"}', '{"state": {"user": "data"}}', '{"state": "ready"}'])
def test_somebodys_file_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "notes").write_text(content)
    with pytest.raises(SettingsError, match="is no ready file"):
        ReadyFile(tmp_path / "notes", _no_warning)
    assert (tmp_path / "notes").read_text() == content


@pytest.mark.parametrize("path", ["/", "/nonexistent/ready", "/dev/null", "/proc/ready", "/tmp"])
def test_path_that_can_not_be_written_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match=f"--ready-file {path}"):
        ReadyFile(Path(path), _no_warning)


def test_withdraw_leaves_the_file_of_another_pool(tmp_path: Path) -> None:
    first = ReadyFile(tmp_path / "ready", _no_warning)
    first.write(LINE)
    ReadyFile(tmp_path / "ready", _no_warning).write(LINE | {"pid": 2})
    first.withdraw()
    assert json.loads((tmp_path / "ready").read_text())["pid"] == 2


def test_folder_that_has_gone_is_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "run").mkdir()
    file = ReadyFile(tmp_path / "run" / "ready", warnings.append)
    (tmp_path / "run").rmdir()
    file.write(LINE)
    file.withdraw()
    assert len(warnings) == 1
    assert "could not be written" in warnings[0]


def test_ready_file_is_there_while_the_pool_takes_work(serve: Serve, tmp_path: Path) -> None:
    path, config = tmp_path / "ready.json", tmp_path / "pool.toml"
    config.write_text("[engine_args]\nstep_s = 0.005\n")
    path.write_text('{"state": "ready", "pid": 1}')
    served = serve("--engine", "echo", "--config", str(config), "--ready-file", str(path))
    seen: list[str] = []

    def is_fresh() -> bool:
        seen.append(path.read_text() if path.exists() else "")
        return str(served.pid) in seen[-1]

    wait_for(is_fresh, "the ready file")
    line = json.loads(seen[-1])  # the first sight of it was whole
    assert line == json.loads(served.ready_line())
    with Pool.connect(line["endpoint"]) as pool:
        future = pool.submit("in flight", SamplingParams(max_tokens=100))
        wait_for(lambda: pool.status().in_flight == 1, "one in flight")
        served.process.terminate()
        wait_for(lambda: pool.status().state is PoolState.DRAINING, "the drain")
        assert not path.exists()
        assert future.result(timeout=20).ok
    assert served.finish()[0] == ExitCode.OK


def test_ready_file_of_a_failed_start_stays_with_the_reason(serve: Serve, tmp_path: Path) -> None:
    path, config = tmp_path / "ready.json", tmp_path / "pool.toml"
    config.write_text("[engine_args]\nfail_start = [0]\n")
    served = serve("--engine", "echo", "--config", str(config), "--ready-file", str(path))
    assert served.finish()[0] == ExitCode.START_FAILED
    line = json.loads(path.read_text())
    assert (line["state"], line["exit_code"]) == ("failed", ExitCode.START_FAILED)
    assert "refuses" in line["error"]


def test_ready_file_goes_with_an_interrupted_pool(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    served = serve("--engine", "echo", "--ready-file", str(path))
    served.ready_line()
    assert path.exists()
    for _ in range(2):
        served.process.send_signal(signal.SIGINT)
    assert served.finish()[0] in (ExitCode.INTERRUPTED, ExitCode.OK)
    assert not path.exists()


def test_bad_ready_file_is_told_at_once(serve: Serve) -> None:
    served = serve("--engine", "echo", "--ready-file", "/nonexistent/ready.json")
    code, stderr = served.finish()
    assert code == json.loads(served.ready_line())["exit_code"] == ExitCode.USAGE
    assert "--ready-file /nonexistent/ready.json: No such file or directory" in stderr
    assert "Traceback" not in stderr
