"""Writes results, chains of them as a whole, and enqueues the events of those that took effect.

In doubt (PostgreSQL away) a write is repeated: each is one transaction with a fence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

import asyncpg

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.result import Failure, StageResult
from penstock.core.completion import Fence, Outcome
from penstock.core.endings import counts_failures
from penstock.errors import PostgresUnavailable, ValueRefused
from penstock.kafka.processing.outbox import Publisher, partition_of
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import HEARTBEATS
from penstock.postgres.advance import advance, retry_states
from penstock.postgres.ending import Ending
from penstock.postgres.halving import in_halves
from penstock.stages.chains import Chain, Reported, in_rounds, one_by_one
from penstock.stages.metrics import Metrics
from penstock.stages.settings import StagesSettings
from penstock.stages.spans import trace

log = logging.getLogger(__name__)

R = TypeVar("R")

# The worker of a result that PostgreSQL cannot store.
REFUSED_WORKER = "unknown"


class ResultWriter:
    """Writes results and enqueues their events.

    Args:
        settings: of the service.
        pool: of the database.
        publisher: of events and callbacks.
        metrics: counts attempts that end.
        chance: random numbers from 0 to 1, for jitter.

    Attributes:
        locked: ids of tasks that another transaction locks, of the present batch.
    """

    def __init__(
        self,
        settings: StagesSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        publisher: Publisher,
        metrics: Metrics,
        chance: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._publisher = publisher
        self._metrics = metrics
        self._event_source = settings.event_source
        self._partitions = partitions_of(settings, HEARTBEATS)
        self._chance = chance
        self.locked: set[int] = set()

    async def in_rounds(self, results: Mapping[Fence, Reported]) -> list[Fence]:
        """Writes a batch, the results of a task in the order of its stages; returns stale ones."""
        stale: list[Fence] = []
        for chains in in_rounds(results):
            left = await self.advance(self._unlocked(chains), results)
            stale += [chain[0] for chain in left if len(chain) == 1]
            # A task that must stop within a chain, or has the first of its results already.
            for single in one_by_one([chain for chain in left if len(chain) > 1]):
                stale += [fence for (fence,) in await self.advance(self._unlocked(single), results)]
        return stale

    def _unlocked(self, chains: Sequence[Chain]) -> list[Chain]:
        return [chain for chain in chains if chain[0].id not in self.locked]

    async def advance(
        self, chains: Sequence[Chain], results: Mapping[Fence, Reported], *, late: bool = False
    ) -> list[Chain]:
        """Commits results and enqueues their events; returns the stale chains.

        Results of tasks that another transaction locks are neither committed nor stale. A result
        with a value that PostgreSQL cannot store fails alone, permanently; in a chain of several it
        makes the chain stale.
        """
        if not chains:
            return []
        parts = await in_halves(chains, lambda part: self._advance_all(part, results, late=late))
        stale: list[Chain] = []
        for part, answer in parts:
            if not isinstance(answer, ValueRefused):
                stale += answer
                continue
            [chain] = part
            if len(chain) > 1:
                stale.append(chain)
                continue
            [fence] = chain
            log.error(
                "A result has a value that PostgreSQL cannot store; its attempt fails",
                extra={"event": "result_unstorable", **fence.ids(), "error": answer.reason},
            )
            # Neither the worker's id nor its texts: one of them is at fault.
            failure = (REFUSED_WORKER, _refused(results[fence][1], answer))
            stale += await self._advance_all([chain], {fence: failure}, late=late)
        return stale

    async def _advance_all(
        self, chains: Sequence[Chain], results: Mapping[Fence, Reported], *, late: bool
    ) -> list[Chain]:
        began_ns = time.time_ns()
        reported = [results[fence] for chain in chains for fence in chain]
        endings = await self.retry(lambda: self._conclude(reported))
        ended = {ending.fence: ending for ending in endings}
        advanced = await self.retry(
            lambda: advance(
                self._pool,
                [ended[chain[-1]] for chain in chains],
                chains={chain[-1]: [ended[f] for f in chain[:-1]] for chain in chains if len(chain) > 1},
                late=late,
                waits=False,
                source=self._event_source,
            )
        )
        self.locked |= advanced.locked
        self._publisher.enqueue(advanced.outbox)
        self._metrics.applied(endings, advanced.applied)
        trace(endings, advanced, began_ns)
        return [
            chain
            for chain in chains
            if chain[-1] not in advanced.applied and chain[0].id not in advanced.locked
        ]

    async def retry(self, work: Callable[[], Awaitable[R]]) -> R:
        """The outcome of work that is one transaction: nothing took effect when it fails."""
        return await retry_until_available(
            work, waiting_for="commit of results", retry_on=(PostgresUnavailable,), chance=self._chance
        )

    async def _conclude(self, results: Collection[Reported]) -> list[Ending]:
        counted = [r.fence.id for _, r in results if counts_failures(r.outcome)]
        states = await retry_states(self._pool, counted) if counted else {}
        endings = [
            Ending.of(worker, result, states.get(result.fence.id), self._chance) for worker, result in results
        ]
        for ending in endings:
            if ending.goes_on is not None:
                # Its worker's claims and heartbeats are there, with the same key.
                ending.partition = partition_of((ending.worker or "").encode(), self._partitions)
        return endings


def _refused(result: StageResult, refused: ValueRefused) -> StageResult:
    """The failure of an attempt whose result cannot be stored."""
    error = Failure(kind="InvalidResult", message=refused.reason)
    return StageResult(fence=result.fence, outcome=Outcome.FAIL, permanent=True, error=error)
