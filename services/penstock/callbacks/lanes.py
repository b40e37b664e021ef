"""Decides which callback is called next. No I/O.

Namespaces take turns, and the lanes of a namespace, one per target, take turns within it.

Isolation of slow targets (C5)
- A lane has at most `target_slots` calls, and at most one while few slots are free.
- A namespace leaves slots free for the others (`host_slots`).
- All targets of a host, and the untrusted hosts of a server, have few slots (`host_slots`).
- Unresponsive targets, whose latest call was slow, hold at most `unresponsive_slots` together.
- A call that turns out slow frees its slot and moves to the slow pool, which is bounded, too.
- A callback that would wait too long at the pace of its target leaves its lane at once
  (`take_excess`). One that does wait too long, behind targets that hold all slots, leaves it later
  (`take_overdue`).
"""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from penstock.callbacks.host_slots import HostSlots
from penstock.callbacks.hosts import Host
from penstock.callbacks.receiver import InFlight, Record
from penstock.callbacks.settings import LaneBounds
from penstock.core.call_pacer import CallPacer
from penstock.core.round_robin import RoundRobin
from penstock.core.target import TargetId

# Targets whose pace is kept after their lane has emptied.
_PACES = 10_000
# Weight of the latest call in the moving average of a target's duration. A quicker call shows what
# the target can do; a slower one may have waited for this process, which is busiest during a burst.
_QUICKER = 0.3
_SLOWER = 0.1
# A slower call weighs by its duration: slow calls that fill this share of the longest wait weigh
# about two thirds together. A short spike of this process therefore barely moves the average.
_SPIKE_SHARE = 0.5
# A callback that has waited this many times the longest wait is overdue. The stall detector allows
# a record twice the longest wait (`CallbacksSettings`).
_OVERDUE = 1.5
# While no more than this share of the slots is free, no target gets a second one.
_RESERVE = 0.25
# Attempts to quick targets are claimed this many seconds ahead of their calls, so that a call
# begins when another ends and not when the database has answered. The second number bounds them, in
# multiples of the target's slots.
_AHEAD_S = 0.05
_MOST_AHEAD = 16


@dataclass(slots=True)
class _Lane:
    waiting: OrderedDict[str, InFlight] = field(default_factory=OrderedDict)
    # Slots in use: for calls, for claimed attempts and for those being claimed.
    slots: int = 0
    calls: int = 0
    # It is scheduled again below this number of slots: half of what it may claim ahead, so that
    # claims come in batches.
    refill: int = sys.maxsize
    # Claimed attempts that wait for a call of the target to end.
    claimed: deque[InFlight] = field(default_factory=deque)
    scheduled: bool = False


