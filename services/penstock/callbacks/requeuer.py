"""Returns callbacks from PostgreSQL to Kafka.

The `Drainer` of each process makes held callbacks of its own targets due. The `QueueReader` reads
those that only wait for others of their target. The `Requeuer` publishes
the records of due callbacks: drained ones, retries, and those whose record was lost.

Every replica runs a requeuer, and an advisory lock of its session makes one of them active. Every
statement uses that session, so a replica that loses the lock fails. Publishing a record twice is
harmless, because each attempt is claimed once; a missing record would lose a callback. When in
doubt, the requeuer publishes. A callback whose record Kafka refuses is dead, because no attempt of
it can follow; it can be replayed like any other.

It sleeps until the next callback is due, and a notification wakes it for an earlier one. The active
requeuer also runs the `TargetCleaner`, the `HeldExpiry` and the `CallbackCounts`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock import metrics
from penstock.callbacks.callback_counts import CallbackCounts
from penstock.callbacks.held_expiry import HeldExpiry
from penstock.callbacks.receiver import InFlight
from penstock.callbacks.router import Router
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target_cache import TargetCache
from penstock.callbacks.target_store import TargetCleaner
from penstock.concurrency.retry import retry_until_available
from penstock.core.target import HostId, TargetId
from penstock.errors import PostgresUnavailable
from penstock.kafka.processing.outbox import redeliver
from penstock.kafka.topology.topics import CALLBACKS
from penstock.metrics import Sample
from penstock.metrics.rounds import LOCK_EVERY_S, ROUNDS
from penstock.postgres import callback_ends, callbacks
from penstock.postgres.session import Session
from penstock.process import run_all

log = logging.getLogger(__name__)

# Targets that one pass of the `Drainer` looks at.
SCANNED = 1_000
# The requeuer's name in metrics.
LOOP = "requeuer"
ROWS_PER_BATCH = 500
# Least seconds between two polls, and most delay of a retry.
SHORTEST_SLEEP_S = 0.2
# Most seconds between two polls, bounded by half the horizon: no notification announces an attempt
# that a crash interrupted.
LONGEST_SLEEP_S = 30.0
# Most seconds between two polls while a callback is pending: the database's clock may be corrected
# meanwhile.
MAX_DUE_SLEEP_S = 5.0


class Drainer:
    """Drains the targets of this process in turn.

    Args:
        pool: of the database.
        cache: decides how many callbacks each target may receive.
        router: decides how many callbacks the diverted path has room for.

    Attributes:
        drained: callbacks drained since the start.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], cache: TargetCache, router: Router) -> None:
        self._pool = pool
        self._cache = cache
        self._router = router
        self.drained = 0

    async def drain(self, now_s: float) -> bool:
        """Makes some held callbacks due; returns whether there were any.

        Args:
            now_s: seconds on the monotonic clock.

        Raises:
            PostgresUnavailable: perhaps nothing was drained; the targets are found again by a
                search.
        """
        cache = self._cache
        scanned, wanted = self._wanted(now_s)
        if len(cache.held) > SCANNED:
            # The next time others are looked at.
            for target_id in scanned:
                del cache.held[target_id]
            cache.mark_held(scanned)
        if not wanted:
            return False
        # Before the statement: a callback that is held while it runs marks its target again.
        for target_id in wanted:
            cache.held.pop(target_id, None)
        queued = {
            target_id
            for target_id in wanted
            if target_id in cache.queued
            and (target := cache.peek(target_id))
            and not cache.is_abnormal(target)
        }
        drained = await callbacks.drain_held(self._pool, wanted, queued)
        self.drained += sum(drained.values())
        # A target that had as many as wanted may have more; it goes behind the other targets.
        cache.mark_held(target_id for target_id, most in wanted.items() if drained.get(target_id, 0) >= most)
        return bool(drained)

    def _wanted(self, now_s: float) -> tuple[list[TargetId], dict[TargetId, int]]:
        """The targets that were looked at, and how many callbacks some of them receive."""
        cache, room = self._cache, self._router.drain_room
        wanted: dict[TargetId, int] = {}
        hosts: dict[HostId, int] = {}
        # A host that hangs may have thousands of targets: only some of them at a time.
        scanned = list(islice(cache.held, SCANNED))
        for target_id in scanned:
            target = cache.peek(target_id)
            if target is None or target.disabled or hosts.get(target.host.id) == 0:
                continue
            if room <= 0:
                break
            waiting, host = self._router.diverted.waiting_for(target_id), target.host
            if host.unresponsive or host.abnormal:
                # All its targets together receive what one would: they are one server.
                if host.id not in hosts:
                    hosts[host.id] = host.drain.allow(now_s, unresponsive=host.unresponsive)
                allowed = min(1, hosts[host.id], room)
                hosts[host.id] -= allowed
            else:
                allowed = min(
                    target.drain.allow(now_s, unresponsive=target.unresponsive, waiting=waiting), room
                )
            if allowed:
                wanted[target_id] = allowed
                room -= allowed
        return scanned, wanted


class _Held:
    """In place of the record of a callback that was read from PostgreSQL and is still held."""

    __slots__ = ("partition",)
    topic = CALLBACKS.name

    def __init__(self, partition: int) -> None:
        self.partition = partition

    def settle(self) -> None:
        """Nothing to acknowledge."""


