"""Who is called next: one lane a target, a few slots each, all lanes in turn. No I/O, no clock.

Room for health (diversion of targets that misbehave): `put` is where a verdict on the target chooses the
path, `admit` where its permits are granted, `finish` where its round trips are counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.contracts.event import Callback

# Targets whose pace is remembered after their lane has emptied.
_PACES = 10_000
# Weight of the latest call in a target's pace.
_LATEST = 0.2


class Record(Protocol):
    """What a lane needs of the record in hand."""

    @property
    def partition(self) -> int:
        """Of its topic."""

    def settle(self) -> None:
        """Its effects are durable, or another's."""


@dataclass(slots=True)
class Waiting:
    """A callback in hand whose attempt has not begun, with its record."""

    callback: Callback
    record: Record


@dataclass(slots=True)
class _Lane:
    waiting: OrderedDict[str, Waiting] = field(default_factory=OrderedDict)
    calling: int = 0
    in_turn: bool = False


class Lanes:
    """The lanes of all targets.

    Args:
        slots: most calls under way.
        target_slots: most calls under way to one target.
        patience_s: what would wait for its target longer than this is crowded out.
    """

    def __init__(self, *, slots: int, target_slots: int, patience_s: float) -> None:
        self._free = slots
        self._target_slots = target_slots
        self._patience_s = patience_s
        self._lanes: dict[str, _Lane] = {}
        self._turns: deque[str] = deque()
        self._pace_s: OrderedDict[str, float] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Callbacks whose attempt has not begun."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def put(self, waiting: Waiting) -> Record | None:
        """Lines a callback up; returns the record that has become superfluous, when it is in line already.

        After a rebalance everything that waits comes a second time, and the old records are worth nothing.
        """
        callback = waiting.callback
        lane = self._lanes.setdefault(callback.target, _Lane())
        known = lane.waiting.get(callback.id)
        if known is not None and known.callback.attempt > callback.attempt:
            return waiting.record
        lane.waiting[callback.id] = waiting
        self._line_up(callback.target, lane)
        return known.record if known is not None else None

    def admit(self) -> list[Waiting]:
        """Those whose turn it is; each holds a slot until `finish`."""
        admitted = []
        while self._free and self._turns:
            target = self._turns.popleft()
            lane = self._lanes[target]
            lane.in_turn = False
            if lane.waiting and lane.calling < self._target_slots:
                _id, waiting = lane.waiting.popitem(last=False)
                lane.calling += 1
                self._free -= 1
                admitted.append(waiting)
            self._line_up(target, lane)
        return admitted

    def finish(self, target: str, took_s: float | None) -> None:
        """Gives a slot back.

        Args:
            target: whose.
            took_s: what the call took, in seconds; None when there was none.
        """
        lane = self._lanes[target]
        lane.calling -= 1
        self._free += 1
        if took_s is not None:
            before = self._pace_s.pop(target, took_s)
            self._pace_s[target] = before + _LATEST * (took_s - before)
            if len(self._pace_s) > _PACES:
                self._pace_s.popitem(last=False)
        self._line_up(target, lane)

    def crowded_out(self, target: str) -> list[Waiting]:
        """Takes out those who would wait too long at the target's pace, the last to come first."""
        lane = self._lanes.get(target)
        pace_s = self._pace_s.get(target, 0.0)
        if lane is None or pace_s <= 0:
            return []
        room = int(self._patience_s * self._target_slots / pace_s)
        out = [lane.waiting.popitem()[1] for _ in range(len(lane.waiting) - room)]
        self._line_up(target, lane)
        return out

    def take_out(self, which: Callable[[Waiting], bool]) -> list[Waiting]:
        """Takes out all for whom `which` is true."""
        out = []
        for target, lane in list(self._lanes.items()):
            found = [waiting for waiting in lane.waiting.values() if which(waiting)]
            for waiting in found:
                del lane.waiting[waiting.callback.id]
            out += found
            self._line_up(target, lane)
        return out

    def _line_up(self, target: str, lane: _Lane) -> None:
        """Gives a lane its turn when it can use one, and drops it when nothing is left of it."""
        if lane.in_turn:
            return
        if lane.waiting and lane.calling < self._target_slots:
            lane.in_turn = True
            self._turns.append(target)
        elif not lane.waiting and not lane.calling:
            self._lanes.pop(target, None)
