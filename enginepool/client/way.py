"""The way to a pool: where a client connects, what it shows to be let in, and whether the pool is on this machine."""

from __future__ import annotations

import os

import msgspec

from enginepool import rundir
from enginepool.endpoint import check_target, connectable, is_near
from enginepool.errors import NoDispatcher
from enginepool.keys import ClientKeys, read_client_keys


class Way(msgspec.Struct, frozen=True):
    """`is_local` tells that both sides run on one machine and can watch each other by pid; silence counts for the others only."""

    endpoint: str
    address: str
    secret: bytes
    is_local: bool
    keys: ClientKeys | None = None

    @property
    def keys_path(self) -> str | None:
        """The keys file, to be handed to whoever goes the same way later."""
        return None if self.keys is None else self.keys.path

    @property
    def is_abandoned(self) -> bool:
        """Whether this machine's dispatcher is gone: nobody holds the endpoint any more."""
        return self.is_local and not _is_held(self.endpoint)

    def __repr__(self) -> str:
        return f"<way to {self.endpoint}>"


def find_way(endpoint: str, keys_path: str | os.PathLike[str] | None = None) -> Way:
    """Check the endpoint and read what lets this user in. Raises SettingsError, and NoDispatcher where no pool is to be seen."""
    check_target(endpoint, has_keys=keys_path is not None)
    if keys_path is None:
        return Way(endpoint, connectable(endpoint), rundir.read_secret(endpoint), is_local=True)
    keys = read_client_keys(keys_path)
    return Way(endpoint, connectable(endpoint), keys.secret, _is_seen(endpoint), keys)


def _is_seen(endpoint: str) -> bool:
    """Whether the pool holds its secret in this user's run directory: a loopback port may be forwarded to another machine."""
    return is_near(endpoint) and _is_held(endpoint)


def _is_held(endpoint: str) -> bool:
    try:
        rundir.read_secret(endpoint)
    except NoDispatcher:
        return False
    return True