class QueueReader:
    """Reads the callbacks that were held behind others of their target, when it has room for them.

    They return to the normal path as they are, in the order of their creation, and change in
    PostgreSQL only when they are claimed. A callback that is read twice is claimed once.

    Args:
        pool: of the database.
        cache: has the targets with such callbacks.
        router: decides how many callbacks each target has room for.
        most: how many callbacks may wait in memory for all targets, before no more are read.
    """

    def __init__(
        self, pool: asyncpg.Pool[asyncpg.Record], cache: TargetCache, router: Router, most: int
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._lanes = router.normal
        self._most = most

    async def read(self) -> list[InFlight]:
        """The callbacks to queue now.

        Raises:
            PostgresUnavailable: no server.
        """
        found: list[InFlight] = []
        cache, lanes = self._cache, self._lanes
        for target_id, after in list(cache.queued.items()):
            if (target := cache.peek(target_id)) is None:
                # It was changed, and is loaded again soon.
                continue
            if target.disabled or cache.is_abnormal(target):
                # All its callbacks are held for the diverted path now.
                del cache.queued[target_id]
                cache.mark_held([target_id])
                continue
            if lanes.waiting + len(found) >= self._most:
                break
            room = lanes.room(target_id)
            # In batches of half the lane, so that a quick target costs no statement per callback.
            if room <= lanes.waiting_for(target_id):
                continue
            rows = await callbacks.read_queued(self._pool, target_id, after, room)
            found += [InFlight(callback, _Held(target.partition)) for _seq, callback in rows]
            if rows:
                cache.queued[target_id] = rows[-1][0]
            elif after:
                # Those that were held with lower numbers meanwhile.
                cache.queued[target_id] = 0
            else:
                del cache.queued[target_id]
        return found


class Requeuer:
    """Publishes callbacks that are due.

    Args:
        settings: of the service.
        session: holds the lock.
        pool: for notifications to the process that holds the lock.
        producer: with acks=all.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        session: Session,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
    ) -> None:
        self._settings = settings
        self._session = session
        self._pool = pool
        self._producer = producer
        self._longest_s = min(LONGEST_SLEEP_S, settings.horizon_s / 2)
        self._cleaner = TargetCleaner(settings, session)
        self._expiry = HeldExpiry(settings, session)
        self._counts = CallbackCounts(session)
        self._refused = 0
        ROUNDS.expect(LOOP, self._longest_s)
        self._has_lock = False
        self._poll_at_s = 0.0
        self._poll_earlier = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    async def notify_due(self, due_in_s: float) -> None:
        """Wakes the active requeuer, here or elsewhere, for a callback due in `due_in_s`."""
        if self._has_lock:
            self._poll_within(due_in_s)
            return
        try:
            await callbacks.notify_due(self._pool, due_in_s)
        except PostgresUnavailable as error:
            log.warning(
                "A retry may be late: PostgreSQL is unavailable",
                extra={"event": "retry_delayed", "seconds": self._longest_s, "error": str(error)},
            )

    async def run(self) -> None:
        """Publishes until cancelled.

        Raises:
            SessionLost: the lock is gone with its session.
            PostgresUnavailable: the requeuer cannot listen or ask for the lock.
        """
        await self._session.listen(callbacks.DUE_CHANNEL, lambda payload: self._poll_within(float(payload)))
        await run_all(self._publish(), self._end_with_session())

    async def _end_with_session(self) -> None:
        await self._session.lost.wait()
        self._session.ensure()

    async def _publish(self) -> None:
        while True:
            if not self._has_lock:
                self._has_lock = await callbacks.acquire_requeuer_lock(self._session)
                if not self._has_lock:
                    await asyncio.sleep(LOCK_EVERY_S)
                    continue
            polled_at_s = self._clock()
            self._poll_at_s = polled_at_s + self._longest_s
            self._poll_earlier.clear()
            wait_s = await retry_until_available(self._round, waiting_for="round of the requeuer")
            if wait_s is not None:
                self._poll_within(min(wait_s, MAX_DUE_SLEEP_S))
            await asyncio.sleep(polled_at_s + SHORTEST_SLEEP_S - self._clock())
            while (left_s := self._poll_at_s - self._clock()) > 0:
                self._poll_earlier.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._poll_earlier.wait()

    async def _round(self) -> float | None:
        """Publishes what is due; returns the seconds until the next callback is due."""
        await self._publish_due()
        await self._cleaner.clean()
        more = await self._expiry.expire()
        await self._counts.count()
        wait_s = await callbacks.next_due_s(self._session)
        ROUNDS.complete(LOOP)
        return 0.0 if more else wait_s

    def samples(self) -> Iterator[Sample]:
        """The current samples."""
        yield from self._counts.samples()
        yield Sample(metrics.CALLBACK_DEAD_UNCALLED, self._expiry.ended, ("held",))
        yield Sample(metrics.CALLBACK_DEAD_UNCALLED, self._refused, ("refused",))

    async def _publish_due(self) -> None:
        published = 0
        while True:
            rows = await callbacks.take_due(
                self._session, ROWS_PER_BATCH, horizon_s=self._settings.republish_s
            )
            # Without its own retry, these rows would come due again only after the horizon.
            refused = await retry_until_available(
                partial(redeliver, self._producer, self._settings, rows),
                waiting_for="publication of due callbacks",
            )
            self._refused += await callback_ends.bury(self._session, refused)
            published += len(rows)
            if len(rows) < ROWS_PER_BATCH:
                break
        if published:
            log.debug(
                "Due callbacks were published", extra={"event": "callbacks_requeued", "count": published}
            )

    def _poll_within(self, due_in_s: float) -> None:
        at_s = self._clock() + max(due_in_s, 0.0)
        if at_s < self._poll_at_s:
            self._poll_at_s = at_s
            self._poll_earlier.set()
