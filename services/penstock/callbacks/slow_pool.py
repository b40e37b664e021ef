"""Calls under way, and the slots of slow ones, which use no slot of a lane. No I/O."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from penstock.callbacks.in_flight import InFlight
from penstock.callbacks.lanes import Lanes
from penstock.core.target import TargetId


# Compared by identity: `TimeoutQueue` needs that.
@dataclass(slots=True, eq=False)
class Call:
    """A call under way.

    Attributes:
        in_flight: the callback.
        lanes: whose slot it uses.
        in_self_check: whether self-check mode was on when it began.
        slow: whether it has turned out slow.
        in_slow_pool: whether it uses a slot of the slow pool, and none of the lanes.
        timer: the end of its extended time.
        extensions: how often its time was extended.
    """

    in_flight: InFlight
    lanes: Lanes
    in_self_check: bool
    slow: bool = False
    in_slow_pool: bool = False
    timer: asyncio.TimerHandle | None = None
    extensions: int = 0


class SlowPool:
    """A bulkhead for slow calls, bounded in total and per target.

    Args:
        slots: most calls in total.
        target_slots: most calls to one target.
    """

    def __init__(self, slots: int, target_slots: int) -> None:
        self._free = slots
        self._target_slots = target_slots
        self._calls: Counter[TargetId] = Counter()

    def __len__(self) -> int:
        return self._calls.total()

    def calls_to(self, target_id: TargetId) -> int:
        """Calls to one target in the pool."""
        return self._calls[target_id]

    def enter(self, target_id: TargetId) -> bool:
        """Takes a slot; False when none is free."""
        if not self._free or self._calls[target_id] >= self._target_slots:
            return False
        self._free -= 1
        self._calls[target_id] += 1
        return True

    def leave(self, target_id: TargetId) -> None:
        """Frees the slot of a call that has ended."""
        self._free += 1
        self._calls[target_id] -= 1
        if not self._calls[target_id]:
            del self._calls[target_id]
