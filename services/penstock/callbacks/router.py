"""Routes callbacks: into a lane of one of the two paths, or back to PostgreSQL. No I/O.

Kafka records are acknowledged in order, so no callback stays longer than its target's pace
justifies. The methods return the callbacks that have to leave as `Deferral`s; the pipeline
records those in PostgreSQL.

Calls that turn out slow move to the `SlowPool` and use no slot of a lane.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from penstock.callbacks.lanes import Lanes
from penstock.callbacks.receiver import InFlight, Record
from penstock.callbacks.settings import LANE_SIZE, MAX_WAITING, SLOW_TARGET_SLOTS, CallbacksSettings
from penstock.callbacks.target import Target
from penstock.callbacks.target_cache import TargetCache
from penstock.core.call_pacer import CallPacer
from penstock.core.fair_share import most_used
from penstock.core.offset_tracker import Partition
from penstock.core.target import HostId, TargetId
from penstock.kafka.topology.topics import CALLBACKS_DIVERTED

# An attempt that was claimed ahead and could not be called within so many seconds is not made: its
# target has become slow.
STALE_S = 1.0
# Most seconds until a postponed callback is published again.
POSTPONE_S = 30.0


class _Namespace(NamedTuple):
    """Counts the slow calls of a namespace."""

    namespace: str


class _Host(NamedTuple):
    """Counts the slow calls of a host. Its id alone may equal a target's."""

    id: HostId


# A slow call counts for its target, host and namespace, and the servers of the host.
_SlowKey = TargetId | _Host | _Namespace | str
# A slot of the slow pool.
SlowPlace = tuple[_SlowKey, ...]


@dataclass(frozen=True, slots=True)
class Deferral:
    """A callback that leaves this process without a call and waits in PostgreSQL.

    Attributes:
        in_flight: the callback.
        due_in_s: seconds until its record is published again; None holds it until its target may be
            called.
        queued: whether it is held behind other callbacks of its target, and not diverted.
        claimed: whether an attempt was recorded. Its number is used up, but the retry schedule does
            not count it.
    """

    in_flight: InFlight
    due_in_s: float | None
    claimed: bool = False
    queued: bool = False

    @property
    def attempt(self) -> tuple[str, int]:
        """Id of the callback, and the attempts recorded so far."""
        callback = self.in_flight.callback
        return callback.id, callback.attempt + self.claimed

    @property
    def uncounted(self) -> int | None:
        """Attempts that the schedule does not count from now on; None for no change."""
        return self.in_flight.uncounted + 1 if self.claimed else None


# Compared by identity: `TimeoutQueue` needs that.
@dataclass(slots=True, eq=False)
class Call:
    """A call under way.

    Attributes:
        in_flight: the callback.
        lanes: whose slot it uses.
        in_self_check: whether self-check mode was on when it began.
        slow: whether it has turned out slow.
        slow_place: its slot of the slow pool, if it uses that and none of the lanes.
        timer: the end of its extended time.
        extensions: how often its time was extended.
    """

    in_flight: InFlight
    lanes: Lanes
    in_self_check: bool
    slow: bool = False
    slow_place: SlowPlace | None = None
    timer: asyncio.TimerHandle | None = None
    extensions: int = 0


class SlowPool:
    """A bulkhead for slow calls, bounded in total and per target, host, server and namespace.

    Args:
        settings: for the bounds.
        cache: has the hosts of the targets.
    """

    def __init__(self, settings: CallbacksSettings, cache: TargetCache) -> None:
        self._settings = settings
        self._cache = cache
        self._free = settings.slow_slots
        self._calls: Counter[_SlowKey] = Counter()

    def __len__(self) -> int:
        return self._settings.slow_slots - self._free

    def calls_to(self, target_id: TargetId) -> int:
        """Calls to one target in the pool."""
        return self._calls[target_id]

    def enter(self, target_id: TargetId) -> SlowPlace | None:
        """Takes a slot, to be given to `leave`; None when none is free."""
        settings, host = self._settings, self._cache.host_of(target_id)
        bounds: dict[_SlowKey, int] = {
            _Namespace(target_id.namespace): most_used(self._free),
            target_id: SLOW_TARGET_SLOTS,
            _Host(host.id): settings.slow_host_slots,
            **dict.fromkeys(self._cache.hosts.servers_of(host), settings.slow_server_slots),
        }
        if not self._free or any(self._calls[key] >= most for key, most in bounds.items()):
            return None
        self._free -= 1
        self._calls.update(bounds.keys())
        return tuple(bounds)

    def leave(self, place: SlowPlace) -> None:
        """Frees the slot of a call that has ended."""
        self._free += 1
        for key in place:
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]


