"""Encryption of sockets by CURVE: the keys are set here, strangers are turned away at the door, and failed handshakes are told.

Part of the transport: only `transport.py` uses this, apart from whoever makes or checks keys.
"""

from __future__ import annotations

import enum
import hmac
import sys

import zmq
from zmq.utils import z85

from enginepool.errors import SettingsError
from enginepool.keys import ClientKeys, PoolKeys

_DOOR = "inproc://zeromq.zap.01"  # where libzmq asks who may come in (ZeroMQ RFC 27)
_MAX_ANSWERS = 64
_MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

Socket = zmq.Socket[bytes]


class LinkEvent(enum.Enum):
    """What happens to a connection before its first message, and its end."""

    CONNECTED = int(zmq.EVENT_CONNECTED)
    ACCEPTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    CUT = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    NO_PEER = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
    OTHER_MECHANISM = 0
    """One side has keys and the other has none."""


def make_key_pair() -> tuple[bytes, bytes]:
    """A new public key and its secret key, 32 bytes each."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public), z85.decode(secret)


def check_pairs(keys: ClientKeys) -> None:
    """Raise SettingsError unless each public key belongs to its secret key."""
    pairs = {"client": (keys.client_public, keys.client_secret)}
    if isinstance(keys, PoolKeys):
        pairs["server"] = (keys.server_public, keys.server_secret)
    for side, (public, secret) in pairs.items():
        if zmq.curve_public(z85.encode(secret)) != z85.encode(public):
            raise SettingsError(f"keys file {keys.path}: {side}_public does not belong to {side}_secret; copy it anew, or make new ones")


def encrypt_client(socket: Socket, keys: ClientKeys) -> None:
    """Let a socket that has not connected yet talk to this pool alone, and show who it is."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


class Door:
    """Encrypts a socket that has not been bound yet, and lets in only who has the clients' key; its own socket has to be polled."""

    def __init__(self, context: zmq.Context[Socket], guarded: Socket, keys: PoolKeys) -> None:
        self._client_public = keys.client_public
        guarded.setsockopt(zmq.CURVE_SERVER, 1)
        guarded.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
        guarded.setsockopt(zmq.ZAP_DOMAIN, b"enginepool")
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_DOOR)

    def answer(self) -> list[str]:
        """Answer those who want to come in, a bounded number at a time; returns the addresses of those whose key is not known."""
        refused: list[str] = []
        for _ in range(_MAX_ANSWERS):
            if not _has_message(self.socket):
                break
            _, number, _, address, _, _, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            is_known = len(credentials) == 1 and hmac.compare_digest(credentials[0], self._client_public)
            status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
            self.socket.send_multipart([b"1.0", number, *status, b"", b""], zmq.NOBLOCK)
            refused += [] if is_known else [address.decode("ascii", "replace")]
        return refused

    def close(self) -> None:
        """Answer nobody any more."""
        self.socket.close()


class LinkMonitor:
    """Tells what happens to the connection of a socket that has not connected yet; `fd` is to be polled."""

    def __init__(self, watched: Socket) -> None:
        self._watched = watched
        self._socket: Socket = watched.get_monitor_socket(sum(event.value for event in LinkEvent))
        self._socket.getsockopt(zmq.EVENTS)  # its descriptor tells of events only to whoever has found none before
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def events(self) -> list[LinkEvent]:
        """What has happened since the last call."""
        found = []
        while _has_message(self._socket):
            told = self._socket.recv_multipart(zmq.NOBLOCK)[0]
            kind, value = int.from_bytes(told[:2], sys.byteorder), int.from_bytes(told[2:6], sys.byteorder)
            is_other = kind == LinkEvent.NO_PEER.value and value == _MECHANISM_MISMATCH
            found.append(LinkEvent.OTHER_MECHANISM if is_other else LinkEvent(kind))
        return found

    def close(self) -> None:
        """Comes before the watched socket's own close."""
        self._watched.disable_monitor()
        self._socket.close(0)


def _has_message(socket: Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
