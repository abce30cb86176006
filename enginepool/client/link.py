"""What becomes of a tcp connection: why it never came about, and whether it broke."""

from __future__ import annotations

from collections.abc import Iterable

from enginepool.curve import LinkEvent

MAX_CUTS = 3
OTHER_KEYS = "these keys are not for this pool (another server_public)"
WANTS_KEYS = "it wants keys; give the client.keys that belong to it (keys=, --keys or ENGINEPOOL_KEYS)"
NO_PEER = "something else listens there, which does not speak ZeroMQ as it should; is the port right?"


class Link:
    """Follows one connection by its events; pure. A connection that was accepted once does not come back: its peer has a new name then."""

    def __init__(self, *, has_keys: bool) -> None:
        self.is_broken = False
        self._has_keys = has_keys
        self._was_connected = False
        self._was_accepted = False
        self._is_greeting = False
        self._num_cuts = 0

    def follow(self, events: Iterable[LinkEvent]) -> str | None:
        """Take what has happened; returns why this client will never be let in, or None."""
        for event in events:
            match event:
                case LinkEvent.CONNECTED:
                    self._was_connected = self._is_greeting = True
                case LinkEvent.ACCEPTED:
                    self._was_accepted, self._is_greeting = True, False
                case LinkEvent.DISCONNECTED if self._is_greeting:  # what came was no greeting of ZeroMQ's, or an old one without encryption
                    return NO_PEER
                case LinkEvent.DISCONNECTED:
                    self.is_broken = self.is_broken or self._was_accepted
                case LinkEvent.OTHER_MECHANISM:
                    return self._about_mechanism()
                case LinkEvent.REFUSED:
                    return "it does not know this client's key; give the client.keys that was made together with its pool.keys"
                case LinkEvent.NO_PEER:
                    return NO_PEER
                case LinkEvent.CUT:
                    self._num_cuts += 1
                    self._is_greeting = False
        return None if self._num_cuts < MAX_CUTS else self._about_cuts()

    def hint(self) -> str:
        """Why there may be no answer yet."""
        if self._was_accepted:
            return "is its dispatcher stopped, or very busy? (enginepool status)"
        if self._was_connected:
            return "something listens there, but it does not let anybody in: is its dispatcher stopped, or is it another program?"
        return "nothing listens there, its name is not known, or a firewall is in between"

    def _about_mechanism(self) -> str:
        if self._has_keys:
            return "it uses no keys; leave them out (keys=, --keys, ENGINEPOOL_KEYS), or serve it with --keys"
        return WANTS_KEYS

    def _about_cuts(self) -> str:
        """A pool with other keys hangs up; so may one with keys where a client has none, or the other way round."""
        if self._has_keys:
            return f"it hangs up at once: {OTHER_KEYS}, or it uses none, or it is another program"
        return f"it hangs up at once: {WANTS_KEYS}, or it is another program"
