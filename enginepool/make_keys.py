"""`enginepool keys`: makes the two keys files of a pool, one for its own machine and one for its clients."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from enginepool.curve import make_key_pair
from enginepool.errors import ExitCode, SettingsError
from enginepool.keys import CLIENT_FILE, KEY_BYTES, POOL_FILE, ClientKeys, PoolKeys, key_names

HEADS = {
    POOL_FILE: "# enginepool: the keys of a pool. They stay on its machine.\n",
    CLIENT_FILE: "# enginepool: the keys of the clients of a pool. Whoever has them may use it, and stop it.\n",
}


def run_keys(folder: Path) -> ExitCode:
    """Make the files and say what to do with them."""
    pool, client = make_keys(folder)
    print(f"{pool}: stays on the pool's machine\n  enginepool serve --endpoint tcp://0.0.0.0:5555 --keys {pool}")
    print(f"{client}: goes to the clients' machines by a safe way, such as scp; mode 600 there too")
    print(f"  enginepool status --endpoint tcp://HOST:5555 --keys {CLIENT_FILE}")
    return ExitCode.OK


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write new keys into `folder`; returns the pool's file and the clients'. Raises SettingsError rather than overwrite anything."""
    folder = folder.expanduser().absolute()
    try:
        _make_private(folder)
        server_public, server_secret = make_key_pair()
        client_public, client_secret = make_key_pair()
        values = {
            "server_public": server_public,
            "server_secret": server_secret,
            "client_public": client_public,
            "client_secret": client_secret,
            "secret": secrets.token_bytes(KEY_BYTES),
        }
        return _write_both(folder, values)
    except OSError as error:
        raise SettingsError(f"{error.filename or folder}: {error.strerror}; name another folder") from None


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid():
        raise SettingsError(f"{folder} belongs to another user (uid {info.st_uid}); name a folder of yours")
    if info.st_mode & 0o077:
        raise SettingsError(
            f"{folder} is open to others (mode {stat.S_IMODE(info.st_mode):o}); chmod 700 it, or name one that is not there yet"
        )


def _write_both(folder: Path, values: Mapping[str, bytes]) -> tuple[Path, Path]:
    """Both or none."""
    made: list[Path] = []
    try:
        for name, kind in ((POOL_FILE, PoolKeys), (CLIENT_FILE, ClientKeys)):
            fd = _create(folder / name)
            made.append(folder / name)
            _write(fd, HEADS[name], {key: values[key] for key in key_names(kind)})
    except BaseException:
        for path in made:
            path.unlink()
        raise
    return made[0], made[1]


def _create(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise SettingsError(
            f"{path} exists and is not overwritten; name another folder, or remove it if no pool needs it any more"
        ) from None


def _write(fd: int, head: str, values: Mapping[str, bytes]) -> None:
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(head + "".join(f'{name} = "{value.hex()}"\n' for name, value in values.items()))
        file.flush()
        os.fsync(fd)
