"""The run directory: which endpoint a pool holds, who holds it, and the secret that lets a client in.

Per endpoint there are a lock (held while the pool lives), a secret (0600) and, for ipc, the sockets. The lock is what
makes an endpoint exclusive: a second ZeroMQ bind on an ipc path succeeds silently and steals it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from enginepool.errors import EndpointInUse, NoDispatcher, SettingsError

MAX_IPC_PATH_BYTES = 107
_LOOPBACK = re.compile(r"^tcp://(127(?:\.\d{1,3}){3}|localhost):(\d+)$")


def run_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """This user's run directory: ENGINEPOOL_RUN_DIR, else XDG_RUNTIME_DIR/enginepool, else one in the temp folder."""
    if chosen := environ.get("ENGINEPOOL_RUN_DIR"):
        return Path(chosen)
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "enginepool"
    return Path(tempfile.gettempdir()) / f"enginepool-{os.getuid()}"


def make_run_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Create the run directory with mode 0700. Raises SettingsError when another user owns it or it can't be made."""
    folder = run_dir(environ)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise SettingsError(f"run directory {folder}: {error.strerror}; set ENGINEPOOL_RUN_DIR to a writable folder") from None
    check_owner(folder, info)
    return folder


def check_owner(folder: Path, info: os.stat_result) -> None:
    """Raise SettingsError unless the run directory is a folder of this user's alone."""
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise SettingsError(f"run directory {folder} is not a folder of yours; remove it or set ENGINEPOOL_RUN_DIR")
    if stat.S_IMODE(info.st_mode) & 0o077:
        mode = stat.S_IMODE(info.st_mode)
        raise SettingsError(f"run directory {folder} is open to others (mode {mode:o}); chmod 700 it or set ENGINEPOOL_RUN_DIR")


def default_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Where `Pool.connect()` and the commands look when nothing is said."""
    return environ.get("ENGINEPOOL_ENDPOINT") or f"ipc://{run_dir(environ)}/default.sock"


def check_endpoint(endpoint: str) -> None:
    """Raise SettingsError for an endpoint that can not be served or would not be safe."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path.startswith("/"):
            raise SettingsError(f"endpoint {endpoint}: the path is not absolute; write ipc:///path/to.sock")
        if len(os.fsencode(path)) + len(".back") > MAX_IPC_PATH_BYTES:
            raise SettingsError(f"endpoint {endpoint}: the path is longer than {MAX_IPC_PATH_BYTES - 5} bytes; set ENGINEPOOL_RUN_DIR")
    elif endpoint.startswith("tcp://"):
        match = _LOOPBACK.match(endpoint)
        if not match:
            raise SettingsError(
                f"endpoint {endpoint}: traffic is not encrypted yet, so only loopback is served; write tcp://127.0.0.1:PORT or ipc:///path"
            )

        if int(match[2]) > 65535:
            raise SettingsError(f"endpoint {endpoint}: there is no such port; a port is at most 65535")
    else:
        raise SettingsError(f"endpoint {endpoint}: no such kind of address; write ipc:///path or tcp://127.0.0.1:PORT")


class Claim:
    """An endpoint held by this process until `release()`; the secret is in `secret`, the ipc path of the workers in `back`."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.secret = secrets.token_bytes(32)
        self._folder = folder
        refuse_foreign_files(endpoint, folder)
        self._lock_path = _lock_path(endpoint, folder)
        self._lock_fd = _take_lock(self._lock_path, endpoint)
        self._secret_path: Path | None = None
        self._secret_fd: int | None = None
        self.back = f"ipc://{back_path(endpoint, folder)}"

    def publish(self, endpoint: str) -> None:
        """Write the secret beside the endpoint the kernel really gave, and close the sockets' files to others."""
        self.endpoint = endpoint
        for address in (endpoint, self.back):
            if address.startswith("ipc://"):
                os.chmod(address.removeprefix("ipc://"), 0o600)
        self._secret_path = beside(endpoint, self._folder, "secret")
        draft = self._secret_path.with_suffix(f".{os.getpid()}.tmp")
        self._secret_fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(self._secret_fd, self.secret)
        fcntl.flock(self._secret_fd, fcntl.LOCK_EX)  # a secret that nobody locks was left by a killed dispatcher
        draft.rename(self._secret_path)

    def release(self) -> None:
        """Remove what this claim made; the lock's file goes last, while it is still held."""
        sockets = [Path(item.removeprefix("ipc://")) for item in (self.endpoint, self.back) if item.startswith("ipc://")]
        for path in [*sockets, *filter(None, [self._secret_path]), self._lock_path]:
            path.unlink(missing_ok=True)
        for fd in (self._secret_fd, self._lock_fd):
            if fd is not None:
                os.close(fd)


