"""Another user gets nothing of a pool, and can't put anything in its place; shown by a process that really is another user."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ENGINEPOOL, Served

from enginepool import NoDispatcher, Pool, SettingsError, rundir
from enginepool.errors import ExitCode

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

AS_NOBODY = """
import os, sys, socket, traceback
import enginepool, enginepool.rundir
import enginepool.client.pool, enginepool.client.connection  # before it becomes somebody who can't read them
from enginepool.errors import EnginePoolError
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
try:
    print(eval(sys.argv[1]))
except (EnginePoolError, OSError) as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may enter (pytest's own are closed to other users, which would prove nothing)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def pool_dir(shared: Path) -> Iterator[Path]:
    """The run directory of a running pool of this user's."""
    served = Served("--engine", "echo", env={"ENGINEPOOL_RUN_DIR": str(shared / "run")})
    served.ready_line()
    yield shared / "run"
    served.end()


def _as_nobody(expression: str, run_dir: Path) -> str:
    """What an expression yields for another user, or the error it raises."""
    command = [sys.executable, "-c", AS_NOBODY.format(uid=NOBODY), expression]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"ENGINEPOOL_RUN_DIR": str(run_dir)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _connect(path: Path) -> str:
    return f"socket.socket(socket.AF_UNIX).connect({str(path)!r}) or 'connected'"


def test_other_user_sees_what_everybody_may_see(shared: Path) -> None:
    """The control: this process is another user, and the folder above is no obstacle."""
    (shared / "public").write_text("for all")
    (shared / "public").chmod(0o644)
    assert _as_nobody("os.getuid(), os.geteuid(), os.getgroups()", shared) == f"({NOBODY}, {NOBODY}, [])"
    assert _as_nobody(f"open({str(shared / 'public')!r}).read()", shared) == "for all"


def test_other_user_gets_into_no_file_of_a_pool(pool_dir: Path) -> None:
    assert _as_nobody(f"os.listdir({str(pool_dir)!r})", pool_dir).startswith("PermissionError")
    for name in os.listdir(pool_dir):
        assert _as_nobody(f"open({str(pool_dir / name)!r})", pool_dir).startswith("PermissionError")
        assert _as_nobody(_connect(pool_dir / name), pool_dir).startswith("PermissionError")


def test_other_user_is_kept_out_by_the_files_modes_too(pool_dir: Path) -> None:
    """Even where somebody has opened the folder."""
    pool_dir.chmod(0o755)
    assert len(os.listdir(pool_dir)) == 4
    for name in os.listdir(pool_dir):
        assert _as_nobody(f"open({str(pool_dir / name)!r})", pool_dir).startswith(("PermissionError", "OSError: [Errno 6]"))
        assert _as_nobody(_connect(pool_dir / name), pool_dir).startswith("PermissionError")


def test_other_user_is_told_that_the_pool_is_not_theirs(pool_dir: Path) -> None:
    endpoint = f"ipc://{pool_dir}/default.sock"
    assert "is not a folder of yours" in _as_nobody("enginepool.client.pool.Pool.connect()", pool_dir)
    elsewhere = pool_dir.parent / "elsewhere"
    told = _as_nobody(f"enginepool.client.pool.Pool.connect({endpoint!r})", elsewhere)
    assert told == f"NoDispatcher: no access to the pool at {endpoint}: {pool_dir}/default.sock.secret: Permission denied"
    theirs = pool_dir.parent / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    told = _as_nobody(f"enginepool.rundir.claim_endpoint({endpoint!r}, 'pool')", theirs)
    assert told.startswith("SettingsError")
    assert "Permission denied" in told


def test_other_user_can_not_serve_in_this_users_run_directory(shared: Path) -> None:
    (shared / "run").mkdir(mode=0o700)
    assert "is not a folder of yours" in _as_nobody("enginepool.rundir.make_run_dir()", shared / "run")


@pytest.mark.parametrize(
    ("mode", "owner", "told"),
    [
        pytest.param(0o700, NOBODY, "is not a folder of yours; remove it or set ENGINEPOOL_RUN_DIR", id="another-users"),
        pytest.param(0o770, 0, r"is open to others \(mode 770\); chmod 700", id="group-writable"),
        pytest.param(0o707, 0, r"is open to others \(mode 707\); chmod 700", id="world-writable"),
        pytest.param(0o750, 0, r"is open to others \(mode 750\); chmod 700", id="group-readable"),
    ],
)
def test_run_directory_that_others_may_use_is_refused_by_both_sides(
    shared: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, told: str
) -> None:
    folder = shared / "run"
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, owner, owner)
    monkeypatch.setenv("ENGINEPOOL_RUN_DIR", str(folder))
    served = Served("--engine", "echo")
    code, stderr = served.finish()
    assert code == ExitCode.USAGE
    with pytest.raises(SettingsError, match=told) as caught:
        Pool.connect()
    assert str(caught.value) in stderr
    status = subprocess.run([*ENGINEPOOL, "status"], capture_output=True, text=True, timeout=60)
    assert (status.returncode, status.stderr) == (ExitCode.USAGE, f"enginepool status: error: {caught.value}\n")


