"""Commits the results of attempts in batches, and enqueues the events of those that took effect."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import asyncpg

from penstock.concurrency.batcher import Batcher
from penstock.contracts.result import Failure, StageResult
from penstock.core.completion import Fence, Outcome
from penstock.core.endings import GOOD
from penstock.core.turn_pace import TurnPace
from penstock.errors import InvalidRecord
from penstock.kafka.processing.outbox import Publisher
from penstock.kafka.processing.processor import Delivery
from penstock.postgres.advance import ahead, late_attempts, stages_of
from penstock.postgres.tasks import namespaces
from penstock.stages.chains import Reported
from penstock.stages.metrics import Metrics
from penstock.stages.result_reader import ResultReader
from penstock.stages.result_writer import ResultWriter
from penstock.stages.settings import StagesSettings

log = logging.getLogger(__name__)

# Seconds until a result is tried again whose task another transaction locks.
LOCKED_RETRY_S = 0.2

# How often a result is tried, as often as those, until the one that its attempt follows is
# committed. Then it is stale. Tries, not seconds: an outage of PostgreSQL is no reason to drop it.
TRIES = 25

# Seconds for which results wait for the next ones of their tasks, which workers run already: their
# commit delays nothing. Together they are one statement.
GOING_ON_S = 0.02

# Results a second up to which they are fetched at once, and from which fetches keep the longest
# gap.
UNPACED_PER_S, PACED_PER_S = 300.0, 900.0
LONGEST_GAP_S = 0.012


@dataclass(frozen=True, slots=True)
class Pending:
    """A record in flight whose results are not committed yet.

    Attributes:
        delivery: of the record.
        worker: that wrote it.
        results: those that are left.
        tries: how often each was tried that came before the result which its attempt follows.
    """

    delivery: Delivery
    worker: str
    results: Sequence[StageResult]
    tries: Mapping[Fence, int] = field(default_factory=dict)


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
        self._pool = pool
        self.metrics = Metrics()
        self._writer = ResultWriter(settings, pool, publisher, self.metrics, chance)
        self._reader = ResultReader(settings.report_keys)
        self._batcher: Batcher[Pending] = Batcher(
            self._commit,
            max_size=settings.commit_batch,
            size_of=lambda pending: len(pending.results),
            linger_s=lambda _previous: GOING_ON_S,
        )
        self._pace = TurnPace(UNPACED_PER_S, PACED_PER_S, LONGEST_GAP_S)
        self._waiting: set[asyncio.Task[None]] = set()

    async def take(self, delivery: Delivery) -> None:
        """Takes over a record; it is settled once its results are committed.

        Raises:
            InvalidRecord: the record as a whole cannot be read.
        """
        worker, results = await self._reader.read(delivery)
        self._pace.add(len(results), time.monotonic())
        going_on = all(result.goes_on is not None for result in results)
        self._batcher.add(Pending(delivery, worker, results), urgent=not going_on)

    def gap_s(self) -> float:
        """Seconds for which results may wait for more, so that they share a turn."""
        return self._pace.gap_s(time.monotonic())

    async def run(self) -> None:
        """Commits until cancelled."""
        try:
            await self._batcher.run()
        finally:
            for waiting in self._waiting:
                waiting.cancel()

    async def _commit(self, batch: Sequence[Pending]) -> None:
        began_s = time.monotonic()
        self._writer.locked.clear()
        # A record that was delivered twice: the first result of an attempt counts.
        results: dict[Fence, Reported] = {}
        for pending in batch:
            for result in pending.results:
                results.setdefault(result.fence, (pending.worker, result))
        results |= await self._refuse_foreign_objects(results)
        stale = await self._writer.in_rounds(results)
        early = await self._early(stale, batch)
        if stale := [fence for fence in stale if fence not in early]:
            await self._commit_stale({fence: results[fence] for fence in stale})
        later_ids = self._writer.locked | {fence.id for fence in early}
        self.metrics.commits.observe(time.monotonic() - began_s)
        for pending in batch:
            # The results of other tasks do not wait for these.
            if later := [result for result in pending.results if result.fence.id in later_ids]:
                tries = Counter(pending.tries)
                tries.update(result.fence for result in later if result.fence in early)
                left = dataclasses.replace(pending, results=later, tries=tries)
                waiting = asyncio.create_task(self._add_later(left))
                self._waiting.add(waiting)
                waiting.add_done_callback(self._waiting.discard)
            else:
                pending.delivery.settle()

    async def _early(self, stale: Sequence[Fence], batch: Sequence[Pending]) -> set[Fence]:
        """Those of stale results that are tried again: they came before the one that they follow.

        That one may be delivered again after them, or wait for a transaction that locks its task.
        """
        tried = {fence for pending in batch for fence, tries in pending.tries.items() if tries >= TRIES}
        later = [fence for fence in stale if fence.step and fence not in tried]
        return await self._writer.retry(lambda: ahead(self._pool, later)) if later else set()

    async def _add_later(self, pending: Pending) -> None:
        await asyncio.sleep(LOCKED_RETRY_S)
        self._batcher.add(pending, urgent=True)

    async def _refuse_foreign_objects(self, results: Mapping[Fence, Reported]) -> dict[Fence, Reported]:
        """The ends of those attempts whose results refer to an object of another namespace."""
        refs = {f: r.context.ref for f, (_, r) in results.items() if r.context and r.context.ref}
        if not refs:
            return {}
        owners = await self._writer.retry(lambda: namespaces(self._pool, (fence.id for fence in refs)))
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

    async def _commit_stale(self, results: Mapping[Fence, Reported]) -> None:
        """Commits those stale results that must or may still take effect."""
        # A result for the wrong stage becomes a failure: its worker has ended the lease, so nothing
        # else ends the attempt.
        wrong_stage = await self._writer.retry(lambda: stages_of(self._pool, list(results)))
        failures = {
            fence._replace(stage=stage): (results[fence][0], _wrong_stage(results[fence][1], stage))
            for fence, stage in wrong_stage.items()
        }
        await self._writer.advance([(fence,) for fence in failures], failures)
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

    async def _accept_late(self, results: Mapping[Fence, Reported]) -> int:
        """Lets results of expired attempts end their successors (H10); returns how many."""
        good = [fence for fence, (_, r) in results.items() if r.outcome in GOOD]
        if not good:
            return 0
        current = await self._writer.retry(lambda: late_attempts(self._pool, good))
        substitutes: dict[Fence, Reported] = {}
        for fence, attempt in sorted(current.items()):
            worker, result = results[fence]
            substitute = fence._replace(attempt=attempt)
            # If several are late, the result of the earliest attempt counts.
            substitutes.setdefault(substitute, (worker, dataclasses.replace(result, fence=substitute)))
        stale = await self._writer.advance([(fence,) for fence in substitutes], substitutes, late=True)
        accepted = len(substitutes) - len(stale)
        if accepted:
            log.info(
                "Results of expired attempts are accepted",
                extra={"event": "late_results_accepted", "results": accepted},
            )
        return accepted


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
