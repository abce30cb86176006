"""An item is stuck when later ones overtake it, never because it waits its turn."""

from __future__ import annotations

from enginepool.worker.stuck import StuckItems


def _items() -> StuckItems:
    return StuckItems(10.0, longest_gap_s=1000.0)


def _looks(items: StuckItems, *looks: tuple[float, dict[int, int]], blocked: tuple[int, ...] = ()) -> list[int | None]:
    return [items.look(counts, blocked, now) for now, counts in looks]


def test_overtaken_item_without_a_token_is_stuck_at_the_limit() -> None:
    assert _looks(_items(), (0, {1: 0, 2: 0}), (1, {1: 0, 2: 3}), (9.9, {1: 0, 2: 30}), (10, {1: 0, 2: 31}))[2:] == [None, 1]


def test_overtaker_may_have_ended_meanwhile() -> None:
    assert _looks(_items(), (0, {1: 0, 2: 0}), (1, {1: 0, 2: 1}), (2, {1: 0}), (10, {1: 0}))[-1] == 1


def test_item_that_waits_behind_earlier_ones_is_not_stuck() -> None:
    assert _looks(_items(), (0, {1: 0, 2: 0}), (1, {1: 5, 2: 0}), (100, {1: 500, 2: 0}))[-1] is None


def test_item_that_stopped_while_no_later_one_began_is_not_stuck() -> None:
    assert _looks(_items(), (0, {1: 1, 2: 1}), (100, {1: 1, 2: 200}))[-1] is None


def test_item_that_stopped_and_is_overtaken_by_a_newcomer_is_stuck() -> None:
    assert _looks(_items(), (0, {1: 1, 2: 1}), (5, {1: 1, 2: 9, 3: 1}), (10, {1: 1, 2: 20, 3: 9}))[-1] == 1


def test_slow_item_with_a_token_now_and_then_is_not_stuck() -> None:
    looks = [(float(now), {1: now // 9, 2: now}) for now in range(100)]
    assert set(_looks(_items(), *looks)) == {None}


def test_blocked_item_is_stuck_though_nobody_overtakes_it_and_the_earliest_is_at_fault() -> None:
    looks = [(0.0, {1: 0, 2: 0, 3: 0}), (9.0, {1: 0, 2: 0, 3: 0}), (10.0, {1: 0, 2: 0, 3: 0})]
    assert _looks(_items(), *looks, blocked=(2, 3)) == [None, None, 2]


def test_blocked_item_is_left_alone_before_the_limit() -> None:
    assert _looks(_items(), (0.0, {1: 0}), (9.9, {1: 0}), blocked=(1,)) == [None, None]


def test_pause_between_two_looks_counts_little() -> None:
    items = StuckItems(10.0, longest_gap_s=2.0)
    assert _looks(items, (0.0, {1: 0}), (1.0, {1: 0}), (61.0, {1: 0}), (68.0, {1: 0}), blocked=(1,)) == [None] * 4
    assert items.look({1: 0}, (1,), 70.0) is None
    assert [items.look({1: 0}, (1,), now) for now in (71.0, 72.0, 73.0)][-1] == 1
