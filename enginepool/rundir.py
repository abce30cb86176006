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
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from enginepool.endpoint import check_endpoint, check_target
from enginepool.errors import EndpointInUse, NoDispatcher, SettingsError
from enginepool.keys import PoolKeys, read_pool_keys
from enginepool.locks import folder_locked, is_locked, lock_file
from enginepool.sweep import SECRET_BYTES, is_draft, is_lock, is_secret, sweep_run_dir


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


class Claim:
    """An endpoint held by this process until `release()`.

    `secret` lets the workers in, `client_secret` the clients; `back` is the ipc path of the workers, `keys` encrypt a tcp endpoint.
    """

    def __init__(self, endpoint: str, folder: Path, keys: PoolKeys | None = None) -> None:
        self.endpoint = endpoint
        self.keys = keys
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.client_secret = self.secret if keys is None else keys.secret
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
        with folder_locked(self._folder):
            self._publish_secret(endpoint)

    def _publish_secret(self, endpoint: str) -> None:
        self._secret_path = beside(endpoint, self._folder, "secret")
        draft = self._lock_path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        self._secret_fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.write(self._secret_fd, self.secret)
        fcntl.flock(self._secret_fd, fcntl.LOCK_EX)  # a secret that nobody locks was left by a killed dispatcher
        draft.rename(self._secret_path)

    def release(self) -> None:
        """Remove what this claim made; the lock's file goes last, while it is still held."""
        with ExitStack() as stack:
            with suppress(OSError):  # the folder may have gone
                stack.enter_context(folder_locked(self._folder))  # nobody claims or sweeps files that go under their eyes
            self._remove_files()

    def _remove_files(self) -> None:
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


def claim_endpoint(
    endpoint: str | None, pool_id: str, environ: Mapping[str, str] = os.environ, keys: str | os.PathLike[str] | None = None
) -> Claim:
    """Hold `endpoint`; with None the user's default, or one of this pool's own when the default is taken. Sweeps what dead pools left.

    `keys` is the path of the keys file that encrypts it. Raises EndpointInUse saying who holds it, SettingsError for an
    endpoint or a keys file that makes no sense.
    """
    folder = make_run_dir(environ)
    pool_keys = choose_keys(endpoint, folder, keys)
    with folder_locked(folder):
        sweep_run_dir(folder)
        if endpoint is not None:
            return Claim(endpoint, folder, pool_keys)
        try:
            return Claim(f"ipc://{folder}/default.sock", folder)
        except EndpointInUse:
            own = f"ipc://{folder}/{pool_id}.sock"
            check_endpoint(own)
            return Claim(own, folder)


def choose_keys(endpoint: str | None, folder: Path, keys: str | os.PathLike[str] | None) -> PoolKeys | None:
    """Check that endpoint and keys fit together, and read the keys. Raises SettingsError."""
    check_endpoint(endpoint or f"ipc://{folder}/default.sock", has_keys=keys is not None)
    return None if keys is None else read_pool_keys(keys)


def choose_target(
    endpoint: str | None, keys: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ
) -> tuple[str, str | os.PathLike[str] | None]:
    """Where a client shall connect and by which keys file: what was given, else what the environment names, else the default."""
    endpoint = endpoint or default_endpoint(environ)
    if keys is None and endpoint.startswith("tcp://"):
        keys = environ.get("ENGINEPOOL_KEYS") or None
    return endpoint, keys


def read_secret(endpoint: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the pool at `endpoint`. Raises NoDispatcher when there is none this user may read, or somebody else's."""
    check_target(endpoint)
    folder = run_dir(environ)
    path = beside(endpoint, folder, "secret")
    hint = "start one with `enginepool serve`, or give the endpoint it printed (--endpoint or ENGINEPOOL_ENDPOINT)"
    try:
        if path.parent == folder:
            check_owner(folder, folder.lstat())
        with path.open("rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            if os.getuid() not in (owner, 0):
                raise NoDispatcher(f"the pool at {endpoint} is another user's (uid {owner}); {hint}")
            secret = file.read(SECRET_BYTES + 1)
            if is_locked(file.fileno()):
                return secret
    except FileNotFoundError:
        raise NoDispatcher(f"no pool at {endpoint}: {hint}") from None
    except OSError as error:
        raise NoDispatcher(f"no access to the pool at {endpoint}: {path}: {error.strerror}") from None
    raise NoDispatcher(f"the pool at {endpoint} is gone, its dispatcher was killed; {hint}")


def refuse_foreign_files(endpoint: str, folder: Path) -> None:
    """Raise SettingsError rather than touch a file that no pool has made: its lock holds a pid, its secret 32 bytes."""
    if not endpoint.startswith("ipc://"):
        return
    try:
        _refuse_open_folder(endpoint)
        file = _foreign_file(endpoint, folder)
    except OSError as error:
        raise SettingsError(f"endpoint {endpoint}: {error.filename}: {error.strerror}; choose another path") from None
    if file:
        raise SettingsError(f"endpoint {endpoint}: {file} exists and is not a pool's; choose another path")


def _foreign_file(endpoint: str, folder: Path) -> Path | None:
    path = Path(endpoint.removeprefix("ipc://"))
    forms = {"back": Path.is_socket, "lock": is_lock, "secret": is_secret, "draft": is_draft}
    files = [(path, Path.is_socket), *((beside(endpoint, folder, suffix), form) for suffix, form in forms.items())]
    return next((file for file, is_ours in files if _is_foreign(file, is_ours)), None)


def _is_foreign(file: Path, is_ours: Callable[[Path], bool]) -> bool:
    """A file that changes or goes while it is looked at belongs to a pool that starts or ends beside us."""
    with suppress(FileNotFoundError):
        while True:
            held = os.open(file, os.O_PATH | os.O_NOFOLLOW)  # held open, its inode is not given to the next file
            try:
                seen = os.fstat(held)
                if not stat.S_ISLNK(seen.st_mode) and is_ours(file):
                    return False
                if os.path.samestat(seen, file.lstat()):
                    return True
            finally:
                os.close(held)
    return False


def _refuse_open_folder(endpoint: str) -> None:
    """Anybody could put a socket of their own in the place of ours."""
    parent = Path(endpoint.removeprefix("ipc://")).parent
    with suppress(FileNotFoundError):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise SettingsError(
                f"endpoint {endpoint}: everybody may rename files in {parent} (mode {stat.S_IMODE(mode):o}); choose another path"
            )


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


def _read_holder(path: Path) -> str:
    """The pid in a lock; its holder may have gone since, or be about to write it."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip() or "unknown"
    return "unknown"


def _take_lock(path: Path, endpoint: str) -> int:
    try:
        fd = lock_file(path)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd
    except BlockingIOError:
        holder = _read_holder(path)
        raise EndpointInUse(f"{endpoint} is held by the pool with pid {holder}; stop it or choose another --endpoint") from None
    except OSError as error:
        raise SettingsError(f"endpoint {endpoint}: {path}: {error.strerror}") from None