def test_run_directory_that_is_a_link_is_refused_by_a_client(shared: Path, pool_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared / "link").symlink_to(pool_dir)
    monkeypatch.setenv("ENGINEPOOL_RUN_DIR", str(shared / "link"))
    with pytest.raises(SettingsError, match="is not a folder of yours"):
        Pool.connect()


BAIT = """
import fcntl, socket, time
from pathlib import Path
folder = Path(sys.argv[2])
sock = socket.socket(socket.AF_UNIX); sock.bind(str(folder / 'pool.sock')); sock.listen()
secret = open(folder / 'pool.sock.secret', 'wb'); secret.write(b's' * 32); secret.flush(); fcntl.flock(secret, fcntl.LOCK_EX)
print('ready', flush=True); sys.stdin.read()
"""


def test_client_does_not_go_to_a_pool_that_another_user_has_put_there(shared: Path, fresh_run_dir: Path) -> None:
    """Nobody serves what looks like a pool; a third user must not send it anything."""
    folder = shared / "bait"
    folder.mkdir()
    folder.chmod(0o1777)
    code = AS_NOBODY.format(uid=NOBODY).replace("print(eval(sys.argv[1]))", "exec(sys.argv[1])")
    bait = subprocess.Popen([sys.executable, "-c", code, BAIT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert bait.stdout is not None
        assert bait.stdout.readline() == "ready\n"
        (folder / "pool.sock.secret").chmod(0o644)
        ask = f"enginepool.client.pool.Pool.connect('ipc://{folder}/pool.sock')"
        command = [sys.executable, "-c", AS_NOBODY.format(uid=NOBODY - 1), ask]
        env = os.environ | {"ENGINEPOOL_RUN_DIR": str(shared / "third")}
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env).stdout
        assert f"NoDispatcher: the pool at ipc://{folder}/pool.sock is another user's (uid {NOBODY})" in told
    finally:
        bait.communicate()


def test_files_that_another_user_has_put_in_the_way_are_not_used(shared: Path, fresh_run_dir: Path) -> None:
    """In a folder that all may write to: a draft that stays theirs, a lock that is a link to a file of ours."""
    folder = shared / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    endpoint = f"ipc://{folder}/pool.sock"
    mine = shared / "mine"
    mine.write_text("12")
    for name in ("pool.sock.lock", "pool.sock.draft", "pool.sock.secret"):
        (folder / name).symlink_to(mine)
        with pytest.raises(SettingsError, match="exists and is not a pool's"):
            rundir.claim_endpoint(endpoint, "pool")
        (folder / name).unlink()
    assert mine.read_text() == "12"


def test_endpoint_where_all_may_rename_files_is_refused(shared: Path, fresh_run_dir: Path) -> None:
    folder = shared / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(SettingsError, match=r"everybody may rename files in .*open \(mode 777\); choose another path"):
        rundir.claim_endpoint(f"ipc://{folder}/pool.sock", "pool")


def test_secret_of_another_user_is_not_read_even_when_it_can_be(shared: Path, fresh_run_dir: Path) -> None:
    """Root may read all; a secret in its own run directory that is somebody else's is a trap all the same."""
    folder = rundir.make_run_dir()
    (folder / "default.sock.secret").write_bytes(b"s" * 32)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises((NoDispatcher, SettingsError), match="is not a folder of yours"):
        rundir.read_secret(f"ipc://{folder}/default.sock")
    os.chown(folder, 0, 0)
