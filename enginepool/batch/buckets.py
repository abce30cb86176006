"""Amounts over time in buckets that double in width, so that a run of any length takes the same memory."""

from __future__ import annotations

from array import array

MAX_BUCKETS = 600
FINEST_S = 0.1
DUST = 1e-9  # what rises and falls leave of their difference


class TimeBuckets:
    """Sums of an amount over the seconds since a start; the buckets are `width_s` wide, FINEST_S times a power of two."""

    def __init__(self) -> None:
        self.width_s = FINEST_S
        self._sums = array("d", bytes(8 * MAX_BUCKETS))
        # What is spread over many buckets is kept as a rise at the first and a fall after the last, so that any span costs the same.
        self._steps = array("d", bytes(8 * (MAX_BUCKETS + 1)))

    def add(self, at_s: float, amount: float) -> None:
        """Count an amount at one moment."""
        self._sums[self._index(max(0.0, at_s))] += amount

    def spread(self, start_s: float, end_s: float, amount: float) -> None:
        """Count an amount evenly from one moment to another."""
        if start_s < 0:
            start_s = 0.0
        if end_s <= start_s:
            return self.add(start_s, amount)
        last = self._index(end_s)  # first: it may widen the buckets
        first = self._index(start_s)
        if first == last:
            self._sums[first] += amount
            return None
        per_s = amount / (end_s - start_s)
        self._sums[first] += per_s * ((first + 1) * self.width_s - start_s)
        self._sums[last] += per_s * (end_s - last * self.width_s)
        self._steps[first + 1] += per_s * self.width_s
        self._steps[last] -= per_s * self.width_s
        return None

    def sums(self, slot_s: float, num_slots: int) -> list[float]:
        """The amounts in slots of `slot_s`, which is a whole number of this one's buckets."""
        found = [0.0] * num_slots
        per_slot = max(1, round(slot_s / self.width_s))
        for index, amount in enumerate(self._flat()):
            if amount:
                found[min(num_slots - 1, index // per_slot)] += amount
        return found

    def _index(self, at_s: float) -> int:
        while at_s >= MAX_BUCKETS * self.width_s:
            self._double()
        index = int(at_s / self.width_s)
        return index if index < MAX_BUCKETS else MAX_BUCKETS - 1  # a division may round up

    def _double(self) -> None:
        flat = self._flat()
        self._sums = array("d", [flat[index] + flat[index + 1] for index in range(0, MAX_BUCKETS, 2)] + [0.0] * (MAX_BUCKETS // 2))
        self._steps = array("d", bytes(8 * (MAX_BUCKETS + 1)))
        self.width_s *= 2

    def _flat(self) -> list[float]:
        flat, level = [], 0.0
        for amount, step in zip(self._sums, self._steps, strict=False):
            level += step
            total = amount + level
            flat.append(total if total > DUST else 0.0)
        return flat
