"""Tracks leases: reads claims, heartbeats and ends; writes, restores and expires leases.

One module, because all of it changes the same leases between two awaits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

import asyncpg

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.event import OutboxEntry
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.core.endings import ExpiredLease
from penstock.core.leases import Lease, LeaseWheel
from penstock.core.task import IN_FLIGHT
from penstock.errors import PostgresUnavailable, ValueRefused
from penstock.heartbeats.claims import Claim, ClaimRecord, without_waiting, write_claims
from penstock.heartbeats.heartbeat_reader import HeartbeatReader
from penstock.heartbeats.metrics import Metrics
from penstock.heartbeats.read_watermark import ResultsWatermark, WatermarkReader
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.heartbeats.unwatched import Recount
from penstock.kafka.processing.outbox import Publisher
from penstock.kafka.processing.processor import Delivery
from penstock.metrics import Sample
from penstock.postgres import leases
from penstock.postgres.ending import Ending
from penstock.postgres.expiry import Expiry, expire
from penstock.postgres.halving import in_halves

log = logging.getLogger(__name__)

# `UnwatchedAttempts.find`.
FindUnwatched = Callable[[Collection[int], Callable[[AttemptId], bool], float], Awaitable[Recount]]

# More expiries at once than this number, and than this share of all leases, are a mass expiry: it
# is verified first.
MASS_COUNT = 3
MASS_SHARE = 0.1
# How long the verification waits until all heartbeats are read; without them no lease expires.
VERIFY_WITHIN_S = 5.0
# A loop that is later than this has stalled; the scheduler of a busy machine makes it late by less.
STALL_S = 1.0


class LeaseTracker:
    """All leases of this process.

    Args:
        settings: of the service.
        pool: of the database.
        publisher: of the events of expiries.
        watermark: until when all heartbeats were read.
        results: until when all results are in PostgreSQL.
        find_unwatched: reads the running attempts, and finds those that have no lease.
        evict: called with a worker that has lost its last lease, and the types of its lost tasks.
        clock: monotonic seconds (`loop.time`).
        chance: random numbers from 0 to 1, for jitter.

    Attributes:
        partitions: of the heartbeats topic, those of this process.
    """

    def __init__(
        self,
        settings: HeartbeatsSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        publisher: Publisher,
        watermark: WatermarkReader,
        results: ResultsWatermark,
        find_unwatched: FindUnwatched,
        evict: Callable[[str, set[str]], None],
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._publisher = publisher
        self._watermark = watermark
        self._results = results
        self._find_unwatched = find_unwatched
        self._evict = evict
        self._clock = clock
        self._wheel = LeaseWheel(settings.tick_s / 2)
        # In order of arrival, the oldest first.
        self._claims: dict[AttemptId, Claim] = {}
        self.partitions: frozenset[int] = frozenset()
        # Lost workers whose loss was charged to a suspect, while they have leases.
        self._suspected: set[str | None] = set()
        self._chance = chance
        self._reader = HeartbeatReader(settings.report_keys)
        self._next_tick_s = clock() + settings.tick_s / 2
        self._next_recount_s = clock() + settings.recount_s
        self._metrics = Metrics()

    def samples(self) -> Iterator[Sample]:
        """The current samples (`penstock.metrics`)."""
        return self._metrics.samples(
            in_memory=len(self._claims), written=len(self._wheel), overdue_s=self._wheel.overdue_s
        )

    async def take(self, delivery: Delivery) -> Heartbeat:
        """Takes over a record and returns it without the parts that break the contract.

        Raises:
            InvalidRecord: the record as a whole breaks its contract.
            KafkaUnavailable: an invalid attempt was not rejected, and nothing was taken.
        """
        heartbeat = await self._reader.read(delivery)
        self._metrics.heartbeats[heartbeat.kind] += len(heartbeat.tasks)
        if heartbeat.kind is Kind.CLAIM:
            self._claim(heartbeat.tasks, heartbeat, delivery)
        elif heartbeat.kind is Kind.BEAT:
            # A beat for an attempt without a lease counts as a claim: the claim was lost, or went
            # to the owner of another partition. But only a claim takes an attempt over from another
            # worker.
            unknown = [attempt_id for attempt_id in heartbeat.tasks if not self._beat(attempt_id, heartbeat)]
            unwatched = [attempt_id for attempt_id in unknown if not self.is_watched(attempt_id)]
            self._claim(unwatched, heartbeat, delivery)
        else:
            for attempt_id in heartbeat.tasks:
                self._end_lease(attempt_id, heartbeat.worker)
            delivery.settle()
        return heartbeat

    def _claim(self, attempt_ids: Sequence[AttemptId], heartbeat: Heartbeat, delivery: Delivery) -> None:
        if not attempt_ids:
            delivery.settle()
            return
        record = ClaimRecord(delivery, len(attempt_ids))
        now_s = self._clock()
        for attempt_id in attempt_ids:
            earlier = self._claims.pop(attempt_id, None)
            if earlier is not None:
                earlier.record.resolve()
            lease = Lease(
                attempt_id,
                heartbeat.worker,
                heartbeat.lease_ms / 1000,
                now_s,
                delivery.partition,
                heartbeat.max_attempts,
                heartbeat.begun,
            )
            self._claims[attempt_id] = Claim(lease, record, now_s, heartbeat.kind is Kind.BEAT)

    def _beat(self, attempt_id: AttemptId, heartbeat: Heartbeat) -> bool:
        claim = self._claims.get(attempt_id)
        if claim is not None and claim.lease.worker == heartbeat.worker:
            claim.lease.seen_s = self._clock()
            claim.lease.begun = heartbeat.begun
            return True
        return self._wheel.beat(attempt_id, heartbeat.worker, self._clock(), begun=heartbeat.begun)

    def is_watched(self, attempt_id: AttemptId) -> bool:
        """Whether this process has a lease on an attempt, or a claim that is not written yet."""
        return attempt_id in self._claims or self._wheel.get(attempt_id) is not None

    def _end_lease(self, attempt_id: AttemptId, worker: str) -> None:
        claim = self._claims.get(attempt_id)
        if claim is not None and claim.lease.worker == worker:
            del self._claims[attempt_id]
            claim.record.resolve()
        # A claim that was read again may be in both places.
        self._wheel.end(attempt_id, worker)

    async def assigned(self, partitions: frozenset[int]) -> None:
        """Restores the leases of partitions that this process has now.

        Raises:
            PostgresUnavailable: no server.
        """
        restored = await leases.held(self._pool, partitions, self._clock(), unclaimed=False)
        for lease in restored:
            self._wheel.grant(lease)
        if restored:
            log.info(
                "Leases of assigned partitions are restored",
                extra={"event": "leases_restored", "leases": len(restored), "partitions": sorted(partitions)},
            )
        self.partitions |= partitions

    def revoked(self, partitions: frozenset[int]) -> None:
        """Drops the leases of partitions that another process has now."""
        self.partitions -= partitions
        self._wheel.drop(partitions)
        dropped = [
            attempt_id for attempt_id, claim in self._claims.items() if claim.lease.partition in partitions
        ]
        for attempt_id in dropped:
            del self._claims[attempt_id]

    async def run(self) -> None:
        """Writes and expires leases until cancelled; beats are read while PostgreSQL is away."""
        interval_s = min(self._settings.settle_s / 2, self._settings.tick_s / 2)
        last_s = self._clock()
        while True:
            await asyncio.sleep(interval_s)
            self._extend_after_stall(self._clock() - last_s - interval_s)
            await retry_until_available(
                self._step, waiting_for="claims and leases", retry_on=(PostgresUnavailable,)
            )
            # A wait for PostgreSQL is no stall: beats are read meanwhile.
            last_s = self._clock()

    async def _step(self) -> None:
        now_s = self._clock()
        await self._write_settled(now_s)
        if now_s >= self._next_tick_s:
            # A lease's slot is half a tick wide, so an expiry is late by at most a tick.
            self._next_tick_s = now_s + self._settings.tick_s / 2
            await self._expire(now_s)
        if now_s >= self._next_recount_s:
            await self._recount(now_s)
            self._next_recount_s = now_s + self._settings.recount_s

    def _extend_after_stall(self, stalled_s: float) -> None:
        """Extends all leases by the time of a stall, in which this process read no beats."""
        if stalled_s <= STALL_S:
            return
        log.warning(
            "This process stalled; leases are extended by as much",
            extra={"event": "leases_extended", "stalled_s": round(stalled_s, 3)},
        )
        self._metrics.stalled_s += stalled_s
        for lease in (*self._wheel, *(claim.lease for claim in self._claims.values())):
            lease.seen_s += stalled_s

    async def _recount(self, now_s: float) -> None:
        """Compares leases with PostgreSQL: missing ones begin, and those of ended attempts end.

        A worker that has missed its revocation renews the lease of an ended attempt. Its next
        heartbeat finds no lease, counts as a claim, and so leads to another revocation.
        """
        watched = [(lease.attempt_id, lease.worker) for lease in self._wheel]
        recount = await self._find_unwatched(self.partitions, self.is_watched, now_s)
        self.watch(recount.unwatched)
        held = {(lease.attempt_id, lease.worker) for lease in recount.held}
        over = [one for one in watched if one not in held]
        for attempt_id, worker in over:
            self._wheel.end(attempt_id, worker)
        if over:
            log.info(
                "Leases of ended attempts are dropped; the next heartbeat of each is answered with a revocation",
                extra={"event": "ended_leases_dropped", "attempts": len(over)},
            )

    def watch(self, unwatched: Sequence[Lease]) -> None:
        """Grants leases to running attempts that have none, of the partitions of this process."""
        found = [lease for lease in unwatched if lease.partition in self.partitions]
        for lease in found:
            self._wheel.grant(lease)
        if found:
            log.warning(
                "Running attempts without a lease get one",
                extra={"event": "unwatched_attempts_found", "attempts": len(found)},
            )

    async def _write_settled(self, now_s: float) -> None:
        settled = []
        for claim in self._claims.values():
            if claim.since_s + self._settings.settle_s > now_s:
                break
            settled.append(claim)
        if not settled:
            return
        current, refused, locked = await write_claims(self._pool, settled)
        # The next tick writes the others, when nothing stands before them.
        settled = without_waiting(settled, locked, self._claims, now_s)
        # Attempts that another worker holds are not over, so their beats must not lead to a
        # revocation.
        held_by_others: Collection[AttemptId] = ()
        if not_written := [
            claim.lease.attempt_id
            for claim in settled
            if claim.by_heartbeat and claim.lease.attempt_id not in current
        ]:
            holders = await leases.holders(self._pool, not_written)
            held_by_others = {
                attempt_id for attempt_id, holder in holders.items() if holder.state in IN_FLIGHT
            }
        over = []
        for claim in settled:
            attempt_id = claim.lease.attempt_id
            if self._claims.get(attempt_id) is not claim:
                continue  # released, claimed again or revoked while the statement ran
            del self._claims[attempt_id]
            if attempt_id in current:
                self._wheel.grant(claim.lease)
            elif attempt_id not in held_by_others and attempt_id not in refused:
                over.append(attempt_id)
            claim.record.resolve()
        if over:
            # Cancelled or ended before the claim came: a worker that runs it should stop.
            self._publisher.enqueue(OutboxEntry(revocation=Revocation("over", over)))

    async def _expire(self, now_s: float) -> None:
        expired = await self._take_expired(now_s)
        try:
            if expired:
                await self._end(expired)
        except PostgresUnavailable:
            for lease in expired:
                if lease.partition in self.partitions:
                    self._wheel.grant(lease)
            raise

    async def _take_expired(self, now_s: float) -> list[Lease]:
        """Takes expired leases out of the wheel; if many, only after all heartbeats are read."""
        if not len(self._wheel):
            return []
        await self._watermark.update(now_s)
        await self._results.update(now_s)
        expired = self._wheel.expired(now_s, self._read_until_s())
        total = len(self._wheel) + len(expired)
        if len(expired) <= max(MASS_COUNT, MASS_SHARE * total):
            return expired
        # A fault of this process is more likely than the loss of so many workers at once.
        self._metrics.mass_expiry_checks += 1
        log.warning(
            "Many leases would expire at once; verifying that all heartbeats are read",
            extra={"event": "mass_expiry_checked", "expiring": len(expired), "leases": total},
        )
        for lease in expired:
            self._wheel.grant(lease)
        asked_s = self._clock()
        verified = await self._watermark.update(asked_s, within_s=VERIFY_WITHIN_S)
        until_s = asked_s + self._settings.tick_s
        expired = self._wheel.expired(until_s, self._read_until_s()) if verified else []
        log.warning(
            "The verification of a mass expiry has ended",
            extra={"event": "mass_expiry_verified", "expired": len(expired), "leases": total},
        )
        return expired

    def _read_until_s(self) -> dict[int, float]:
        """By partition, until when all heartbeats and all results were read."""
        # Without the results, an attempt that has finished would expire while the stage processor
        # lags.
        return {
            number: min(until_s, self._results.until_s) for number, until_s in self._watermark.until_s.items()
        }

    async def _end(self, expired: Sequence[Lease]) -> None:
        """Ends the attempts of expired leases; evicts workers that have lost their last lease."""
        # Leases of one worker expire at different times, but its loss is charged once.
        lost = {lease.worker for lease in expired}
        others = [lease for lease in self._wheel if lease.worker in lost]
        others += [claim.lease for claim in self._claims.values() if claim.lease.worker in lost]
        parts = await in_halves(
            list(map(ExpiredLease.of, expired)),
            lambda part: expire(
                self._pool,
                part,
                others=list(map(ExpiredLease.of, others)),
                suspected=self._suspected,
                chance=self._chance,
                source=self._settings.event_source,
                waits=False,
            ),
        )
        for part, answer in parts:
            if isinstance(answer, ValueRefused):
                log.error(
                    "The end of a lease has a value that PostgreSQL cannot store; its attempt stays",
                    extra={"event": "expiry_unstorable", "task": part[0].attempt_id.task_id, "error": answer},
                )
            else:
                self._apply(answer)
                for lease in expired:
                    if lease.attempt_id.task_id in answer.locked:
                        # It expires at a later tick, when the other transaction has ended.
                        self._wheel.grant(lease)

    def _apply(self, expiry: Expiry) -> None:
        self._publisher.enqueue(expiry.outbox)
        holders = self._wheel.holders()
        self._suspected = {worker for worker in self._suspected | expiry.suspected if worker in holders}
        types_by_lost_worker: defaultdict[str, set[str]] = defaultdict(set)
        for ending, type_name in expiry.ended:
            if ending.worker is not None and ending.worker not in holders:
                types_by_lost_worker[ending.worker].add(type_name)
        for worker, types in types_by_lost_worker.items():
            self._evict(worker, types)
        for ending, type_name in expiry.ended:
            _report(self._metrics, ending, type_name)


def _report(metrics: Metrics, ending: Ending, type_name: str) -> None:
    metrics.lost[type_name] += 1
    metrics.ended[ending.conclusion.state] += 1
    log.warning(
        "A lease expired",
        extra={
            "event": "lease_expired",
            **ending.fence.ids(),
            "task_type": type_name,
            "worker": ending.worker,
        },
    )
