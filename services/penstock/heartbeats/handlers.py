"""Claims, beats and releases in; leases written, expired and ended."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import asyncpg

from penstock.contracts.event import Owed
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.inbound import decode_heartbeat
from penstock.contracts.result import Failure
from penstock.contracts.revocation import Revocation
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.leases import Key, Lease, LeaseWheel
from penstock.core.task import IN_HAND
from penstock.heartbeats.figures import Figures
from penstock.heartbeats.reading import Reading
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka.outbox import Publisher
from penstock.kafka.processor import Delivery
from penstock.metrics import Sample
from penstock.postgres import leases
from penstock.postgres.advance import Ending, Trial, advance, tallies

log = logging.getLogger(__name__)

# `Recount.look`.
Unended = Callable[[Collection[int], Callable[[Key], bool], float], Awaitable[list[Lease]]]

# So many expiries at once, and such a share of all leases, make this process suspect itself first.
FEW = 3
SUSPICIOUS = 0.1
# How long it then waits until it has read everything that is there; in doubt it expires nothing and looks again later.
SURE_WITHIN_S = 5.0


@dataclass(slots=True)
class Held:
    """A claim record that is not acknowledged yet, with how many of its attempts are still only in memory."""

    delivery: Delivery
    remaining: int

    def resolve(self) -> None:
        """One of its attempts was released or written."""
        self.remaining -= 1
        if self.remaining == 0:
            self.delivery.settle()


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that has not lived long enough to be written, since when it is here, and whether it is only a beat."""

    lease: Lease
    held: Held
    since_s: float
    beaten: bool


