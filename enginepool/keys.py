"""Keys files: what encrypts a tcp endpoint and lets clients in, read from files that nobody but their owner can read.

`enginepool keys` makes two: the pool's, and the clients', which is the same without the pool's secret key. So the pool's
file serves for a client on the pool's machine too.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from enginepool.errors import SettingsError

POOL_FILE = "pool.keys"
CLIENT_FILE = "client.keys"
KEY_BYTES = 32
_MAX_FILE_BYTES = 1 << 16
_HEX = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")

Keys = TypeVar("Keys", bound="ClientKeys")


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs: the pool's public key, a key pair of its own, and the secret that all clients of a pool share."""

    path: str
    server_public: bytes
    client_public: bytes
    client_secret: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"<keys of {self.path}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("path", self.path)]


class PoolKeys(ClientKeys, frozen=True, kw_only=True):
    """What a pool needs: the same, and the secret half of its own key."""

    server_secret: bytes


def key_names(kind: type[ClientKeys]) -> list[str]:
    """The keys that such a file holds."""
    return [name for name in kind.__struct_fields__ if name != "path"]


def read_pool_keys(path: str | os.PathLike[str]) -> PoolKeys:
    """Read a pool's keys file. Raises SettingsError saying what is wrong with it and what to do."""
    return _read(path, PoolKeys)


def read_client_keys(path: str | os.PathLike[str]) -> ClientKeys:
    """Read a client's keys file, or a pool's, which holds a client's too. Raises SettingsError like `read_pool_keys`."""
    return _read(path, ClientKeys)


def _read(path: str | os.PathLike[str], kind: type[Keys]) -> Keys:
    place = Path(path).expanduser().absolute()
    try:
        table = tomllib.loads(_read_private(place))
    except OSError as error:
        raise SettingsError(f"keys file {place}: {error.strerror}; `enginepool keys FOLDER` makes new ones") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"keys file {place}: {error}; copy it anew, or make new ones with `enginepool keys FOLDER`") from None
    for name in table:
        if name not in key_names(PoolKeys):
            raise SettingsError(f"keys file {place}: there is no key {name!r}; it holds {', '.join(key_names(kind))}")
    return kind(path=str(place), **{name: _key(place, table, name, kind) for name in key_names(kind)})


def _key(place: Path, table: dict[str, object], name: str, kind: type[ClientKeys]) -> bytes:
    text = table.get(name)
    if text is None and kind is PoolKeys and "client_secret" in table:
        raise SettingsError(f"keys file {place}: {name} is missing: it is a client's; the pool needs the {POOL_FILE} that was made with it")
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        fault = "is missing" if text is None else f"is not {2 * KEY_BYTES} hexadecimal digits"
        raise SettingsError(f"keys file {place}: {name} {fault}; copy it anew, or make new ones with `enginepool keys FOLDER`")
    return bytes.fromhex(text)


def _read_private(place: Path) -> str:
    """The text of a file that is this user's alone; a pipe in its place is not waited for."""
    fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_private(place, os.fstat(fd))
        data = os.read(fd, _MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _MAX_FILE_BYTES:
        raise SettingsError(f"keys file {place} is larger than {_MAX_FILE_BYTES} bytes; it is no keys file")
    return data.decode()


def _check_private(place: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise SettingsError(f"keys file {place} is not a file; give the {POOL_FILE} or {CLIENT_FILE} that `enginepool keys` made")
    if info.st_uid not in (os.getuid(), 0):
        raise SettingsError(f"keys file {place} belongs to another user (uid {info.st_uid}); make a copy of your own and chmod 600 it")
    if info.st_mode & 0o077:
        raise SettingsError(
            f"keys file {place} is open to others (mode {stat.S_IMODE(info.st_mode):o}); "
            "chmod 600 it, and make new keys if somebody may have read it"
        )
