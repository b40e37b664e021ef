"""Moves callbacks through the service, in one direction and in three stages.

`intake` → `turn` → `recorder`. Each stage has queues of its own, and knows later ones only. The
pipeline makes the stages and keeps the targets up to date for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import asyncpg

from penstock.callbacks.caller import Caller
from penstock.callbacks.hosts import Hosts
from penstock.callbacks.intake import Intake
from penstock.callbacks.ledger import Ledger
from penstock.callbacks.metrics import Metrics
from penstock.callbacks.outcomes import Outcomes
from penstock.callbacks.receiver import Receiver
from penstock.callbacks.recorder import Recorder
from penstock.callbacks.requeuer import Drainer, QueueReader, Requeuer
from penstock.callbacks.results import ResultsPublisher
from penstock.callbacks.router import Deferral, Router
from penstock.callbacks.secret_cache import SecretCache
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target_cache import TargetCache
from penstock.callbacks.target_store import TargetStore
from penstock.callbacks.turn import Turn
from penstock.core.offset_tracker import Partition
from penstock.core.target import TargetId
from penstock.errors import PostgresUnavailable
from penstock.kafka.processing.processor import Delivery
from penstock.process import run_all

log = logging.getLogger(__name__)

# Seconds that the maintenance of targets pauses while PostgreSQL is unavailable.
MAINTENANCE_RETRY_S = 1.0


class Pipeline:
    """Delivers callbacks.

    Args:
        settings: of the service.
        pool: of the database.
        caller: makes the calls.
        results: publishes the records of ended callbacks.
        requeuer: publishes callbacks again when they are due.
        hosts: of the targets; the caller's resolver tells them the addresses of their names.
        secret_cache: the secrets that sign; the caller reads it.
        owner: unique name of this process.
        partition_of: the partition of a URL's records.
        random_share: random numbers from 0 to 1, for jitter.

    Attributes:
        targets: loads and saves targets; it receives the notifications of their changes.
        metrics: of the service.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        caller: Caller,
        results: ResultsPublisher,
        requeuer: Requeuer,
        hosts: Hosts,
        secret_cache: SecretCache,
        *,
        owner: str,
        partition_of: Callable[[str], int],
        random_share: Callable[[], float],
    ) -> None:
        self._requeuer = requeuer
        self._cache = TargetCache(settings, hosts)
        self._receiver = Receiver(self._cache)
        self._router = Router(settings, self._cache, random_share)
        self.targets = TargetStore(settings, pool, self._cache, owner, partition_of, self._is_in_flight)
        self._drainer = Drainer(pool, self._cache, self._router)
        self._queue_reader = QueueReader(pool, self._cache, self._router, settings.lane_bounds.total_size)
        ledger = Ledger(settings, pool, owner)
        self.metrics = Metrics(
            settings,
            self._router,
            ledger,
            self._cache,
            self._drainer,
            secret_cache,
            requeuer,
        )
        self._recorder = Recorder(self._cache, ledger, results, requeuer)
        self._turn = Turn(
            settings,
            self._cache,
            self._router,
            ledger,
            caller,
            Outcomes(settings, random_share),
            secret_cache,
            self.metrics,
            self._recorder,
        )
        self._intake = Intake(self._cache, self._receiver, self.targets, self._turn, self._recorder)

    @property
    def unfinished(self) -> int:
        """Claims and calls under way, unrecorded outcomes, and results that are published.

        A callback that was held has no record: only this count lets a stop wait for its claim.
        """
        return len(self._turn) + len(self._recorder)

    async def receive(self, delivery: Delivery) -> None:
        """Takes a record in; see `Intake.receive`."""
        received = await self._intake.receive(delivery)
        self.metrics.of(self._router.lanes_of(delivery)).received += received

    async def assign(self, partitions: frozenset[Partition]) -> None:
        """Adds partitions.

        Raises:
            Fatal: they are not the same on both paths.
        """
        self.targets.assign(partitions)

    async def revoke(self, partitions: frozenset[Partition]) -> None:
        """Drops the callbacks of partitions that other processes may own, except claimed ones."""
        numbers = frozenset(number for _topic, number in partitions)
        self._router.revoke(partitions)
        self._receiver.revoke(numbers)
        self._cache.revoke(numbers)

    async def run(self, stopping: asyncio.Event) -> None:
        """Runs until cancelled; after `stopping` is set it only finishes the claimed calls.

        Raises:
            Exception: any error but those of targets and of unavailable servers.
        """
        await run_all(
            self._intake.run(),
            self._turn.run(),
            self._recorder.run(),
            self._maintain_targets(),
            self._close_on(stopping),
        )

    async def _close_on(self, stopping: asyncio.Event) -> None:
        """Returns waiting callbacks to PostgreSQL: waiting could exceed the grace period."""
        await stopping.wait()
        self._intake.close()
        self._recorder.defer(Deferral(in_flight, 0.0) for in_flight in self._router.close())

    def _is_in_flight(self, target_id: TargetId) -> bool:
        return self._router.has(target_id) or self._receiver.has(target_id)

    async def _maintain_targets(self) -> None:
        """Applies changes from PostgreSQL, saves the cache and drains held callbacks."""
        try:
            while True:
                await self.targets.wait()
                try:
                    for target_id in await self.targets.refresh():
                        self._recorder.defer(self._router.target_changed(target_id))
                        self._turn.admit()
                    await self.targets.save_due()
                    await self.targets.find_troubled()
                    self._cache.evict_disabled(time.monotonic(), self._is_in_flight)
                    for in_flight in [] if self._receiver.closed else await self._queue_reader.read():
                        self._turn.requeue(in_flight)
                    self._turn.admit()
                    if await self._drainer.drain(time.monotonic()):
                        await self._requeuer.notify_due(0.0)
                except PostgresUnavailable as error:
                    log.warning(
                        "Saving the health of targets is delayed: PostgreSQL is unavailable",
                        extra={"event": "target_saving_delayed", "error": str(error)},
                    )
                    await asyncio.sleep(MAINTENANCE_RETRY_S)
        finally:
            await self.targets.save_last()
