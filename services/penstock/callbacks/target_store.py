"""Loads targets into the cache, saves their health, and removes rows of unused targets.

A target belongs to one partition, so one process owns it, however many there are (C7b). The process
saves the health soon after it changes; the next owner of the partition continues from there. A
process that lost a target without noticing saves nothing (`targets.save` compares the owner) and
drops it.

A crash loses the counts of the last second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import asyncpg

from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target import Target
from penstock.callbacks.target_cache import TargetCache, log_fields
from penstock.concurrency.cancellation import cleanup_timeout
from penstock.concurrency.retry import retry_until_available
from penstock.core.offset_tracker import Partition
from penstock.core.target import TargetId
from penstock.errors import Fatal, PostgresUnavailable
from penstock.kafka.topology.topics import CALLBACKS, CALLBACKS_DIVERTED
from penstock.metrics.rounds import ROUNDS
from penstock.postgres import targets
from penstock.postgres.session import Session
from penstock.postgres.targets import FoundTargets, StoredTarget

log = logging.getLogger(__name__)

TICK_S = 0.25
# Counts are saved this often, a circuit breaker that opens or closes at once, and attempts alone
# seldom.
SAVE_EVERY_S = 1.0
SAVE_ATTEMPTS_EVERY_S = 15.0
SAVE_BATCH = 200
# Most seconds for the last save of a stopping process.
LAST_SAVE_S = 3.0
# How often PostgreSQL is searched for troubled targets, and how many one statement looks at.
SEARCH_EVERY_S = 30.0
SEARCHED = 1_000
# Capacity of the cache, and entries scanned for eviction per loaded target.
CAPACITY = 50_000
SCANNED_PER_LOAD = 2
# Rows that one pass of the cleaner checks, and seconds between two passes: ten million rows take a
# day and a half.
CLEANED_ROWS = 5_000
# The cleaner's name in metrics.
CLEANER = "target_cleaner"
CLEAN_EVERY_S = 60.0


# Finds a page of targets; called with the pool, the last target of the page before, and `limit`.
_Find = Callable[..., Awaitable[FoundTargets]]


class TargetStore:
    """Keeps the cache and PostgreSQL in step.

    Args:
        settings: of the service.
        pool: of the database.
        cache: the targets in memory.
        owner: unique name of this process.
        partition_of: the partition of a URL's records. It is the same in all namespaces, so one
            process owns all targets of a URL.
        in_flight: whether callbacks of a target are in flight, so that it must not be evicted.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        cache: TargetCache,
        owner: str,
        partition_of: Callable[[str], int],
        in_flight: Callable[[TargetId], bool],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._cache = cache
        self._owner = owner
        self._partition_of = partition_of
        self._in_flight = in_flight
        # By load in progress, the targets that changed meanwhile: it may have read them before.
        self._loads: list[set[TargetId]] = []
        self._invalidated: set[TargetId] = set()
        self._search_at_s = 0.0
        # The search under way: what it looks for, and the last target that it looked at.
        self._search: tuple[_Find, TargetId | None] | None = None
        self._save_at_s = time.monotonic() + SAVE_EVERY_S
        self._save_attempts_at_s = time.monotonic() + SAVE_ATTEMPTS_EVERY_S

    def assign(self, partitions: frozenset[Partition]) -> None:
        """Adds partitions, and searches them for troubled targets at the next tick.

        Raises:
            Fatal: this process has different partitions of the two paths, so another process would
                own its targets, too.
        """
        normal, diverted = (
            {number for name, number in partitions if name == topic.name}
            for topic in (CALLBACKS, CALLBACKS_DIVERTED)
        )
        if normal != diverted:
            raise Fatal(
                f"{CALLBACKS.name} and {CALLBACKS_DIVERTED.name} must have the same number of partitions: "
                f"this process was assigned {sorted(normal)} and {sorted(diverted)}"
            )
        self._search_at_s = 0.0
        self._cache.assign(normal)

    def invalidate(self, payload: str) -> None:
        """Handles a notification that an operator or an answer has changed a target."""
        target_id = targets.parse_notification(payload)
        self._invalidated.add(target_id)
        for load in self._loads:
            load.add(target_id)
        self._cache.urgent.set()

    async def load(self, partitions: Mapping[TargetId, int]) -> None:
        """Takes over targets, reads them into the cache, and evicts others.

        Args:
            partitions: the targets, each with the partition of its records.
        """
        # A target of a partition that was revoked meanwhile must not be taken from its new owner.
        left = [target_id for target_id, partition in partitions.items() if self._cache.owns(partition)]
        while left:
            changed: set[TargetId] = set()
            for stored in await self._read(changed, left):
                partition = partitions[stored.target]
                # The partition may have been revoked during the read.
                if self._cache.owns(partition):
                    host = self._cache.hosts.of(stored.target)
                    self._cache.put(stored.target, Target(stored, partition, self._settings, host))
            # A change during the read is notified only once, so the target is read again.
            left = [target_id for target_id in left if target_id in changed]
        self._cache.evict(CAPACITY, SCANNED_PER_LOAD * len(partitions), self._in_flight)

    async def wait(self) -> None:
        """Waits for the next tick, or until something is urgent."""
        # Not `wait_for`: in Python 3.11 it can swallow a cancellation.
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._cache.urgent.wait()
                self._cache.urgent.clear()
                self._save_at_s = 0.0

    async def refresh(self) -> list[TargetId]:
        """Reads targets again that were changed in PostgreSQL, and returns them."""
        invalidated, self._invalidated = self._invalidated, set()
        changed = {
            target_id: target.partition
            if (target := self._cache.peek(target_id))
            else self._partition_of(target_id.url)
            for target_id in invalidated
            # A target in flight may be missing: `_save_batch` drops one that was changed in
            # PostgreSQL.
            if target_id in self._cache or self._in_flight(target_id)
        }
        if changed:
            # The counts since the last save are lost: the change was made without them.
            await self.load(changed)
        if invalidated:
            # Also for a missing target that was enabled: callbacks may be held for it.
            self._search_at_s = 0.0
        return list(changed)

    async def save_due(self) -> None:
        """Saves the targets whose time has come.

        Raises:
            PostgresUnavailable: some were not saved; they are saved the next time.
        """
        now_s = time.monotonic()
        if now_s >= self._save_at_s:
            self._cache.freeze()
        if now_s >= self._save_attempts_at_s:
            await self._save(self._cache.unsaved | self._cache.unsaved_attempts)
            self._save_at_s, self._save_attempts_at_s = now_s + SAVE_EVERY_S, now_s + SAVE_ATTEMPTS_EVERY_S
        elif now_s >= self._save_at_s:
            await self._save(self._cache.unsaved)
            self._save_at_s = now_s + SAVE_EVERY_S

    async def save_last(self) -> None:
        """Saves everything before the process stops, if PostgreSQL answers in time."""
        with suppress(TimeoutError, PostgresUnavailable):
            unsaved = self._cache.unsaved | self._cache.unsaved_attempts
            async with cleanup_timeout(LAST_SAVE_S):
                await self._save(unsaved)

    async def find_troubled(self) -> None:
        """Finds this process's targets that are abnormal or have held callbacks, if it is time.

        After a full page the next tick continues, so that many such targets delay no other work.

        Raises:
            PostgresUnavailable: no server; the next tick continues.
        """
        if self._search is None:
            now_s = time.monotonic()
            if now_s < self._search_at_s:
                return
            self._search_at_s = now_s + SEARCH_EVERY_S
            self._search = targets.find_abnormal, None
        while self._search is not None:
            find, after = self._search
            page = await find(self._pool, after, limit=SEARCHED)
            await self._mark_troubled(page.targets)
            if page.last is not None:
                self._search = find, page.last
                return
            self._search = (targets.find_held, None) if find is targets.find_abnormal else None
        self._cache.drop_absent()

    async def _mark_troubled(self, found: Iterable[TargetId]) -> None:
        partitions = {target_id: self._partition_of(target_id.url) for target_id in found}
        troubled = [target_id for target_id, partition in partitions.items() if self._cache.owns(partition)]
        missing = {target_id: partitions[target_id] for target_id in troubled if target_id not in self._cache}
        if missing:
            await self.load(missing)
        self._cache.mark_held(troubled)
        self._cache.mark_queued(troubled)
        # No call of an idle target would cause a save of its decayed count.
        self._cache.unsaved.update(
            target_id
            for target_id in troubled
            if (target := self._cache.get(target_id)) and not self._cache.is_abnormal(target)
        )

    async def _read(self, changed: set[TargetId], target_ids: Sequence[TargetId]) -> Sequence[StoredTarget]:
        self._loads.append(changed)
        try:
            return await retry_until_available(
                lambda: targets.take_over(self._pool, target_ids, self._owner),
                waiting_for=f"loading {len(target_ids)} targets",
            )
        finally:
            self._loads = [load for load in self._loads if load is not changed]

    async def _save(self, target_ids: Iterable[TargetId]) -> None:
        """Saves in batches, so that calls continue in between."""
        left = list(target_ids)
        for start in range(0, len(left), SAVE_BATCH):
            await self._save_batch(left[start : start + SAVE_BATCH])

    async def _save_batch(self, target_ids: Iterable[TargetId]) -> None:
        cache, now_s = self._cache, time.time()
        snapshots = [
            target.to_stored(target_id, now_s)
            for target_id in target_ids
            if (target := cache.peek(target_id)) is not None
        ]
        if not snapshots:
            return
        saving = {stored.target for stored in snapshots}
        # Before the statement: a change while it runs is saved again.
        cache.unsaved -= saving
        cache.unsaved_attempts -= saving
        saved = None
        try:
            saved = await targets.save(self._pool, snapshots, self._owner)
        finally:
            if saved is None:  # PostgreSQL is unavailable, or the process stops.
                cache.unsaved |= saving
        for target_id in saving - saved:
            log.info(
                "A target was changed by an operator or another process; it is read again",
                extra={"event": "target_dropped", **log_fields(target_id)},
            )
            cache.drop_changed(target_id)
            self._search_at_s = 0.0