def back_path(endpoint: str, folder: Path) -> str:
    """The path of the workers' socket; beside a tcp endpoint it carries our pid, since ports of the kernel's choice share a name."""
    stem = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else f"{folder}/{_stem(endpoint)}-{os.getpid()}"
    return f"{stem}.back"


def claim_endpoint(endpoint: str | None, pool_id: str, environ: Mapping[str, str] = os.environ) -> Claim:
    """Hold `endpoint`; with None the user's default, or one of this pool's own when the default is taken.

    Raises EndpointInUse saying who holds it, SettingsError for an endpoint that makes no sense.
    """
    folder = make_run_dir(environ)
    if endpoint is not None:
        check_endpoint(endpoint)
        return Claim(endpoint, folder)
    default = f"ipc://{folder}/default.sock"
    check_endpoint(default)
    try:
        return Claim(default, folder)
    except EndpointInUse:
        own = f"ipc://{folder}/{pool_id}.sock"
        check_endpoint(own)
        return Claim(own, folder)


def read_secret(endpoint: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the pool at `endpoint`. Raises NoDispatcher when there is none this user may read."""
    check_endpoint(endpoint)
    path = beside(endpoint, run_dir(environ), "secret")
    hint = "start one with `enginepool serve`, or give the endpoint it printed (--endpoint or ENGINEPOOL_ENDPOINT)"
    try:
        secret = path.read_bytes()
        with path.open("rb") as file:
            if is_locked(file.fileno()):
                return secret
    except FileNotFoundError:
        raise NoDispatcher(f"no pool at {endpoint}: {hint}") from None
    except OSError as error:
        raise NoDispatcher(f"no access to the pool at {endpoint}: {path}: {error.strerror}") from None
    raise NoDispatcher(f"the pool at {endpoint} is gone, its dispatcher was killed; {hint}")


def is_locked(fd: int) -> bool:
    """Whether somebody else holds the file exclusively."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def refuse_foreign_files(endpoint: str, folder: Path) -> None:
    """Raise SettingsError rather than touch a file that no pool has made: its lock holds a pid, its secret 32 bytes."""
    if not endpoint.startswith("ipc://"):
        return
    try:
        file = _foreign_file(endpoint, folder)
    except OSError as error:
        raise SettingsError(f"endpoint {endpoint}: {error.filename}: {error.strerror}; choose another path") from None
    if file:
        raise SettingsError(f"endpoint {endpoint}: {file} exists and is not a pool's; choose another path")


def _foreign_file(endpoint: str, folder: Path) -> Path | None:
    path = Path(endpoint.removeprefix("ipc://"))
    files = {suffix: beside(endpoint, folder, suffix) for suffix in ("back", "lock", "secret")}
    is_ours = {
        path: path.is_socket(),
        files["back"]: files["back"].is_socket(),
        files["lock"]: files["lock"].is_file() and not files["lock"].read_bytes()[:32].strip(b"0123456789"),
        files["secret"]: files["secret"].is_file() and files["secret"].stat().st_size == 32,
    }
    return next((file for file, is_known in is_ours.items() if file.exists() and not is_known), None)


def _stem(endpoint: str) -> str:
    """A file name for an address; the kernel tells `localhost` by its number, so both names are one."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", endpoint.replace("//localhost:", "//127.0.0.1:")).strip("-")


def beside(endpoint: str, folder: Path, suffix: str) -> Path:
    """The file that belongs to an endpoint: `lock`, `secret` or, for ipc, `back`."""
    if endpoint.startswith("ipc://"):
        return Path(endpoint.removeprefix("ipc://") + "." + suffix)
    return folder / f"{_stem(endpoint)}.{suffix}"


def _lock_path(endpoint: str, folder: Path) -> Path:
    """Pools that leave the port to the kernel do not exclude each other."""
    is_any_port = endpoint.startswith("tcp://") and endpoint.endswith(":0")
    return beside(endpoint, folder, f"{os.getpid()}.lock" if is_any_port else "lock")


def _take_lock(path: Path, endpoint: str) -> int:
    try:
        return _lock_file(path)
    except BlockingIOError:
        holder = path.read_text(errors="replace").strip() or "unknown"
        raise EndpointInUse(f"{endpoint} is held by the pool with pid {holder}; stop it or choose another --endpoint") from None
    except OSError as error:
        raise SettingsError(f"endpoint {endpoint}: {path}: {error.strerror}") from None


def _lock_file(path: Path) -> int:
    """Lock, then make sure that the locked file is still the one at `path` (its last holder removes it)."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
