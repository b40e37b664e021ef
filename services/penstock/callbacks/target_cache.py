"""The targets of this process in memory, with their health. No I/O.

Other parts read and change the cache; it calls none of them. `target_store` loads and saves it.

It is an LRU cache with a soft capacity: targets in use are never evicted, however many there are.
Each load scans a few entries only, so its cost does not depend on the size of the cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock.callbacks.caller import CallResult
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import Callback, origin_of
from penstock.core.drain import Drain
from penstock.core.health import HealthWindow, SelfCheck
from penstock.core.target import TargetId
from penstock.postgres.targets import StoredTarget

log = logging.getLogger(__name__)

# Attempts of a target that operators can see.
SHOWN_ATTEMPTS = 10


class Attempt(NamedTuple):
    """An attempt as operators see it.

    Attributes:
        at_s: when it ended, seconds since 1970.
        callback: id of the callback.
        attempt: number of the attempt, from 1.
        took_ms: duration in milliseconds.
        status: HTTP status of the answer; None without one.
        message: the result in one sentence.
    """

    at_s: float
    callback: str
    attempt: int
    took_ms: int
    status: int | None
    message: str

    @classmethod
    def of(cls, callback: Callback, result: CallResult, at_s: float) -> Attempt:
        """The attempt of a call that has just ended."""
        took_ms = round(result.took_s * 1000)
        return cls(at_s, callback.id, callback.attempt + 1, took_ms, result.status, result.message)


class Target:
    """One target in memory.

    Attributes:
        partition: of the records of its callbacks.
        disabled: whether nothing may be sent to it.
        rate: most calls per second; None for the service's setting.
        window: its health.
        drain: how many of its held callbacks may be drained.
        attempts: the last few.
        suspect: whether its latest call was slow.
    """

    __slots__ = ("attempts", "disabled", "drain", "partition", "rate", "suspect", "window")

    def __init__(self, stored: StoredTarget, partition: int, settings: CallbacksSettings) -> None:
        self.partition = partition
        self.disabled = stored.disabled
        self.rate = stored.rate
        self.window = HealthWindow(settings.health, stored.health)
        self.window.failures = stored.failures
        self.drain = Drain(settings.drain)
        self.attempts: deque[Attempt] = deque(
            (Attempt(**attempt) for attempt in stored.attempts), maxlen=SHOWN_ATTEMPTS
        )
        # A target that was stored as abnormal must be probed first.
        self.suspect = stored.health.abnormal

    def to_stored(self, target_id: TargetId, now_s: float) -> StoredTarget:
        """The state to save.

        Args:
            target_id: its identity.
            now_s: seconds since 1970.
        """
        return StoredTarget(
            target=target_id,
            health=self.window.snapshot(now_s),
            failures=self.window.failures,
            attempts=[attempt._asdict() for attempt in self.attempts],
        )


class TargetCache:
    """All targets of the partitions that this process owns, least recently used first.

    Args:
        settings: of the service.

    Attributes:
        held: targets for which callbacks may be held in PostgreSQL; the first one is drained next.
        unsaved: targets whose health must be saved soon.
        unsaved_attempts: targets with attempts that are not saved yet.
        urgent: set when the store has something to do before its next tick.
    """

    def __init__(self, settings: CallbacksSettings) -> None:
        self._settings = settings
        self._targets: OrderedDict[TargetId, Target] = OrderedDict()
        # Targets that another process changed; `put` keeps their attempts.
        self._changed: dict[TargetId, Target] = {}
        # How many targets share a URL.
        self._url_counts: Counter[str] = Counter()
        self._partitions: frozenset[int] = frozenset()
        self._self_check = SelfCheck(settings.health)
        self.held: dict[TargetId, None] = {}
        self.unsaved: set[TargetId] = set()
        self.unsaved_attempts: set[TargetId] = set()
        self.urgent = asyncio.Event()

    def __len__(self) -> int:
        return len(self._targets)

    def __contains__(self, target_id: object) -> bool:
        return target_id in self._targets

    @property
    def url_count(self) -> int:
        """How many different URLs the targets have."""
        return len(self._url_counts)

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
        self._url_counts[target_id.url] += target_id not in self._targets
        before = self._targets.get(target_id) or self._changed.get(target_id)
        self._changed.pop(target_id, None)
        last_s = target.attempts[-1].at_s if target.attempts else 0.0
        unsaved = [attempt for attempt in before.attempts if attempt.at_s > last_s] if before else []
        if unsaved:
            target.attempts.extend(unsaved)
            self.unsaved_attempts.add(target_id)
        self._targets[target_id] = target
        self._targets.move_to_end(target_id)

    def drop(self, target_id: TargetId) -> None:
        """Removes a target if it is there."""
        if self._targets.pop(target_id, None) is None:
            return
        self._url_counts[target_id.url] -= 1
        if not self._url_counts[target_id.url]:
            del self._url_counts[target_id.url]

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
        self.held = {target_id: None for target_id in self.held if target_id in self._targets}

    def is_suspect(self, target_id: TargetId) -> bool:
        """Whether its latest call was slow."""
        target = self._targets.get(target_id)
        return target is not None and target.suspect

    def is_abnormal(self, target: Target) -> bool:
        """Whether its circuit breaker is open, so that its callbacks are diverted."""
        return target.window.is_abnormal(time.time())

    def rate_of(self, target_id: TargetId) -> float | None:
        """Its most calls per second; None for any number."""
        target = self._targets.get(target_id)
        own = target.rate if target is not None else None
        return own or self._settings.callback_rate or None

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

    def disable(self, target_id: TargetId) -> None:
        """Marks a target as disabled; `TargetStore.disable` records that."""
        if (target := self._targets.get(target_id)) is not None:
            target.disabled = True

    def mark_held(self, target_ids: Iterable[TargetId]) -> None:
        """Callbacks of these targets are held in PostgreSQL from now on."""
        self.held.update(dict.fromkeys(target_ids))

    def record_attempt(self, target_id: TargetId, attempt: Attempt) -> None:
        """Adds an attempt to those that operators see."""
        if (target := self._targets.get(target_id) or self._changed.get(target_id)) is not None:
            target.attempts.append(attempt)
            self.unsaved_attempts.add(target_id)

    def record_call(self, target_id: TargetId, *, slow: bool, failed: bool = False) -> bool:
        """Records that a call was slow, or ended in time.

        Returns:
            Whether this has opened or closed the target's circuit breaker.
        """
        target = self._targets.get(target_id)
        if target is None:
            return False
        target.suspect = slow
        if self._self_check.is_active(time.monotonic()):
            return False
        now_s = time.time()
        before, had_count = target.window.is_abnormal(now_s), target.window.has_count
        target.window.record(slow=slow, failed=failed, now_s=now_s)
        after = target.window.is_abnormal(now_s)
        if had_count or target.window.has_count:
            self.unsaved.add(target_id)
        if after == before:
            return False
        self.urgent.set()
        if after:
            log.warning(
                "A target is abnormal; its callbacks are diverted",
                extra={"event": "target_diverted", **log_fields(target_id)},
            )
            self._reset(self._self_check.trip(target_id, time.monotonic(), self.url_count))
        else:
            log.info("A target is normal again", extra={"event": "target_recovered", **log_fields(target_id)})
        return target.window.is_abnormal(now_s) != before

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
            if (target := self._targets.get(target_id)) is not None:
                target.window.reset()
                self.unsaved.add(target_id)

    def _has_state(self, target_id: TargetId, target: Target) -> bool:
        """Whether a target has state that a load would not restore, or that the service acts on."""
        return (
            target_id in self.held
            or target_id in self.unsaved
            or target_id in self.unsaved_attempts
            or target.disabled
            or target.window.has_count
        )


def log_fields(target_id: TargetId) -> dict[str, object]:
    """Identity of a target for the log: its URL without path and query, which may hold secrets."""
    return {"namespace": target_id.namespace, "target": origin_of(target_id.url)}