class TargetCleaner:
    """Removes rows of unused targets: normal with count 0, or gone, and not called for long.

    Every URL that was ever called has a row, and many URLs contain a token and are called once. The
    process that holds the requeuer's lock walks all rows again and again, a few per pass, so a pass
    costs the same however many there are. A removed target gets a new row with its next callback,
    and one that was gone is called again. A target with a rate or held callbacks stays. When in
    doubt, a row stays.

    Args:
        settings: of the service.
        session: the session whose lock makes this process the only cleaner.
    """

    def __init__(self, settings: CallbacksSettings, session: Session) -> None:
        self._unused_s = settings.callback_held_max_s
        self._session = session
        self._after: TargetId | None = None
        self._clean_at_s = 0.0
        ROUNDS.expect(CLEANER, CLEAN_EVERY_S)

    async def clean(self) -> None:
        """Checks the next few rows, if a pass is due.

        Raises:
            SessionLost: the lock is gone with its session.
            PostgresUnavailable: the next pass is due as if this one had succeeded.
        """
        if time.monotonic() < self._clean_at_s:
            return
        self._clean_at_s = time.monotonic() + CLEAN_EVERY_S
        removed, self._after = await targets.delete_unused(
            self._session, self._after, limit=CLEANED_ROWS, unused_s=self._unused_s
        )
        ROUNDS.complete(CLEANER)
        if removed:
            log.info(
                "Unused targets were removed",
                extra={"event": "targets_removed", "count": removed, "unused_s": self._unused_s},
            )
