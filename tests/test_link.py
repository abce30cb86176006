"""What a tcp connection's events mean for a client: why it will never be let in, and why there may be no answer yet."""

from __future__ import annotations

import pytest

from enginepool.client.link import Link
from enginepool.curve import LinkEvent

CONNECTED, ACCEPTED, CUT, NO_PEER, REFUSED, DISCONNECTED, OTHER = LinkEvent
ONE_CUT = [CONNECTED, CUT, DISCONNECTED]


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize(
    "events",
    [
        pytest.param([], id="nothing"),
        pytest.param([CONNECTED], id="connected"),
        pytest.param([CONNECTED, ACCEPTED], id="let-in"),
        pytest.param(ONE_CUT * 2 + [CONNECTED, ACCEPTED], id="let-in-at-the-third-try"),
        pytest.param([CONNECTED, ACCEPTED, DISCONNECTED, CONNECTED], id="broken"),
    ],
)
def test_link_that_may_come_about_is_waited_for(has_keys: bool, events: list[LinkEvent]) -> None:
    assert Link(has_keys=has_keys).follow(events) is None


@pytest.mark.parametrize(
    ("has_keys", "events", "told"),
    [
        pytest.param(True, [CONNECTED, OTHER, DISCONNECTED], "it uses no keys", id="pool-without-keys"),
        pytest.param(False, [CONNECTED, OTHER, DISCONNECTED], "it wants keys", id="pool-with-keys"),
        pytest.param(True, [CONNECTED, REFUSED, DISCONNECTED], "does not know this client's key", id="key-not-known"),
        pytest.param(True, ONE_CUT * 3, "these keys are not for this pool", id="hangs-up-on-keys"),
        pytest.param(False, ONE_CUT * 3, "it wants keys", id="hangs-up-on-no-keys"),
        pytest.param(True, [CONNECTED, NO_PEER, DISCONNECTED], "something else listens there", id="another-protocol"),
        pytest.param(True, [CONNECTED, DISCONNECTED], "something else listens there", id="no-greeting"),
    ],
)
def test_link_that_never_will_says_why(has_keys: bool, events: list[LinkEvent], told: str) -> None:
    assert told in str(Link(has_keys=has_keys).follow(events))


@pytest.mark.parametrize(
    ("events", "hint"),
    [
        pytest.param([], "nothing listens there", id="nothing"),
        pytest.param([CONNECTED], "something listens there", id="connected"),
        pytest.param([CONNECTED, ACCEPTED], "is its dispatcher stopped", id="let-in"),
    ],
)
def test_link_without_an_answer_gives_a_hint(events: list[LinkEvent], hint: str) -> None:
    link = Link(has_keys=True)
    link.follow(events)
    assert hint in link.hint()


def test_link_is_broken_once_it_had_come_about() -> None:
    link = Link(has_keys=True)
    link.follow(ONE_CUT)
    assert not link.is_broken
    link.follow([CONNECTED, ACCEPTED])
    assert not link.is_broken
    link.follow([DISCONNECTED, CONNECTED, ACCEPTED])
    assert link.is_broken
