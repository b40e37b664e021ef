"""Where calls go on that have turned out slow, so that they hold no slot of a lane. No I/O."""

from __future__ import annotations

from collections import Counter

from penstock.core.target import TargetId


class SlowPool:
    """Bounded, in all and for each target.

    Args:
        slots: most calls in it.
        target_slots: most calls of one target in it.
    """

    def __init__(self, slots: int, target_slots: int) -> None:
        self._free = slots
        self._target_slots = target_slots
        self._calls: Counter[TargetId] = Counter()

    def __len__(self) -> int:
        return self._calls.total()

    def calling_to(self, target: TargetId) -> int:
        """Calls of one target in it."""
        return self._calls[target]

    def enter(self, target: TargetId) -> bool:
        """Takes a call in; False when there is no room for it."""
        if not self._free or self._calls[target] >= self._target_slots:
            return False
        self._free -= 1
        self._calls[target] += 1
        return True

    def leave(self, target: TargetId) -> None:
        """A call has ended."""
        self._free += 1
        self._calls[target] -= 1
        if not self._calls[target]:
            del self._calls[target]
