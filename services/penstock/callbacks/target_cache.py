"""The targets of this process in memory, with their health. No I/O.

Other parts read and change the cache; it calls none of them. `target_store` loads and saves it.

It is an LRU cache with a soft capacity: targets in use are never evicted, however many there are.
Each load scans a few entries only, so its cost does not depend on the size of the cache.

Disabled targets have nothing to do here, however many callbacks they are owed. They leave memory
soon, because many URLs have a token, and all of them may answer 410.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from penstock.callbacks.hosts import Host, Hosts
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target import Attempt, Target
from penstock.contracts.event import origin_of
from penstock.core.health import SelfCheck
from penstock.core.target import HostId, TargetId

log = logging.getLogger(__name__)

# Disabled targets in memory that are not in use, and seconds after which each is loaded anew: its
# row may have been deleted meanwhile.
DISABLED_CAPACITY = 1_000
DISABLED_KEPT_S = 60.0
# Disabled targets that one pass looks at.
_DISABLED_SCANNED = 1_000


class TargetCache:
    """All targets of the partitions that this process owns, least recently used first.

    Args:
        settings: of the service.
        hosts: of all targets; None for new ones.

    Attributes:
        held: targets for which callbacks may be held in PostgreSQL; the first one is drained next.
        queued: targets with callbacks that are held in PostgreSQL behind others of their target,
            with the number of the last one that was read.
        unsaved: targets whose health must be saved soon.
        unsaved_attempts: targets with attempts that are not saved yet.
        disabling: targets that answered that they are gone, until PostgreSQL has them as disabled.
        hosts: the hosts of all targets, also of those that are not in memory.
        urgent: set when the store has something to do before its next tick.
    """

    def __init__(self, settings: CallbacksSettings, hosts: Hosts | None = None) -> None:
        self._settings = settings
        self._targets: OrderedDict[TargetId, Target] = OrderedDict()
        # Disabled targets, the first loaded ones first, with the monotonic time of that.
        self._disabled: OrderedDict[TargetId, float] = OrderedDict()
        # Targets that another process changed; `put` keeps their attempts.
        self._changed: dict[TargetId, Target] = {}
        # How many targets each host has, and how many hosts each namespace.
        self._host_counts: Counter[HostId] = Counter()
        self._hosts_within: Counter[str] = Counter()
        # How many namespaces call an origin.
        self._origins: Counter[str] = Counter()
        self._partitions: frozenset[int] = frozenset()
        self._self_check = SelfCheck(settings.health)
        # A target of a host counts no more than this for the host.
        self._most_counted = max(1, settings.health.threshold // 3)
        self.hosts = Hosts(settings) if hosts is None else hosts
        self.held: dict[TargetId, None] = {}
        self.queued: dict[TargetId, int] = {}
        self.unsaved: set[TargetId] = set()
        self.unsaved_attempts: set[TargetId] = set()
        self.disabling: set[TargetId] = set()
        self.urgent = asyncio.Event()

    def __len__(self) -> int:
        return len(self._targets)

    def __contains__(self, target_id: object) -> bool:
        return target_id in self._targets

    def get(self, target_id: TargetId) -> Target | None:
        """Returns a target and marks it as used; None when it is not loaded or not owned."""
        target = self._targets.get(target_id)
        if target is not None:
            self._targets.move_to_end(target_id)
        return target

    def peek(self, target_id: TargetId) -> Target | None:
        """As `get`, without counting as a use."""
        return self._targets.get(target_id)

    def put(self, target_id: TargetId, target: Target) -> None:
        """Adds or replaces a target; attempts that were not saved yet are kept."""
        if target_id not in self._targets:
            self._count_host(target.host.id, 1)
        before = self._targets.get(target_id) or self._changed.pop(target_id, None)
        last_s = target.attempts[-1].at_s if target.attempts else 0.0
        unsaved = [attempt for attempt in before.attempts if attempt.at_s > last_s] if before else []
        if unsaved:
            target.attempts.extend(unsaved)
            self.unsaved_attempts.add(target_id)
        self._targets[target_id] = target
        self._targets.move_to_end(target_id)
        if target.disabled:
            self._set_aside(target_id)
        else:
            self._disabled.pop(target_id, None)

    def _set_aside(self, target_id: TargetId) -> None:
        """A disabled target is not called; its callbacks are found again when it is enabled."""
        self._disabled[target_id] = time.monotonic()
        self._disabled.move_to_end(target_id)
        self.held.pop(target_id, None)
        self.queued.pop(target_id, None)

    def drop(self, target_id: TargetId) -> None:
        """Removes a target if it is there."""
        if (target := self._targets.pop(target_id, None)) is not None:
            self._disabled.pop(target_id, None)
            self._count_host(target.host.id, -1)

    def _count_host(self, host_id: HostId, by: int) -> None:
        before = self._host_counts[host_id]
        self._host_counts[host_id] += by
        if (before > 0) == (before + by > 0):
            return
        self._hosts_within[host_id.namespace] += by
        self._origins[host_id.origin] += by
        if by < 0:
            del self._host_counts[host_id]
            if not self._hosts_within[host_id.namespace]:
                del self._hosts_within[host_id.namespace]
            if not self._origins[host_id.origin]:
                del self._origins[host_id.origin]

    def drop_changed(self, target_id: TargetId) -> None:
        """Removes a target that another process has changed; `put` keeps its attempts."""
        if (target := self._targets.get(target_id)) is not None:
            self._changed[target_id] = target
            self.drop(target_id)

    def evict(self, capacity: int, scan: int, in_flight: Callable[[TargetId], bool]) -> None:
        """Removes the least recently used targets beyond `capacity`.

        Args:
            capacity: how many targets may stay.
            scan: how many targets to look at, at most.
            in_flight: whether callbacks of a target are in flight. Such a target stays and counts
                as used now.
        """
        for _ in range(min(scan, len(self._targets) - capacity)):
            target_id, target = next(iter(self._targets.items()))
            if self._has_state(target_id, target) or in_flight(target_id):
                self._targets.move_to_end(target_id)
            else:
                self.drop(target_id)

    def evict_disabled(self, now_s: float, in_flight: Callable[[TargetId], bool]) -> None:
        """Removes disabled targets that PostgreSQL has, some time after they were loaded.

        Args:
            now_s: seconds on the monotonic clock.
            in_flight: as in `evict`.
        """
        for _ in range(min(_DISABLED_SCANNED, len(self._disabled))):
            target_id, since_s = next(iter(self._disabled.items()))
            if len(self._disabled) <= DISABLED_CAPACITY and now_s - since_s < DISABLED_KEPT_S:
                return
            if self._has_state(target_id, self._targets[target_id]) or in_flight(target_id):
                self._disabled[target_id] = now_s
                self._disabled.move_to_end(target_id)
            else:
                self.drop(target_id)

    def owns(self, partition: int) -> bool:
        """Whether the targets of a partition are this process's."""
        return partition in self._partitions

    def assign(self, partitions: Iterable[int]) -> None:
        """Adds partitions, which another process may have owned before."""
        self._partitions |= set(partitions)
        self.urgent.set()

    def revoke(self, partitions: Collection[int]) -> None:
        """Drops partitions with their targets, which another process may change from now on."""
        self._partitions -= set(partitions)
        gone = [target_id for target_id, target in self._targets.items() if target.partition in partitions]
        for target_id in gone:
            self.drop(target_id)
        for target_id in [name for name, target in self._changed.items() if target.partition in partitions]:
            del self._changed[target_id]
        self.drop_absent()

    def drop_absent(self) -> None:
        """Drops the marks of targets that are not in memory; a search finds them again."""
        self.held = {target_id: None for target_id in self.held if target_id in self._targets}
        self.queued = {name: after for name, after in self.queued.items() if name in self._targets}

    def host_of(self, target_id: TargetId) -> Host:
        """The host of a target."""
        target = self._targets.get(target_id)
        return self.hosts.of(target_id) if target is None else target.host

    def is_unresponsive(self, target_id: TargetId) -> bool:
        """Whether the latest call to it or to its host was slow."""
        target = self._targets.get(target_id)
        return target is not None and (target.unresponsive or target.host.unresponsive)

    def is_trusted(self, target_id: TargetId) -> bool:
        """Whether the latest call to it was answered in time; other targets do not count."""
        target = self._targets.get(target_id)
        return target is not None and target.trusted

    def is_abnormal(self, target: Target) -> bool:
        """Whether its callbacks are diverted: its circuit breaker is open, or its host's."""
        return target.window.is_abnormal(time.time()) or target.host.abnormal

    def rate_of(self, target_id: TargetId) -> float | None:
        """Its most calls per second; None for any number."""
        target = self._targets.get(target_id)
        return (target.rate or None) if target is not None else None

    def drain_rate_of(self, target_id: TargetId) -> float | None:
        """Its most calls per second on the diverted path while drained; None for any number."""
        target = self._targets.get(target_id)
        drained = target is not None and (
            target_id in self.held or target.drain.is_draining(time.monotonic()) or self.is_abnormal(target)
        )
        return self._settings.drain.rate if drained else None

    def states(self) -> Iterator[str]:
        """The state of each target: normal, abnormal or disabled."""
        now_s = time.time()
        for target in self._targets.values():
            abnormal = target.window.is_abnormal(now_s)
            yield "disabled" if target.disabled else "abnormal" if abnormal else "normal"

    @property
    def in_self_check(self) -> bool:
        """Whether self-check mode is on or ended a moment ago: failures do not count then."""
        return self._self_check.was_active(time.monotonic())

    def disable_gone(self, target_id: TargetId, why: str) -> None:
        """Marks a target as disabled by its answer; the `Ledger` records that with the outcome."""
        target = self._targets.get(target_id)
        if target is None or target.disabled:
            return
        target.disabled = True
        self._set_aside(target_id)
        self.disabling.add(target_id)
        log.warning(
            "A target is disabled",
            extra={"event": "target_disabled", "reason": why, **log_fields(target_id)},
        )

    def mark_held(self, target_ids: Iterable[TargetId]) -> None:
        """Callbacks of these targets are held in PostgreSQL from now on."""
        self.held.update(dict.fromkeys(one for one in target_ids if one not in self._disabled))

    def mark_queued(self, target_ids: Iterable[TargetId]) -> None:
        """Callbacks of these targets are held behind others from now on."""
        for target_id in target_ids:
            if target_id not in self._disabled:
                self.queued.setdefault(target_id, 0)

    def record_attempt(self, target_id: TargetId, attempt: Attempt) -> None:
        """Adds an attempt to those that operators see."""
        if (target := self._targets.get(target_id) or self._changed.get(target_id)) is not None:
            target.attempts.append(attempt)
            self.unsaved_attempts.add(target_id)

    def record_call(self, target_id: TargetId, *, slow: bool, failed: bool = False) -> bool:
        """Records that a call was slow, or ended in time.

        Returns:
            Whether this has opened or closed the circuit breaker of the target or of its host.
        """
        target = self._targets.get(target_id)
        if target is None:
            return False
        host = target.host
        target.unresponsive = host.unresponsive = slow
        target.trusted = host.trusted = not slow
        if self._self_check.is_active(time.monotonic()):
            return False
        now_s = time.time()
        before, count = target.window.is_abnormal(now_s), target.window.snapshot(now_s).count
        target.window.record(slow=slow, failed=failed, now_s=now_s)
        after = target.window.is_abnormal(now_s)
        if count or target.window.has_count:
            self.unsaved.add(target_id)
        if after != before:
            self.urgent.set()
        if after and not before:
            log.warning(
                "A target is abnormal; its callbacks are diverted",
                extra={"event": "target_diverted", **log_fields(target_id)},
            )
            self._trip(target_id, host)
        elif before and not after:
            log.info("A target is normal again", extra={"event": "target_recovered", **log_fields(target_id)})
        # A target that hangs alone must not divert its neighbours.
        host_changed = (not slow or count < self._most_counted) and self._record_host(
            host, slow=slow, now_s=now_s
        )
        return host_changed or target.window.is_abnormal(now_s) != before

    def _trip(self, target_id: TargetId, host: Host) -> None:
        server = self.hosts.server_of(host)
        hosts, within = len(self._origins), self._hosts_within
        self._reset(self._self_check.trip(target_id, server, time.monotonic(), hosts, within))

    def freeze(self) -> None:
        """In self-check mode, keeps the counts of abnormal targets from decaying."""
        if not self._self_check.is_active(time.monotonic()):
            return
        now_s = time.time()
        for target in self._targets.values():
            target.window.freeze(now_s)
            target.host.window.freeze(now_s)

    def _record_host(self, host: Host, *, slow: bool, now_s: float) -> bool:
        """Records a call for the host; returns whether this has changed its circuit breaker."""
        before = host.window.is_abnormal(now_s)
        host.window.record(slow=slow, now_s=now_s)
        after = host.window.is_abnormal(now_s)
        fields = {"namespace": host.id.namespace, "target": host.id.origin}
        if after and not before:
            log.warning(
                "A host is abnormal; the callbacks of all its targets are diverted",
                extra={"event": "host_diverted", **fields},
            )
            self._trip(TargetId(*host.id), host)
            after = host.window.is_abnormal(now_s)
        elif before and not after:
            log.info("A host is normal again", extra={"event": "host_recovered", **fields})
        return after != before

    def _reset(self, target_ids: Sequence[TargetId]) -> None:
        if not target_ids:
            return
        log.error(
            "Many targets became abnormal at once; this process enters self-check mode and counts no slow calls",
            extra={
                "event": "self_check_entered",
                "abnormal_targets": len(target_ids),
                "targets": len(self._targets),
                "seconds": self._settings.health.self_check_s,
            },
        )
        for target_id in target_ids:
            # A host that tripped is in place of its targets.
            self.hosts.of(target_id).window.reset()
            if (target := self._targets.get(target_id)) is not None:
                target.window.reset()
                self.unsaved.add(target_id)

    def _has_state(self, target_id: TargetId, target: Target) -> bool:
        """Whether a target has state that a load would not restore, or that the service acts on."""
        return (
            target_id in self.held
            or target_id in self.queued
            or target_id in self.unsaved
            or target_id in self.unsaved_attempts
            or target_id in self.disabling
            # The count of a disabled target is in its row, and nothing has to lower it.
            or (target.window.has_count and not target.disabled)
        )


def log_fields(target_id: TargetId) -> dict[str, object]:
    """Identity of a target for the log: its URL without path and query, which may hold secrets."""
    return {"namespace": target_id.namespace, "target": origin_of(target_id.url)}
