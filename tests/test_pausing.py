"""A paused client's items wait apart, keep their order and their bounds, and go on after the pause; nobody else notices."""

from __future__ import annotations

import random

import pytest

from enginepool.dispatcher.backlog import Backlog, Item
from enginepool.status import ItemState


def _item(seq: int, client: bytes, priority: int = 0, received: float = 0.0) -> Item:
    return Item(client, seq, b"four", received, priority)


def _backlog(*items: Item) -> Backlog:
    backlog = Backlog(max_items=1000, max_bytes=10_000)
    for item in items:
        backlog.push(item)
    return backlog


def _pop_all(backlog: Backlog) -> list[int]:
    return [item.seq for item in iter(backlog.pop, None)]


def test_paused_client_is_skipped_and_the_others_keep_their_turns() -> None:
    backlog = _backlog(*[_item(seq, client) for seq in (1, 2) for client in (b"a", b"b", b"c")])
    backlog.pause(b"b")
    assert (len(backlog), backlog.num_shared) == (6, 4)
    assert _pop_all(backlog) == [1, 1, 2, 2]
    assert (len(backlog), backlog.num_shared, backlog.num_bytes) == (2, 0, 8)


def test_paused_client_does_not_hold_up_those_behind_it_in_priority() -> None:
    backlog = _backlog(_item(1, b"a", priority=-5), _item(2, b"b", priority=3))
    backlog.pause(b"a")
    assert _pop_all(backlog) == [2]


def test_resumed_client_has_all_its_items_in_order_after_the_others_turn() -> None:
    backlog = _backlog(_item(1, b"a"), _item(2, b"a"), _item(5, b"a", priority=-1), _item(11, b"b"))
    backlog.pause(b"a")
    backlog.push(_item(3, b"a"))
    backlog.resume(b"a")
    assert backlog.num_shared == 5
    assert _pop_all(backlog) == [5, 11, 1, 2, 3]


def test_item_of_a_paused_client_that_comes_back_from_a_death_waits_first_in_line() -> None:
    backlog = _backlog(_item(1, b"a"), _item(2, b"a"))
    lost = backlog.pop()
    backlog.pause(b"a")
    assert lost is not None
    backlog.push_back([lost])
    assert backlog.pop() is None
    backlog.resume(b"a")
    assert _pop_all(backlog) == [1, 2]


def test_suspect_of_a_paused_client_still_has_its_trial() -> None:
    suspect = _item(1, b"a")
    backlog = _backlog(_item(2, b"a"))
    backlog.push_trials([[suspect]])
    backlog.pause(b"a")
    assert (backlog.num_shared, backlog.pop_trial()) == (0, [suspect])
    assert (len(backlog), backlog.num_shared) == (1, 0)


def test_suspect_of_a_paused_client_can_be_removed() -> None:
    suspect = _item(1, b"a")
    backlog = _backlog(_item(2, b"a"), _item(3, b"b"))
    backlog.push_trials([[suspect]])
    backlog.pause(b"a")
    backlog.remove(suspect)
    assert (len(backlog), backlog.num_shared) == (2, 1)


def test_pause_and_resume_twice_change_nothing() -> None:
    backlog = _backlog(_item(1, b"a"))
    for call in (backlog.pause, backlog.pause, backlog.resume, backlog.resume):
        call(b"a")
    assert (backlog.num_shared, _pop_all(backlog)) == (1, [1])


def test_oldest_arrival_leaves_paused_clients_out() -> None:
    backlog = _backlog(_item(1, b"a", received=1.0), _item(2, b"b", received=2.0))
    assert backlog.oldest_arrival() == 1.0
    backlog.pause(b"a")
    backlog.push(_item(3, b"a", received=0.5))
    assert backlog.oldest_arrival() == 2.0
    backlog.resume(b"a")
    assert backlog.oldest_arrival() == 0.5


class Model:
    """A backlog, and the same as a plain list in which nothing is clever."""

    CLIENTS = (b"a", b"b", b"c")

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.backlog = Backlog(max_items=10_000, max_bytes=100_000)
        self.waiting: list[Item] = []
        self.trials: list[list[Item]] = []
        self.gone: list[Item] = []
        self.paused: set[bytes] = set()
        self.now = 0.0
        self.num_made = 0

    def run(self, num_steps: int) -> None:
        actions = [self.push, self.push, self.pop, self.pop, self.pop_trial, self.remove, self.come_back, self.pause, self.resume]
        for _ in range(num_steps):
            self.now += 1.0
            self.draw.choice(actions)()
            self.check()

    def push(self) -> None:
        for _ in range(self.draw.randint(1, 5)):
            self.num_made += 1
            item = _item(self.num_made, self.draw.choice(self.CLIENTS), self.draw.randint(-2, 2), self.now)
            self.backlog.push(item)
            self.waiting.append(item)

    def pop(self) -> None:
        item = self.backlog.pop()
        open_items = [other for other in self.waiting if other.client not in self.paused]
        if item is None:
            assert not open_items
            return
        assert item.priority == min(other.priority for other in open_items)
        assert item is next(other for other in self.waiting if (other.client, other.priority) == (item.client, item.priority))
        self.waiting.remove(item)
        self._lease(item)

    def pop_trial(self) -> None:
        group = self.backlog.pop_trial()
        assert group == (self.trials.pop(0) if self.trials else [])
        for item in group:
            self._lease(item)

    def _lease(self, item: Item) -> None:
        item.state = ItemState.LEASED
        self.gone.append(item)

    def remove(self) -> None:
        place = self.draw.choice([self.waiting, self.waiting, *self.trials])
        for _ in range(min(len(place), self.draw.randint(1, 200))):
            item = place.pop(self.draw.randrange(len(place)))
            self.backlog.remove(item)
        self.trials = list(filter(None, self.trials))

    def come_back(self) -> None:
        if self.gone and self.draw.random() < 0.3:
            group = [self.gone.pop() for _ in range(min(len(self.gone), self.draw.randint(1, 3)))]
            self.backlog.push_trials([group])
            self.trials.insert(0, list(group))
        elif self.gone:
            item = self.gone.pop()
            self.backlog.push_back([item])
            self.waiting.insert(0, item)

    def pause(self) -> None:
        client = self.draw.choice(self.CLIENTS)
        self.backlog.pause(client)
        self.paused.add(client)

    def resume(self) -> None:
        client = self.draw.choice(self.CLIENTS)
        self.backlog.resume(client)
        self.paused.discard(client)

    def check(self) -> None:
        open_items = [item for item in self.waiting if item.client not in self.paused]
        suspects = [item for group in self.trials for item in group]
        all_items = self.waiting + suspects
        assert (len(self.backlog), self.backlog.num_bytes) == (len(all_items), 4 * len(all_items))
        assert self.backlog.num_shared == len(open_items)
        assert self.backlog.next_trial() == (self.trials[0] if self.trials else [])
        may_go = open_items + [item for item in suspects if item.client not in self.paused]
        oldest = self.backlog.oldest_arrival()
        assert oldest == min((item.received for item in may_go), default=None)


@pytest.mark.parametrize("seed", range(8))
def test_random_pauses_lose_nothing_and_keep_every_count(seed: int) -> None:
    model = Model(seed)
    model.run(1500)
    for client in model.CLIENTS:
        model.backlog.resume(client)
    model.paused.clear()
    while model.waiting:
        model.pop()
    assert model.backlog.pop() is None
