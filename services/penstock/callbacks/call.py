"""A call under way, as `Deliverer` keeps it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from penstock.callbacks.hand import Waiting
from penstock.callbacks.lanes import Lanes


# Each is only itself: `Patience` knows them by that.
@dataclass(slots=True, eq=False)
class Call:
    """One attempt, from its slot to its end.

    Attributes:
        waiting: what is delivered.
        lanes: whose slot it holds.
        suspicious: this process suspected itself when it began.
        slow: it has turned out so.
        moved: it is in the slow pool for that, and its slot is another's.
        timer: until it is slow all the same, while it is spared.
        spared: how often its time was prolonged because this process itself stood still.
    """

    waiting: Waiting
    lanes: Lanes
    suspicious: bool
    slow: bool = False
    moved: bool = False
    timer: asyncio.TimerHandle | None = None
    spared: int = 0