class Lanes:
    """The lanes of all targets on one path.

    Args:
        bounds: of the path.
        host_of: the host of a target.
        servers_of: the servers of a host.
        is_unresponsive: whether a target's latest call was slow.
        is_trusted: whether a target's latest call was answered in time.
        pacer: when a target may be called next; shared by the paths.
        max_rate: most calls per second that this path may make to a target; None for the target's
            own rate.
    """

    def __init__(
        self,
        bounds: LaneBounds,
        *,
        host_of: Callable[[TargetId], Host],
        servers_of: Callable[[Host], tuple[str, ...]],
        is_unresponsive: Callable[[TargetId], bool] = lambda _target_id: False,
        is_trusted: Callable[[TargetId], bool] = lambda _target_id: False,
        pacer: CallPacer | None = None,
        max_rate: Callable[[TargetId], float | None] = lambda _target_id: None,
    ) -> None:
        self._bounds = bounds
        self._free = bounds.slots
        self._reserve = int(bounds.slots * _RESERVE)
        self._is_unresponsive = is_unresponsive
        self._pacer = CallPacer() if pacer is None else pacer
        self._max_rate = max_rate
        self._hosts = HostSlots(bounds, host_of, servers_of, is_trusted, is_unresponsive)
        self._waiting = 0
        self._lanes: dict[TargetId, _Lane] = {}
        self._round_robin: RoundRobin[TargetId] = RoundRobin(attrgetter("namespace"))
        # Scheduled lanes with a slot that are set aside while few are free.
        self._short_of_slots: OrderedDict[TargetId, None] = OrderedDict()
        # Heap of (when, target) of the scheduled lanes whose target has no free slot by its rate
        # yet.
        self._paced: list[tuple[float, TargetId]] = []
        # Moving average of each target's call duration.
        self._took_s: OrderedDict[TargetId, float] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Whether no lane is scheduled, so that `admit` returns nothing."""
        return not (self._round_robin or self._short_of_slots or self._paced or self._hosts)

    @property
    def waiting(self) -> int:
        """Callbacks whose attempt is not being claimed yet."""
        return self._waiting

    @property
    def slots_in_use(self) -> int:
        """Slots in use by all targets."""
        return self._bounds.slots - self._free

    def targets(self) -> list[TargetId]:
        """Targets with callbacks that wait or use a slot."""
        return list(self._lanes)

    def waiting_for(self, target_id: TargetId) -> int:
        """Callbacks that wait in one lane."""
        lane = self._lanes.get(target_id)
        return len(lane.waiting) if lane else 0

    def slots_of(self, target_id: TargetId) -> int:
        """Slots in use by one target."""
        lane = self._lanes.get(target_id)
        return lane.slots if lane else 0

    def put(self, in_flight: InFlight, now_s: float = 0.0) -> Record | None:
        """Queues a callback; returns the superseded record if the callback is queued already.

        After a rebalance Kafka delivers every waiting callback a second time, and the old records
        cannot be acknowledged.

        Args:
            in_flight: the callback.
            now_s: seconds on the clock of `take_overdue`.
        """
        callback = in_flight.callback
        lane = self._lanes.setdefault(callback.target, _Lane())
        queued = lane.waiting.get(callback.id)
        if queued is not None and queued.callback.attempt > callback.attempt:
            return in_flight.record
        self._waiting += queued is None
        # It keeps its place in the lane.
        in_flight.queued_at_s = now_s if queued is None else queued.queued_at_s
        lane.waiting[callback.id] = in_flight
        self._schedule(callback.target, lane)
        return queued.record if queued is not None else None

    def admit(self, now_s: float = 0.0) -> list[InFlight]:
        """Admits callbacks whose attempts are to be claimed.

        Each uses a slot until `finish` or `free_slot`.

        Args:
            now_s: seconds on a monotonic clock, for the rates.
        """
        while self._paced and self._paced[0][0] <= now_s:
            _at_s, target_id = heapq.heappop(self._paced)
            if (lane := self._lanes.get(target_id)) is not None:
                lane.scheduled = False
                self._schedule(target_id, lane)
        admitted: list[InFlight] = []
        while self._free and (self._round_robin or self._recall()):
            target_id = self._round_robin.popleft()
            lane = self._lanes[target_id]
            if not lane.waiting:
                lane.scheduled = False
                self._drop_if_empty(target_id, lane)
            elif lane.slots >= (most := self._most_slots(target_id)):
                lane.scheduled = False
                lane.refill = (most + self._bounds.target_slots) // 2
            elif lane.slots and self._free <= self._reserve:
                self._short_of_slots[target_id] = None
            elif self._hosts.set_aside(target_id, scarce=self._free <= self._reserve, ahead=most):
                pass
            elif (
                turn_s := self._pacer.acquire(target_id, self, now_s, self._max_rate(target_id))
            ) is not None:
                heapq.heappush(self._paced, (turn_s, target_id))
            else:
                admitted.append(self._take_first(target_id, lane))
        return admitted

    def _recall(self) -> bool:
        """Schedules lanes that were set aside; returns whether any lane is scheduled.

        Not all of them: under load each call frees one slot, and the other lanes would be set aside
        again.
        """
        for _ in range(min(len(self._short_of_slots), self._free - self._reserve)):
            self._round_robin.append(self._short_of_slots.popitem(last=False)[0])
        if self._hosts:
            for target_id in self._hosts.recall(scarce=self._free <= self._reserve):
                self._round_robin.append(target_id)
        return bool(self._round_robin)

    def next_paced_s(self) -> float | None:
        """When a rate allows the next call; None when no rate delays one."""
        return self._paced[0][0] if self._paced else None

    def rate_changed(self, target_id: TargetId) -> None:
        """Lets the next `admit` ask the pacer again for a target whose rate has changed."""
        others = [(at_s, other_id) for at_s, other_id in self._paced if other_id != target_id]
        if len(others) < len(self._paced):
            heapq.heapify(others)
            self._paced = others
            self._round_robin.append(target_id)

    def start(self, in_flight: InFlight) -> bool:
        """Starts a claimed attempt; returns False when it must wait until `finish` returns it."""
        lane = self._lanes[in_flight.callback.target]
        if lane.calls >= self._bounds.target_slots:
            lane.claimed.append(in_flight)
            return False
        lane.calls += 1
        return True

    def finish(self, target_id: TargetId, took_s: float) -> InFlight | None:
        """Frees the slot of a call; returns the callback to call in its place.

        Args:
            target_id: the target of the call.
            took_s: duration of the call so far, in seconds.
        """
        lane = self._lanes[target_id]
        average_s = self._took_s.pop(target_id, took_s)
        spike_s = _SPIKE_SHARE * self._bounds.longest_wait_s * self._bounds.target_slots
        weight = _QUICKER if took_s < average_s else min(_SLOWER, took_s / spike_s)
        self._took_s[target_id] = average_s + weight * (took_s - average_s)
        if len(self._took_s) > _PACES:
            self._took_s.popitem(last=False)
        lane.calls -= 1
        following = lane.claimed.popleft() if lane.claimed else None
        lane.calls += following is not None
        self._free_slot(target_id, lane)
        return following

    def free_slot(self, target_id: TargetId) -> None:
        """Frees the slot of an attempt that is not made."""
        self._free_slot(target_id, self._lanes[target_id])

    def next_claimed(self, target_id: TargetId) -> InFlight | None:
        """The callback that `finish` would return."""
        lane = self._lanes.get(target_id)
        return lane.claimed[0] if lane and lane.claimed else None

    def take_claimed(self, target_id: TargetId) -> list[InFlight]:
        """Removes the callbacks of one lane whose attempts are claimed and not called yet."""
        lane = self._lanes.get(target_id)
        if lane is None:
            return []
        taken = list(lane.claimed)
        lane.claimed.clear()
        for _ in taken:
            self._free_slot(target_id, lane)
        return taken

    def _free_slot(self, target_id: TargetId, lane: _Lane) -> None:
        lane.slots -= 1
        self._free += 1
        self._hosts.free(target_id)
        if target_id in self._short_of_slots and not lane.slots:
            # Only lanes with a slot are set aside for lack of slots.
            del self._short_of_slots[target_id]
            lane.scheduled = False
        self._recall()  # Before this lane, which would take the slot again and again.
        self._schedule(target_id, lane)

    def take_excess(self, target_id: TargetId) -> list[InFlight]:
        """Removes the callbacks that would wait too long at the target's pace, the latest first."""
        lane = self._lanes.get(target_id)
        # Callbacks that can begin at once always stay: only calls change the pace of a target.
        if lane is None or len(lane.waiting) <= self._bounds.target_slots:
            return []
        count = max(0, len(lane.waiting) - self._size(target_id))
        self._waiting -= count
        return [lane.waiting.popitem()[1] for _ in range(count)]

    def room(self, target_id: TargetId) -> int:
        """How many more callbacks of a target `take_excess` would leave."""
        return self._size(target_id) - self.waiting_for(target_id)

    def _size(self, target_id: TargetId) -> int:
        """How many callbacks of a target may wait: those called within the longest wait."""
        bounds, most = self._bounds, self._bounds.lane_size
        interval_s = max(
            self._took_s.get(target_id, 0.0) / bounds.target_slots,
            self._pacer.interval_s(target_id, self, self._max_rate(target_id)),
        )
        if interval_s:
            most = min(most, int(bounds.longest_wait_s / interval_s))
        if self._waiting > bounds.total_size:
            most = min(most, bounds.total_size // max(len(self._lanes), 1))
        return max(most, bounds.target_slots)

    def take_overdue(self, now_s: float) -> list[InFlight]:
        """Removes the callbacks that have waited much longer than the longest wait.

        `take_excess` estimates by the pace of the target alone; it does not see that other targets
        hold all slots.
        """
        before_s = now_s - _OVERDUE * self._bounds.longest_wait_s
        overdue: list[InFlight] = []
        for target_id, lane in list(self._lanes.items()):
            while lane.waiting and (first := next(iter(lane.waiting.values()))).queued_at_s < before_s:
                del lane.waiting[first.callback.id]
                overdue.append(first)
            self._drop_if_empty(target_id, lane)
        self._waiting -= len(overdue)
        return overdue

    def take_waiting(
        self, matches: Callable[[InFlight], bool], target_id: TargetId | None = None
    ) -> list[InFlight]:
        """Removes the waiting callbacks that match, of one lane or of all."""
        lanes = [(target_id, self._lanes[target_id])] if target_id in self._lanes else []
        if target_id is None:
            lanes = list(self._lanes.items())
        taken = []
        for lane_id, lane in lanes:
            matching = [in_flight for in_flight in lane.waiting.values() if matches(in_flight)]
            for in_flight in matching:
                del lane.waiting[in_flight.callback.id]
            taken += matching
            self._drop_if_empty(lane_id, lane)
        self._waiting -= len(taken)
        return taken

    def _take_first(self, target_id: TargetId, lane: _Lane) -> InFlight:
        _id, in_flight = lane.waiting.popitem(last=False)
        self._waiting -= 1
        lane.slots += 1
        self._free -= 1
        self._hosts.take(target_id)
        if lane.waiting:
            self._round_robin.append(target_id)
        else:
            lane.scheduled = False
        return in_flight

    def _most_slots(self, target_id: TargetId) -> int:
        """The slots that a target may use now."""
        most = self._bounds.target_slots
        took_s = self._took_s.get(target_id)
        if (
            took_s is None
            or self._free <= self._reserve
            or self._is_unresponsive(target_id)
            or self._pacer.interval_s(target_id, self, self._max_rate(target_id))
        ):
            return most
        return most + min(int(most * _AHEAD_S / max(took_s, 0.001)), most * _MOST_AHEAD)

    def _schedule(self, target_id: TargetId, lane: _Lane) -> None:
        """Adds a lane to the round robin if it can use a slot; drops a lane that is empty."""
        if lane.scheduled:
            return
        if not lane.waiting:
            self._drop_if_empty(target_id, lane)
        elif lane.slots < lane.refill or lane.slots < self._bounds.target_slots:
            lane.scheduled = True
            self._round_robin.append(target_id)

    def _drop_if_empty(self, target_id: TargetId, lane: _Lane) -> None:
        if not lane.waiting and self._hosts.drop(target_id):
            lane.scheduled = False
        # Another scheduled lane is dropped when it comes up in the round robin.
        if not lane.waiting and not lane.slots and not lane.scheduled:
            self._lanes.pop(target_id, None)