class Router:
    """The two paths with their lanes.

    Args:
        settings: of the service.
        cache: the state of the targets.
        random_share: random numbers from 0 to 1, for jitter.

    Attributes:
        normal: the lanes of the normal path.
        diverted: the lanes of the diverted path: retries, and abnormal targets.
        slow_pool: the slow calls.
    """

    def __init__(
        self, settings: CallbacksSettings, cache: TargetCache, random_share: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._random_share = random_share
        # Both paths share the pacer, because a target has one rate.
        lanes = partial(
            Lanes,
            host_of=cache.host_of,
            servers_of=cache.hosts.servers_of,
            is_unresponsive=cache.is_unresponsive,
            is_trusted=cache.is_trusted,
            pacer=CallPacer(cache.rate_of),
        )
        self.normal = lanes(settings.lane_bounds)
        self.diverted = lanes(settings.diverted_lane_bounds, max_rate=cache.drain_rate_of)
        self._both = (self.normal, self.diverted)
        self.slow_pool = SlowPool(settings, cache)

    def lanes_of(self, record: Record) -> Lanes:
        """The lanes of the path on which a record arrived."""
        return self.diverted if record.topic == CALLBACKS_DIVERTED.name else self.normal

    @property
    def drain_room(self) -> int:
        """How many more held callbacks may be drained now, for all targets together."""
        return LANE_SIZE - self.diverted.waiting

    def has(self, target_id: TargetId) -> bool:
        """Whether callbacks of a target wait here or are called."""
        lanes = any(lanes.waiting_for(target_id) or lanes.slots_of(target_id) for lanes in self._both)
        return lanes or self.slow_pool.calls_to(target_id) > 0

    def route(self, in_flight: InFlight, target: Target, now_s: float) -> list[Deferral]:
        """Queues a received callback, or defers it; returns all callbacks that leave."""
        lanes, target_id = self.lanes_of(in_flight.record), in_flight.callback.target
        diverted = lanes is self.diverted
        if target.disabled or (self._cache.is_abnormal(target) and not diverted):
            return [Deferral(in_flight, None)]
        if not diverted and target_id in self._cache.queued:
            # In the order of arrival: behind those that are held already.
            return [Deferral(in_flight, None, queued=True)]
        if diverted and (
            # One probe at a time is enough to see whether the target answers again.
            (target.unresponsive and (lanes.waiting_for(target_id) or lanes.slots_of(target_id)))
            or lanes.waiting >= LANE_SIZE
        ):
            return [Deferral(in_flight, None)]
        if (
            lanes.waiting >= MAX_WAITING
            and lanes.waiting_for(target_id) >= self._settings.callback_target_slots
        ):
            # Callbacks of slow targets must not block the reading of records for others.
            return [self._postponed(in_flight)]
        self.put(in_flight, now_s)
        return self.take_excess(lanes, target_id)

    def put(self, in_flight: InFlight, now_s: float) -> None:
        """Queues a callback in any case."""
        superseded = self.lanes_of(in_flight.record).put(in_flight, now_s)
        if superseded is not None:
            superseded.settle()

    @property
    def idle(self) -> bool:
        """Whether `admit` returns nothing."""
        return self.normal.idle and self.diverted.idle

    def admit(self, now_s: float) -> list[InFlight]:
        """The callbacks whose attempts are to be claimed now."""
        return [in_flight for lanes in self._both for in_flight in lanes.admit(now_s)]

    def next_paced_s(self) -> float | None:
        """When `admit` may admit a callback that a rate delays now; None without one."""
        return min((at_s for lanes in self._both if (at_s := lanes.next_paced_s()) is not None), default=None)

    def claimed(
        self, granted: Iterable[InFlight], refused: Iterable[InFlight], now_s: float
    ) -> tuple[list[InFlight], list[Deferral]]:
        """Starts the calls of claimed attempts and frees the slots of refused ones.

        Args:
            granted: callbacks whose attempt is recorded.
            refused: callbacks whose attempt must not be made.
            now_s: on the loop's clock.

        Returns:
            The callbacks to call now, and those that leave since their target was diverted or
            disabled meanwhile.
        """
        calls: list[InFlight] = []
        deferred: list[Deferral] = []
        for in_flight in granted:
            lanes = self.lanes_of(in_flight.record)
            if self._is_blocked(in_flight):
                lanes.free_slot(in_flight.callback.target)
                deferred.append(self._deferred_claim(in_flight))
                continue
            in_flight.claimed_at_s = now_s
            if lanes.start(in_flight):
                calls.append(in_flight)
        for in_flight in refused:
            self.lanes_of(in_flight.record).free_slot(in_flight.callback.target)
        return calls, deferred

    def finish(
        self, lanes: Lanes, target_id: TargetId, took_s: float, now_s: float
    ) -> tuple[InFlight | None, list[Deferral]]:
        """Frees the slot of a call.

        Args:
            lanes: of the call.
            target_id: of the call.
            took_s: duration of the call so far, in seconds.
            now_s: on the loop's clock.

        Returns:
            The callback to call in its place, and those that leave.
        """
        deferred: list[Deferral] = []
        following = lanes.next_claimed(target_id)
        if following is not None and (
            self._is_blocked(following) or now_s - following.claimed_at_s > STALE_S
        ):
            deferred = self._defer_claims(target_id)
        return lanes.finish(target_id, took_s), deferred

    def take_excess(self, lanes: Lanes, target_id: TargetId) -> list[Deferral]:
        """Defers the callbacks that would wait too long for their target.

        They are held until there is room for them. A target that takes seconds may be owed
        thousands, and a callback that comes back again and again costs rows and records each time.
        """
        queued = lanes is self.normal
        return [Deferral(in_flight, None, queued=queued) for in_flight in lanes.take_excess(target_id)]

    def take_overdue(self, now_s: float) -> list[Deferral]:
        """Defers the callbacks that have waited too long."""
        deferred = [Deferral(in_flight, None, queued=True) for in_flight in self.normal.take_overdue(now_s)]
        for in_flight in self.diverted.take_overdue(now_s):
            target = self._cache.get(in_flight.callback.target)
            if target is not None and self._cache.is_abnormal(target):
                # Held, so that it is drained again at the increasing intervals of the probes.
                deferred.append(Deferral(in_flight, None))
            else:
                deferred.append(self._postponed(in_flight))
        return deferred

    def target_changed(self, target_id: TargetId) -> list[Deferral]:
        """Applies a change in PostgreSQL: a target was disabled, enabled or given a rate."""
        target = self._cache.get(target_id)
        if target is not None and target.disabled:
            return self.hold_all(target_id)
        # Claims ahead would exceed the rate.
        deferred = self._defer_claims(target_id) if self._cache.rate_of(target_id) else []
        for lanes in self._both:
            lanes.rate_changed(target_id)
        return deferred

    def hold_all(self, target_id: TargetId) -> list[Deferral]:
        """Defers all callbacks of a target to be held; calls under way continue."""
        deferred: list[Deferral] = []
        for lanes in self._both:
            waiting = lanes.take_waiting(lambda _in_flight: True, target_id)
            deferred += [Deferral(in_flight, None) for in_flight in waiting]
            deferred += [
                Deferral(in_flight, None, claimed=True) for in_flight in lanes.take_claimed(target_id)
            ]
        return deferred

    def hold_host(self, host_id: HostId) -> list[Deferral]:
        """Defers all callbacks of a host's targets to be held; calls under way continue."""
        return [
            deferral
            for target_id in {target_id for lanes in self._both for target_id in lanes.targets()}
            if self._cache.host_of(target_id).id == host_id
            for deferral in self.hold_all(target_id)
        ]

    def revoke(self, partitions: frozenset[Partition]) -> None:
        """Drops the waiting callbacks of partitions that another process may own now."""
        for lanes in self._both:
            lanes.take_waiting(
                lambda in_flight: (in_flight.record.topic, in_flight.record.partition) in partitions
            )

    def close(self) -> list[InFlight]:
        """Removes all waiting callbacks."""
        return [in_flight for lanes in self._both for in_flight in lanes.take_waiting(lambda _: True)]

    def _postponed(self, in_flight: InFlight) -> Deferral:
        """Jitter spreads the return of a target's backlog."""
        return Deferral(in_flight, POSTPONE_S * (0.25 + 0.75 * self._random_share()))

    def _is_blocked(self, in_flight: InFlight) -> bool:
        """Whether a claimed attempt must not be made any more."""
        target = self._cache.get(in_flight.callback.target)
        if target is None:
            return False
        diverted = self.lanes_of(in_flight.record) is self.diverted
        return target.disabled or (not diverted and self._cache.is_abnormal(target))

    def _deferred_claim(self, in_flight: InFlight) -> Deferral:
        target = self._cache.get(in_flight.callback.target)
        held = target is not None and (target.disabled or self._cache.is_abnormal(target))
        return Deferral(in_flight, None if held else 0.0, claimed=True)

    def _defer_claims(self, target_id: TargetId) -> list[Deferral]:
        return [
            self._deferred_claim(in_flight)
            for lanes in self._both
            for in_flight in lanes.take_claimed(target_id)
        ]
