"""Endpoints: where a pool can listen, where a client can connect, and which of these addresses need keys."""

from __future__ import annotations

import os
import re
from ipaddress import AddressValueError, IPv4Address

from enginepool.errors import SettingsError

MAX_IPC_PATH_BYTES = 107
EVERY_INTERFACE = "0.0.0.0"
_TCP = re.compile(r"tcp://([^/\s]*):([0-9]{1,9})")
_NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]*[A-Za-z_][A-Za-z0-9_.-]*")


def check_endpoint(endpoint: str, *, has_keys: bool = False) -> None:
    """Raise SettingsError for an endpoint that can't be served, or would not be safe without keys or with them."""
    host = _check_form(endpoint, has_keys=has_keys)
    if host is None:
        return
    if host != "localhost" and not _is_ipv4(host):
        raise SettingsError(
            f"endpoint {endpoint}: a pool listens at a numeric IPv4 address, not at {host!r}; write the machine's own, "
            f"or tcp://{EVERY_INTERFACE}:PORT for all of its addresses"
        )
    if not is_loopback(endpoint) and not has_keys:
        raise SettingsError(
            f"endpoint {endpoint}: beyond loopback a pool is served only with keys; make them (enginepool keys FOLDER) "
            "and give --keys FOLDER/pool.keys, or write tcp://127.0.0.1:PORT or ipc:///path"
        )


def check_target(endpoint: str, *, has_keys: bool = False) -> None:
    """Raise SettingsError for an endpoint that no client can connect to, or not safely without keys or with them."""
    host = _check_form(endpoint, has_keys=has_keys)
    if host is None:
        return
    if not _is_ipv4(host) and not _NAME.fullmatch(host):
        raise SettingsError(f"endpoint {endpoint}: {host!r} is neither an IPv4 address nor the name of a machine")
    if not is_near(endpoint) and not has_keys:
        raise SettingsError(
            f"endpoint {endpoint}: a pool beyond loopback wants keys; give the client.keys that belong to it "
            "(keys=, --keys or ENGINEPOOL_KEYS; `enginepool keys` makes them on the pool's side)"
        )


def is_loopback(endpoint: str) -> bool:
    """Whether this tcp endpoint can be reached from its own machine only."""
    host = _host(endpoint)
    return host == "localhost" or (_is_ipv4(host) and IPv4Address(host).is_loopback)


def is_near(endpoint: str) -> bool:
    """Whether connecting there stays on this machine (unless somebody forwards the port)."""
    return endpoint.startswith("ipc://") or is_loopback(endpoint) or _host(endpoint) == EVERY_INTERFACE


def connectable(endpoint: str) -> str:
    """The address to connect to for an endpoint as its pool tells it: all interfaces are reached by loopback."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://127.0.0.1:{port}" if endpoint.startswith("tcp://") and host in (EVERY_INTERFACE, "localhost") else endpoint


def _check_form(endpoint: str, *, has_keys: bool) -> str | None:
    """Refuse what is wrong for both sides; returns the host of a tcp endpoint, None for ipc."""
    if "\0" in endpoint:
        raise SettingsError(f"endpoint {endpoint!r}: there is a null byte in it")
    if endpoint.startswith("ipc://"):
        _check_ipc(endpoint, has_keys=has_keys)
        return None
    if not endpoint.startswith("tcp://"):
        raise SettingsError(f"endpoint {endpoint}: no such kind of address; write ipc:///path or tcp://127.0.0.1:PORT")
    if "[" in endpoint or endpoint.count(":") > 2:
        raise SettingsError(f"endpoint {endpoint}: IPv6 is not supported; write an IPv4 address, such as tcp://127.0.0.1:PORT on loopback")
    match = _TCP.fullmatch(endpoint)
    if not match or not match[1]:
        raise SettingsError(f"endpoint {endpoint}: write tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5555 on loopback")
    if int(match[2]) > 65535:
        raise SettingsError(f"endpoint {endpoint}: there is no such port; a port is at most 65535")
    return match[1]


def _check_ipc(endpoint: str, *, has_keys: bool) -> None:
    path = endpoint.removeprefix("ipc://")
    if not path.startswith("/"):
        raise SettingsError(f"endpoint {endpoint}: the path is not absolute; write ipc:///path/to.sock")
    if len(os.fsencode(path)) + len(".back") > MAX_IPC_PATH_BYTES:
        raise SettingsError(f"endpoint {endpoint}: the path is longer than {MAX_IPC_PATH_BYTES - 5} bytes; set ENGINEPOOL_RUN_DIR")
    if has_keys:
        raise SettingsError(
            f"endpoint {endpoint}: keys are for tcp, and an ipc socket is its user's alone without them; "
            "leave keys out (unset ENGINEPOOL_KEYS), or name a tcp endpoint"
        )


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else ""


def _is_ipv4(host: str) -> bool:
    try:
        IPv4Address(host)
    except AddressValueError:
        return False
    return True
