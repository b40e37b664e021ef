"""Commits the results of attempts in batches, and enqueues the events of those that took effect."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import asyncpg

from penstock.concurrency.batcher import Batcher
from penstock.concurrency.retry import retry_until_available
from penstock.contracts.result import Failure, StageResult
from penstock.core.completion import Fence, Outcome
from penstock.core.endings import GOOD, counts_failures
from penstock.errors import InvalidRecord, PostgresUnavailable, ValueRefused
from penstock.kafka.processing.outbox import Publisher
from penstock.kafka.processing.processor import Delivery
from penstock.postgres.advance import Ending, advance, late_attempts, retry_states, stages_of
from penstock.postgres.halving import in_halves
from penstock.postgres.tasks import namespaces
from penstock.stages.metrics import Metrics
from penstock.stages.result_reader import ResultReader
from penstock.stages.settings import StagesSettings
from penstock.stages.spans import trace

log = logging.getLogger(__name__)

R = TypeVar("R")

# Seconds until a result is tried again whose task another transaction locks.
LOCKED_RETRY_S = 0.2

# The worker of a result that PostgreSQL cannot store.
REFUSED_WORKER = "unknown"


@dataclass(frozen=True, slots=True)
class Pending:
    """A record in flight whose results are not committed yet."""

    delivery: Delivery
    worker: str
    results: Sequence[StageResult]


class Committer:
    """Commits results in batches and enqueues their events.

    Args:
        settings: of the service.
        pool: of the database.
        publisher: of events and callbacks.
        chance: random numbers from 0 to 1, for jitter.

    Attributes:
        metrics: counted here.
    """

    def __init__(
        self,
        settings: StagesSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        publisher: Publisher,
        chance: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._publisher = publisher
        self._chance = chance
        self._reader = ResultReader(settings.report_keys)
        self._batcher: Batcher[Pending] = Batcher(
            self._commit, max_size=settings.commit_batch, size_of=lambda pending: len(pending.results)
        )
        # Ids of tasks that the current batch found locked.
        self._locked: set[int] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        self.metrics = Metrics()

    async def take(self, delivery: Delivery) -> None:
        """Takes over a record; it is settled once its results are committed.

        Raises:
            InvalidRecord: the record as a whole cannot be read.
        """
        worker, results = await self._reader.read(delivery)
        self._batcher.add(Pending(delivery, worker, results))

    async def run(self) -> None:
        """Commits until cancelled."""
        try:
            await self._batcher.run()
        finally:
            for waiting in self._waiting:
                waiting.cancel()

    async def _commit(self, batch: Sequence[Pending]) -> None:
        began_s = time.monotonic()
        self._locked.clear()
        # A record that was delivered twice: the first result of an attempt counts.
        results: dict[Fence, tuple[str, StageResult]] = {}
        for pending in batch:
            for result in pending.results:
                results.setdefault(result.fence, (pending.worker, result))
        results |= await self._refuse_foreign_objects(results)
        if stale := await self._advance(results):
            await self._commit_stale({fence: results[fence] for fence in stale})
        self.metrics.commits.observe(time.monotonic() - began_s)
        for pending in batch:
            locked = [result for result in pending.results if result.fence.id in self._locked]
            if locked:
                # The results of other tasks do not wait for the transaction that locks these.
                waiting = asyncio.create_task(self._add_later(dataclasses.replace(pending, results=locked)))
                self._waiting.add(waiting)
                waiting.add_done_callback(self._waiting.discard)
            else:
                pending.delivery.settle()

    async def _add_later(self, pending: Pending) -> None:
        await asyncio.sleep(LOCKED_RETRY_S)
        self._batcher.add(pending)

    async def _refuse_foreign_objects(
        self, results: Mapping[Fence, tuple[str, StageResult]]
    ) -> dict[Fence, tuple[str, StageResult]]:
        """The ends of those attempts whose results refer to an object of another namespace."""
        refs = {f: r.context.ref for f, (_, r) in results.items() if r.context and r.context.ref}
        if not refs:
            return {}
        owners = await self._retry(lambda: namespaces(self._pool, (fence.id for fence in refs)))
        refused = {}
        for fence, ref in refs.items():
            if fence.id in owners:
                try:
                    ref.require_namespace(owners[fence.id])
                except InvalidRecord as fault:
                    worker, result = results[fence]
                    refused[fence] = (worker, _foreign_object(result, fault))
                    log.warning(
                        "A result refers to an object of another namespace; it is refused",
                        extra={"event": "foreign_object_refused", **fence.ids(), "worker": worker},
                    )
        return refused

    async def _commit_stale(self, results: Mapping[Fence, tuple[str, StageResult]]) -> None:
        """Commits those stale results that must or may still take effect."""
        # A result for the wrong stage becomes a failure: its worker has ended the lease, so nothing
        # else ends the attempt.
        wrong_stage = await self._retry(lambda: stages_of(self._pool, list(results)))
        await self._advance(
            {
                fence._replace(stage=stage): (results[fence][0], _wrong_stage(results[fence][1], stage))
                for fence, stage in wrong_stage.items()
            }
        )
        stale = {fence: result for fence, result in results.items() if fence not in wrong_stage}
        late = await self._accept_late(stale)
        unchanged = len(stale) - late
        self.metrics.late += late
        self.metrics.stale += unchanged
        if unchanged:
            log.info(
                "Stale or repeated results changed nothing",
                extra={"event": "results_ignored", "results": unchanged},
            )

    async def _accept_late(self, results: Mapping[Fence, tuple[str, StageResult]]) -> int:
        """Lets results of expired attempts end their successors (H10); returns how many."""
        good = [fence for fence, (_, r) in results.items() if r.outcome in GOOD]
        if not good:
            return 0
        current = await self._retry(lambda: late_attempts(self._pool, good))
        substitutes: dict[Fence, tuple[str, StageResult]] = {}
        for fence, attempt in sorted(current.items()):
            worker, result = results[fence]
            substitute = fence._replace(attempt=attempt)
            # If several are late, the result of the earliest attempt counts.
            substitutes.setdefault(substitute, (worker, dataclasses.replace(result, fence=substitute)))
        stale = await self._advance(substitutes, late=True)
        accepted = len(substitutes) - len(stale)
        if accepted:
            log.info(
                "Results of expired attempts are accepted",
                extra={"event": "late_results_accepted", "results": accepted},
            )
        return accepted

    async def _advance(
        self, results: Mapping[Fence, tuple[str, StageResult]], *, late: bool = False
    ) -> list[Fence]:
        """Commits results and enqueues their events; returns the stale fences.

        Results of tasks that another transaction locks are neither committed nor stale. A result
        with a value that PostgreSQL cannot store fails alone, permanently.
        """
        if not results:
            return []
        parts = await in_halves(
            [*results], lambda fences: self._advance_all({f: results[f] for f in fences}, late=late)
        )
        stale: list[Fence] = []
        for fences, answer in parts:
            if not isinstance(answer, ValueRefused):
                stale += answer
                continue
            [fence] = fences
            log.error(
                "A result has a value that PostgreSQL cannot store; its attempt fails",
                extra={"event": "result_unstorable", **fence.ids(), "error": answer.reason},
            )
            # Neither the worker's id nor its texts: one of them is at fault.
            failure = (REFUSED_WORKER, _refused(results[fence][1], answer))
            stale += await self._advance_all({fence: failure}, late=late)
        return stale

    async def _advance_all(
        self, results: Mapping[Fence, tuple[str, StageResult]], *, late: bool
    ) -> list[Fence]:
        began_ns = time.time_ns()
        endings = await self._retry(lambda: self._conclude(results.values()))
        advanced = await self._retry(
            lambda: advance(self._pool, endings, late=late, waits=False, source=self._settings.event_source)
        )
        self._locked |= advanced.locked
        self._publisher.enqueue(advanced.outbox)
        self.metrics.applied(endings, advanced.applied)
        trace(endings, advanced, began_ns)
        return [
            fence for fence in results if fence not in advanced.applied and fence.id not in advanced.locked
        ]

    async def _retry(self, work: Callable[[], Awaitable[R]]) -> R:
        # Each of these is one transaction, so nothing took effect when it fails.
        return await retry_until_available(
            work, waiting_for="commit of results", retry_on=(PostgresUnavailable,), chance=self._chance
        )

    async def _conclude(self, results: Collection[tuple[str, StageResult]]) -> list[Ending]:
        counted = [r.fence.id for _, r in results if counts_failures(r.outcome)]
        states = await retry_states(self._pool, counted) if counted else {}
        return [
            Ending.of(worker, result, states.get(result.fence.id), self._chance) for worker, result in results
        ]


def _refused(result: StageResult, refused: ValueRefused) -> StageResult:
    """The failure of an attempt whose result cannot be stored."""
    error = Failure(kind="InvalidResult", message=refused.reason)
    return StageResult(fence=result.fence, outcome=Outcome.FAIL, permanent=True, error=error)


def _foreign_object(result: StageResult, fault: InvalidRecord) -> StageResult:
    """The end of an attempt whose result refers to an object of another namespace."""
    error = Failure(kind="InvalidResult", message=f"{fault.reason} (/context_ref/key)")
    return StageResult(fence=result.fence, outcome=Outcome.FAIL, permanent=True, error=error)


def _wrong_stage(result: StageResult, stage: str) -> StageResult:
    """The failure of an attempt whose result names another stage than the one it runs."""
    message = f"the result names stage {result.fence.stage!r}; this attempt runs {stage!r}"
    return StageResult(
        fence=result.fence._replace(stage=stage),
        outcome=Outcome.FAIL,
        max_attempts=result.max_attempts,
        error=result.error or Failure(kind="WrongStage", message=message),
        started_ms=result.started_ms,
        finished_ms=result.finished_ms,
    )
