"""Who is called next: one lane a target, a few slots each, all lanes in turn. No I/O; time is an argument.

What keeps a slow target from being felt by others, before and after it is known to be one (C5)
- A lane has at most `target_slots` calls, and while few slots are free at most one.
- Doubtful targets, whose latest call was slow, hold at most `doubtful_slots` together.
- A call that has turned out slow gives its slot back and goes on in the `slow_pool`, which is bounded, too.
- What would wait too long in its lane is crowded out, so that nobody's lane fills the hand of the process; what does wait too
  long all the same, behind targets that hold every slot it could have, is overdue.
"""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.callbacks.hand import Record, Waiting
from penstock.core.rates import Rates
from penstock.core.target import TargetId

# Targets whose pace is remembered after their lane has emptied.
_PACES = 10_000
# Weight of the latest call in a target's pace: a quicker one shows what the target can do, a slower one may have waited for
# this process, which is busiest when much has just come.
_QUICKER = 0.3
_SLOWER = 0.1
# A slower one counts for the time that it stands for: a target's calls that were all slower for this share of the patience weigh
# about two thirds. What lasted for a moment, as when this process was busy with a burst, says nothing of the whole patience.
_LATELY = 0.5
# So many times the patience is too long for anybody. What was let in waits about that long by the pace of its target, and
# the stall watchdog gives a record at least twice the patience (`CallbacksSettings`).
_OVERDUE = 1.5
# While no more than this share of the slots is free, nobody gets a second one.
_RESERVE = 0.25
# So many seconds of a quick target's calls are written down ahead, so that a call begins when one ends and not when the
# database has answered; but at most so many times the calls it may have under way.
_AHEAD_S = 0.05
_MOST_AHEAD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The bounds of some lanes.

    Attributes:
        slots: most calls under way.
        target_slots: most calls under way to one target; while it is quick it holds further ones, for attempts that are written down ahead.
        doubtful_slots: most calls under way to all doubtful targets together.
        waiting: most callbacks that wait in one lane.
        waiting_in_all: when more wait in all lanes together, each keeps no more than its share of it.
        patience_s: what would wait for its target longer than this is crowded out.
        ahead: whether attempts to quick targets are written down ahead of their calls.
    """

    slots: int
    target_slots: int
    doubtful_slots: int
    waiting: int
    waiting_in_all: int
    patience_s: float
    ahead: bool = True


@dataclass(slots=True)
class _Lane:
    waiting: OrderedDict[str, Waiting] = field(default_factory=OrderedDict)
    # Slots held: for calls, and for what is to be called.
    held: int = 0
    calling: int = 0
    # Of the slots, the ones that were taken while the target was doubtful.
    doubted: int = 0
    # It is lined up again while it holds fewer: half of what it may hold ahead, so that many go into one statement.
    refill: int = sys.maxsize
    # Whose attempt is written down, and who waits for a call of the target's to end.
    ready: deque[Waiting] = field(default_factory=deque)
    in_turn: bool = False


class Lanes:
    """The lanes of all targets.

    Args:
        room: the bounds.
        doubtful: whether a target's latest call was slow.
        rates: when a target may be called next; shared by all lanes that call the same targets.
        bound: the most calls a second that these lanes may make to a target, whatever its rate; None for any number.
    """

    def __init__(
        self,
        room: Room,
        *,
        doubtful: Callable[[TargetId], bool] = lambda _target: False,
        rates: Rates | None = None,
        bound: Callable[[TargetId], float | None] = lambda _target: None,
    ) -> None:
        self._room = room
        self._free = room.slots
        self._reserve = int(room.slots * _RESERVE)
        self._doubtful = doubtful
        self._rates = Rates() if rates is None else rates
        self._bound = bound
        self._doubted = 0
        self._count = 0
        self._lanes: dict[TargetId, _Lane] = {}
        self._turns: deque[TargetId] = deque()
        # Those whose turn has come and who must let others go first: who has a slot while few are free, and
        # the doubtful while others of them hold all they may.
        self._pressed: OrderedDict[TargetId, None] = OrderedDict()
        self._doubts: OrderedDict[TargetId, None] = OrderedDict()
        # (when, target): whose rate does not allow another call yet.
        self._later: list[tuple[float, TargetId]] = []
        self._pace_s: OrderedDict[TargetId, float] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Whether `admit` has nobody to look at."""
        return not (self._turns or self._pressed or self._doubts or self._later)

    @property
    def waiting(self) -> int:
        """Callbacks whose attempt has not begun."""
        return self._count

    @property
    def held(self) -> int:
        """Slots taken."""
        return self._room.slots - self._free

    def waiting_for(self, target: TargetId) -> int:
        """Callbacks in one lane."""
        lane = self._lanes.get(target)
        return len(lane.waiting) if lane else 0

    def held_by(self, target: TargetId) -> int:
        """Slots that one target holds."""
        lane = self._lanes.get(target)
        return lane.held if lane else 0

    def put(self, waiting: Waiting, now_s: float = 0.0) -> Record | None:
        """Lines a callback up; returns the record that has become superfluous, when it is in line already.

        After a rebalance everything that waits comes a second time, and the old records are worth nothing.

        Args:
            waiting: the callback.
            now_s: seconds on the clock that `overdue` is given.
        """
        callback = waiting.callback
        lane = self._lanes.setdefault(callback.target, _Lane())
        known = lane.waiting.get(callback.id)
        if known is not None and known.callback.attempt > callback.attempt:
            return waiting.record
        self._count += known is None
        # It keeps its place, so those who came first are first.
        waiting.came_s = now_s if known is None else known.came_s
        lane.waiting[callback.id] = waiting
        self._line_up(callback.target, lane)
        return known.record if known is not None else None

    def admit(self, now_s: float = 0.0) -> list[Waiting]:
        """Those whose attempt is to be written down; each holds a slot until `finish` or `forgo`.

        Args:
            now_s: seconds on any clock that does not step; only rates need it.
        """
        while self._later and self._later[0][0] <= now_s:
            _at_s, target = heapq.heappop(self._later)
            if (lane := self._lanes.get(target)) is not None:
                lane.in_turn = False
                self._line_up(target, lane)
        admitted: list[Waiting] = []
        if self._pressed or self._doubts:
            self._recall()
        while self._free and (self._turns or ((self._pressed or self._doubts) and self._recall())):
            target = self._turns.popleft()
            lane = self._lanes[target]
            if not lane.waiting:
                lane.in_turn = False
                self._drop_if_empty(target, lane)
            elif lane.held >= (most := self._most(target)):
                lane.in_turn = False
                lane.refill = (most + self._room.target_slots) // 2
            elif lane.held and self._free <= self._reserve:
                self._pressed[target] = None
            elif self._doubtful(target) and self._doubted >= self._room.doubtful_slots:
                self._doubts[target] = None
            elif (turn_s := self._rates.turn(target, self, now_s, self._bound(target))) is not None:
                heapq.heappush(self._later, (turn_s, target))
            else:
                admitted.append(self._take_from(target, lane))
        return admitted

    def _recall(self) -> bool:
        """Lets those have their turn who let others go first, as many as there is room for; whether there are any.

        Not all of them: under load there is room for one after each call, and all the others would only line up again.
        """
        for aside, room in (
            (self._pressed, self._free - self._reserve),
            (self._doubts, self._room.doubtful_slots - self._doubted),
        ):
            for _ in range(min(len(aside), room)):
                self._turns.append(aside.popitem(last=False)[0])
        return bool(self._turns)

    def next_turn_s(self) -> float | None:
        """When `admit` may have somebody whose rate does not allow it now; None when there is nobody."""
        return self._later[0][0] if self._later else None

    def renew(self, target: TargetId) -> None:
        """Its rate has changed: `admit` asks again whether it may be called."""
        others = [(at_s, other) for at_s, other in self._later if other != target]
        if len(others) < len(self._later):
            heapq.heapify(others)
            self._later = others
            self._turns.append(target)

    def may_call(self, waiting: Waiting) -> bool:
        """The attempt is written down: whether it is to be made now, or when `finish` returns it."""
        lane = self._lanes[waiting.callback.target]
        if lane.calling >= self._room.target_slots:
            lane.ready.append(waiting)
            return False
        lane.calling += 1
        return True

    def finish(self, target: TargetId, took_s: float) -> Waiting | None:
        """A call has ended, or has turned out slow, and its slot is free; returns who is to be called in its place.

        Args:
            target: whose.
            took_s: what the call took so far, in seconds.
        """
        lane = self._lanes[target]
        before = self._pace_s.pop(target, took_s)
        lately_s = _LATELY * self._room.patience_s * self._room.target_slots
        weight = _QUICKER if took_s < before else min(_SLOWER, took_s / lately_s)
        self._pace_s[target] = before + weight * (took_s - before)
        if len(self._pace_s) > _PACES:
            self._pace_s.popitem(last=False)
        lane.calling -= 1
        following = lane.ready.popleft() if lane.ready else None
        lane.calling += following is not None
        self._give_back(target, lane)
        return following

    def forgo(self, target: TargetId) -> None:
        """A slot is free, whose attempt is not to be made."""
        self._give_back(target, self._lanes[target])

    def next_ready(self, target: TargetId) -> Waiting | None:
        """Whom `finish` would return."""
        lane = self._lanes.get(target)
        return lane.ready[0] if lane and lane.ready else None

    def take_ready(self, target: TargetId | None = None) -> list[Waiting]:
        """Takes out those whose attempt is written down and that are not called yet, of one lane or of all."""
        taken: list[Waiting] = []
        for name in [target] if target is not None else list(self._lanes):
            lane = self._lanes.get(name)
            out = list(lane.ready) if lane else []
            if lane is not None:
                lane.ready.clear()
                for _ in out:
                    self._give_back(name, lane)
            taken += out
        return taken

    def _give_back(self, target: TargetId, lane: _Lane) -> None:
        lane.held -= 1
        self._free += 1
        if lane.doubted:
            lane.doubted -= 1
            self._doubted -= 1
        if target in self._pressed and not lane.held:
            # It has no slot any more: nothing to press it for.
            del self._pressed[target]
            lane.in_turn = False
        self._line_up(target, lane)

    def crowded_out(self, target: TargetId) -> tuple[list[Waiting], float]:
        """Takes out those who would wait too long at the target's pace, the last to come first.

        Returns:
            They, and the seconds after which there should be room for them.
        """
        lane = self._lanes.get(target)
        # However slow it is, what can begin at once is never sent away: its pace changes only by being called.
        if lane is None or len(lane.waiting) <= self._room.target_slots:
            return [], 0.0
        pace_s = self._pace_s.get(target, 0.0) / self._room.target_slots
        pace_s = max(pace_s, self._rates.pace_s(target, self, self._bound(target)))
        room, waits = self._room.waiting, len(lane.waiting)
        if (
            waits <= room
            and waits * pace_s <= self._room.patience_s
            and self._count <= self._room.waiting_in_all
        ):
            # As nearly always.
            return [], 0.0
        if pace_s:
            room = min(room, int(self._room.patience_s / pace_s))
        if self._count > self._room.waiting_in_all:
            room = min(room, self._room.waiting_in_all // len(self._lanes))
        room = max(room, self._room.target_slots)
        out = [lane.waiting.popitem()[1] for _ in range(waits - room)]
        self._count -= len(out)
        return out, room * pace_s

    def overdue(self, now_s: float) -> list[Waiting]:
        """Takes out those who have waited longer than others can be made to wait behind them.

        Beyond what crowds out: that goes by the pace of a target, and knows nothing of slots that are all taken by others.
        """
        before_s = now_s - _OVERDUE * self._room.patience_s
        out: list[Waiting] = []
        for target, lane in list(self._lanes.items()):
            while lane.waiting and (first := next(iter(lane.waiting.values()))).came_s < before_s:
                del lane.waiting[first.callback.id]
                out.append(first)
            self._drop_if_empty(target, lane)
        self._count -= len(out)
        return out

    def take_out(self, which: Callable[[Waiting], bool], target: TargetId | None = None) -> list[Waiting]:
        """Takes out all for whom `which` is true, of one lane or of all."""
        lanes = [(target, self._lanes[target])] if target in self._lanes else []
        if target is None:
            lanes = list(self._lanes.items())
        out = []
        for name, lane in lanes:
            found = [waiting for waiting in lane.waiting.values() if which(waiting)]
            for waiting in found:
                del lane.waiting[waiting.callback.id]
            out += found
            self._drop_if_empty(name, lane)
        self._count -= len(out)
        return out

    def _take_from(self, target: TargetId, lane: _Lane) -> Waiting:
        _id, waiting = lane.waiting.popitem(last=False)
        self._count -= 1
        lane.held += 1
        self._free -= 1
        if self._doubtful(target):
            lane.doubted += 1
            self._doubted += 1
        if lane.waiting:
            self._turns.append(target)
        else:
            lane.in_turn = False
        return waiting

    def _most(self, target: TargetId) -> int:
        """The slots that a target may hold."""
        most = self._room.target_slots
        pace_s = self._pace_s.get(target)
        if (
            pace_s is None
            or self._free <= self._reserve
            or self._doubtful(target)
            or self._rates.pace_s(target, self, self._bound(target))
        ):
            return most
        return most + min(int(most * _AHEAD_S / max(pace_s, 0.001)), most * _MOST_AHEAD)

    def _line_up(self, target: TargetId, lane: _Lane) -> None:
        """Gives a lane its turn when it can use one, and drops it when nothing is left of it."""
        if lane.in_turn:
            return
        if not lane.waiting:
            self._drop_if_empty(target, lane)
        elif lane.held < lane.refill or lane.held < self._room.target_slots:
            lane.in_turn = True
            self._turns.append(target)

    def _drop_if_empty(self, target: TargetId, lane: _Lane) -> None:
        # One that is in turn is dropped when its turn comes.
        if not lane.waiting and not lane.held and not lane.in_turn:
            self._lanes.pop(target, None)