class Watch:
    """All leases of this process.

    Args:
        settings: of the service.
        pool: of the database.
        publisher: of the events that an expiry owes.
        reading: how far the reading has come.
        unended: finds what was released and never ended.
        lost: told of a worker that holds nothing any more, and of the types whose tasks it has lost.
        clock: seconds that only grow (`loop.time`).
        chance: random numbers from 0 to 1, for jitter.
    """

    def __init__(
        self,
        settings: HeartbeatsSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        publisher: Publisher,
        reading: Reading,
        unended: Unended,
        lost: Callable[[str, set[str]], None],
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._publisher = publisher
        self._reading = reading
        self._unended = unended
        self._lost = lost
        self._clock = clock
        self._wheel = LeaseWheel(settings.tick_s / 2)
        # In order of arrival, so the oldest are at the front.
        self._young: dict[Key, Claim] = {}
        self._partitions: frozenset[int] = frozenset()
        self._chance = chance
        self._figures = Figures()

    def samples(self) -> Iterator[Sample]:
        """What is to be told of it (`penstock.metrics`)."""
        return self._figures.samples(young=len(self._young), written=len(self._wheel))

    async def take(self, delivery: Delivery) -> None:
        """Takes one record in.

        Raises:
            InvalidRecord: it breaks its contract.
        """
        heartbeat = decode_heartbeat(delivery.value)
        self._figures.said[heartbeat.kind] += len(heartbeat.tasks)
        if heartbeat.kind is Kind.CLAIM:
            self._claim(heartbeat.tasks, heartbeat, delivery)
            return
        if heartbeat.kind is Kind.BEAT:
            # A beat for an attempt that nobody is known to hold is as good as a claim: its claim went to another
            # partition's owner, or was lost with one. But only a claim takes an attempt from another worker.
            unknown = [key for key in heartbeat.tasks if not self._beat(key, heartbeat.worker)]
            self._claim([key for key in unknown if not self._watched(key)], heartbeat, delivery)
            return
        for key in heartbeat.tasks:
            self._release(key, heartbeat.worker)
        delivery.settle()

    def _claim(self, keys: Sequence[Key], heartbeat: Heartbeat, delivery: Delivery) -> None:
        if not keys:
            delivery.settle()
            return
        held = Held(delivery, len(keys))
        now_s = self._clock()
        for key in keys:
            earlier = self._young.pop(key, None)
            if earlier is not None:
                earlier.held.resolve()
            lease = Lease(
                key,
                heartbeat.worker,
                heartbeat.lease_ms / 1000,
                now_s,
                delivery.partition,
                heartbeat.max_attempts,
            )
            self._young[key] = Claim(lease, held, now_s, heartbeat.kind is Kind.BEAT)

    def _beat(self, key: Key, worker: str) -> bool:
        claim = self._young.get(key)
        if claim is not None and claim.lease.worker == worker:
            claim.lease.seen_s = self._clock()
            return True
        return self._wheel.beat(key, worker, self._clock())

    def _watched(self, key: Key) -> bool:
        return key in self._young or self._wheel.get(key) is not None

    def _release(self, key: Key, worker: str) -> None:
        claim = self._young.get(key)
        if claim is not None and claim.lease.worker == worker:
            del self._young[key]
            claim.held.resolve()
        # A claim that was read again may be there twice.
        self._wheel.release(key, worker)

    async def assigned(self, partitions: frozenset[int]) -> None:
        """Restores the leases of partitions that are this process's now.

        Raises:
            PostgresUnavailable: no server.
        """
        restored = await leases.held(self._pool, partitions, self._clock())
        for lease in restored:
            self._wheel.grant(lease)
        if restored:
            log.info("restored %d leases of partitions %s", len(restored), sorted(partitions))
        self._partitions |= partitions

    def revoked(self, partitions: frozenset[int]) -> None:
        """Forgets the leases of partitions that are another's now."""
        self._partitions -= partitions
        self._wheel.forget(partitions)
        for key in [key for key, claim in self._young.items() if claim.lease.partition in partitions]:
            del self._young[key]

    async def run(self) -> None:
        """Writes and expires leases until cancelled.

        Raises:
            PostgresUnavailable: claims not written are not acknowledged; another process reads them again.
        """
        # Half a tick for a lease's slot to pass, half for the look: an expiry is late by at most a tick.
        half_s = self._settings.tick_s / 2
        interval_s = min(self._settings.settle_s / 2, half_s)
        last_s = self._clock()
        next_tick_s = last_s + half_s
        next_recount_s = last_s + self._settings.recount_s
        while True:
            await asyncio.sleep(interval_s)
            now_s = self._clock()
            # Time in which this process stood still is nobody's silence.
            stood_still_s = now_s - last_s - interval_s
            if stood_still_s > 1.0:
                log.warning("stood still for %.1f s; leases are extended by as much", stood_still_s)
                self._figures.stood_still_s += stood_still_s
                for lease in (*self._wheel, *(claim.lease for claim in self._young.values())):
                    lease.seen_s += stood_still_s
            await self._write_settled(now_s)
            if now_s >= next_tick_s:
                next_tick_s = now_s + half_s
                await self._expire(now_s)
            if now_s >= next_recount_s:
                next_recount_s = now_s + self._settings.recount_s
                await self._recount(now_s)
            # Waiting for PostgreSQL is not standing still: beats are read meanwhile.
            last_s = self._clock()

    async def _recount(self, now_s: float) -> None:
        """Gives a lease to what runs by PostgreSQL, is watched by nobody and will not be ended by its result."""
        found = await self._unended(self._partitions, self._watched, now_s)
        found = [lease for lease in found if lease.partition in self._partitions]
        for lease in found:
            self._wheel.grant(lease)
        if found:
            log.warning("%d running tasks were released and never ended: watching them again", len(found))

    async def _write_settled(self, now_s: float) -> None:
        settled = []
        for claim in self._young.values():
            if claim.since_s + self._settings.settle_s > now_s:
                break
            settled.append(claim)
        if not settled:
            return
        alive = await leases.claimed(
            self._pool, [claim.lease for claim in settled], [claim.beaten for claim in settled]
        )
        # Beats of attempts that have gone to others meanwhile; these are not to hear that they are over.
        others: Collection[Key] = ()
        if doubtful := [
            claim.lease.key for claim in settled if claim.beaten and claim.lease.key not in alive
        ]:
            holders = await leases.holders(self._pool, doubtful)
            others = {key for key, holder in holders.items() if holder.state in IN_HAND}
        over = []
        for claim in settled:
            key = claim.lease.key
            if self._young.get(key) is not claim:
                continue  # released, claimed again or revoked while the statement ran
            del self._young[key]
            if key in alive:
                self._wheel.grant(claim.lease)
            elif key not in others:
                over.append(key)
            claim.held.resolve()
        if over:
            # Cancelled or ended before it was claimed: whoever runs it all the same is told.
            self._publisher.owe(Owed(revocation=Revocation("over", over)))

    async def _expire(self, now_s: float) -> None:
        if silent := await self._silent(now_s):
            await self._end(silent)

    async def _silent(self, now_s: float) -> list[Lease]:
        """Takes out and returns the leases whose time is up."""
        if not len(self._wheel):
            return []  # and nobody is asked anything
        await self._reading.look(now_s)
        expired = self._wheel.expired(now_s, self._reading.until_s)
        if len(expired) > max(FEW, SUSPICIOUS * (len(self._wheel) + len(expired))):
            # More likely than that so many workers died at once is that we do not hear.
            self._figures.suspicions += 1
            log.warning(
                "%d of %d leases would expire at once: making sure that it is not us who do not hear",
                len(expired),
                len(self._wheel) + len(expired),
            )
            for lease in expired:
                self._wheel.grant(lease)
            expired = []
            sure_s = self._clock()
            if await self._reading.look(sure_s, patience_s=SURE_WITHIN_S):
                expired = self._wheel.expired(sure_s + self._settings.tick_s, self._reading.until_s)
            log.warning("%d leases expire: everything that was said before was read", len(expired))
        return expired

    async def _end(self, expired: Sequence[Lease]) -> None:
        """Ends the attempts of expired leases, and what is left of their workers."""
        trials = await tallies(self._pool, [lease.key[0] for lease in expired])
        endings = []
        for lease in expired:
            task_id, step, attempt = lease.key
            trial = trials.get(task_id)
            if trial is None:
                continue  # ended or cancelled since
            fence = Fence(task_id, step, trial.stage, attempt)
            policy = trial.policy
            if lease.max_attempts is not None:
                # Its row says so too, but only once the claim was written there.
                policy = dataclasses.replace(policy, max_attempts=lease.max_attempts)
            verdict = conclude(
                fence,
                Outcome.EXPIRED,
                tally=trial.tally,
                policy=policy,
                max_losses=trial.max_losses,
                chance=self._chance(),
            )
            error = Failure(
                kind="LeaseExpired",
                message=f"no sign of life from worker {lease.worker} for {lease.timeout_s:g} s",
            )
            endings.append(
                Ending(
                    fence=fence, outcome=Outcome.EXPIRED, verdict=verdict, worker=lease.worker, error=error
                )
            )
        if endings:
            advanced = await advance(self._pool, endings, source=self._settings.event_source)
            self._publisher.owe(advanced.owed)
            self._bury(expired, advanced.applied, trials)
            for ending in endings:
                if ending.fence in advanced.applied:
                    self._tell(ending, trials[ending.fence.id].type)

    def _tell(self, ending: Ending, name: str) -> None:
        self._figures.lost[name] += 1
        self._figures.ended[ending.verdict.state] += 1
        fence = ending.fence
        log.warning(
            "lease expired: task %d, stage %s, attempt %d",
            fence.id,
            fence.stage,
            fence.attempt,
            extra={**fence.ids(), "type": name, "worker": ending.worker},
        )

    def _bury(self, expired: Sequence[Lease], applied: set[Fence], trials: Mapping[int, Trial]) -> None:
        """Tells of workers that have lost attempts and hold nothing any more."""
        ended = {(fence.id, fence.step, fence.attempt) for fence in applied}
        holders = self._wheel.holders()
        losers: defaultdict[str, set[str]] = defaultdict(set)
        for lease in expired:
            if lease.key in ended and lease.worker not in holders:
                losers[lease.worker].add(trials[lease.key[0]].type)
        for worker, types in losers.items():
            self._lost(worker, types)
