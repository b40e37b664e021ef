"""Results in, commits out: what arrives while one commit runs goes into the next, so batches grow with the load."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import asyncpg

from penstock.contracts.inbound import decode_results
from penstock.contracts.result import Failure, StageResult
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.retry import RetryPolicy
from penstock.errors import Invalid, PostgresUnavailable
from penstock.kafka.outbox import Publisher
from penstock.kafka.processor import Delivery
from penstock.postgres.advance import Ending, advance, late_attempts, stages_of, tallies
from penstock.stages.figures import Figures
from penstock.stages.settings import StagesSettings
from penstock.stages.spans import trace

log = logging.getLogger(__name__)

Done = TypeVar("Done")

# While PostgreSQL is away: patient, and quick once it is back.
WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.1, factor=2, max_s=2.0, jitter=0.3)


@dataclass(frozen=True, slots=True)
class Pending:
    """A record in hand whose results are not committed yet."""

    delivery: Delivery
    worker: str
    results: Sequence[StageResult]


class Committer:
    """Commits results in batches and publishes what that owes.

    Args:
        settings: of the service.
        pool: of the database.
        publisher: of events and callbacks.
        park: writes one entry's fault to the rejected topic, without settling its record.
        chance: random numbers from 0 to 1, for jitter.

    Attributes:
        figures: what it counts of itself.
    """

    def __init__(
        self,
        settings: StagesSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        publisher: Publisher,
        park: Callable[[Delivery, Invalid], Awaitable[None]],
        chance: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._publisher = publisher
        self._park = park
        self._pending: deque[Pending] = deque()
        self._arrived = asyncio.Event()
        self._chance = chance
        self.figures = Figures()

    async def take(self, delivery: Delivery) -> None:
        """Takes a record in; it is settled once its results are committed.

        Raises:
            InvalidRecord: the record as a whole cannot be read.
        """
        worker, results, faults = decode_results(delivery.value)
        for fault in faults:
            await self._park(delivery, fault)
        self._pending.append(Pending(delivery, worker, results))
        self._arrived.set()

    async def run(self) -> None:
        """Commits what arrives, one batch after the other, until cancelled."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            began_s = time.monotonic()
            await self._commit(batch)
            self.figures.commits.see(time.monotonic() - began_s)
            for pending in batch:
                pending.delivery.settle()

    def _next_batch(self) -> list[Pending]:
        batch: list[Pending] = []
        size = 0
        while self._pending and (
            not batch or size + len(self._pending[0].results) <= self._settings.commit_batch
        ):
            batch.append(self._pending.popleft())
            size += len(batch[-1].results)
        if not self._pending:
            self._arrived.clear()
        return batch

    async def _commit(self, batch: Sequence[Pending]) -> None:
        # A record delivered twice within one batch: the first of an attempt's results stands.
        results: dict[Fence, tuple[str, StageResult]] = {}
        for pending in batch:
            for result in pending.results:
                results.setdefault(result.fence, (pending.worker, result))
        vain = await self._advance(results)
        if not vain:
            return
        # Late or repeated, most of them. But an attempt whose result has a wrong stage would never end: the worker
        # has done with it and its lease is released.
        astray = await self._insist(lambda: stages_of(self._pool, vain))
        await self._advance(
            {
                fence._replace(stage=stage): (results[fence][0], _astray(results[fence][1], stage))
                for fence, stage in astray.items()
            }
        )
        late = await self._accept_late({fence: results[fence] for fence in vain if fence not in astray})
        in_vain = len(vain) - len(astray) - late
        self.figures.late += late
        self.figures.vain += in_vain
        if in_vain:
            log.info("%d late or repeated results changed nothing", in_vain)

    async def _accept_late(self, results: Mapping[Fence, tuple[str, StageResult]]) -> int:
        """Lets results of expired attempts end the attempts that have taken their place (H10); returns how many."""
        good = [fence for fence, (_, r) in results.items() if r.outcome in (Outcome.NEXT, Outcome.DONE)]
        if not good:
            return 0
        now_at = await self._insist(lambda: late_attempts(self._pool, good))
        standing_in: dict[Fence, tuple[str, StageResult]] = {}
        for fence, attempt in sorted(now_at.items()):
            worker, result = results[fence]
            instead = fence._replace(attempt=attempt)
            # Of several late ones the earliest attempt's stands.
            standing_in.setdefault(instead, (worker, dataclasses.replace(result, fence=instead)))
        vain = await self._advance(standing_in, late=True)
        accepted = len(standing_in) - len(vain)
        if accepted:
            log.info("%d results of expired attempts were accepted", accepted)
        return accepted

    async def _advance(
        self, results: Mapping[Fence, tuple[str, StageResult]], *, late: bool = False
    ) -> list[Fence]:
        """Commits results and publishes what that owes; returns those whose attempts were not found."""
        if not results:
            return []
        began_ns = time.time_ns()
        endings = await self._insist(lambda: self._conclude(results.values()))
        advanced = await self._insist(
            lambda: advance(self._pool, endings, late=late, source=self._settings.event_source)
        )
        self._publisher.owe(advanced.owed)
        self.figures.applied(endings, advanced.applied)
        trace(endings, advanced, began_ns)
        return [fence for fence in results if fence not in advanced.applied]

    async def _insist(self, work: Callable[[], Awaitable[Done]]) -> Done:
        tries = 0
        while True:
            try:
                return await work()
            except PostgresUnavailable as error:
                # Nothing took effect; the watchdog ends the process if this lasts.
                tries += 1
                log.warning("holding results back: %s", error)
                await asyncio.sleep(WHILE_AWAY.delay_s(tries, self._chance()))

    async def _conclude(self, results: Collection[tuple[str, StageResult]]) -> list[Ending]:
        failing = [r.fence.id for _, r in results if r.outcome is Outcome.FAIL]
        trials = await tallies(self._pool, failing) if failing else {}
        endings = []
        for worker, result in results:
            trial = trials.get(result.fence.id)
            policy = trial.policy if trial else None
            if policy is not None and result.max_attempts is not None:
                policy = dataclasses.replace(policy, max_attempts=result.max_attempts)
            verdict = conclude(
                result.fence,
                result.outcome,
                next_stage=result.next_stage,
                delay_s=result.delay_ms / 1000,
                permanent=result.permanent,
                tally=trial.tally if trial else None,
                policy=policy,
                chance=self._chance() if policy else 0.0,
            )
            endings.append(
                Ending(
                    fence=result.fence,
                    outcome=result.outcome,
                    verdict=verdict,
                    worker=worker,
                    context=result.context,
                    error=result.error,
                    started_ms=result.started_ms,
                    finished_ms=result.finished_ms,
                )
            )
        return endings


def _astray(result: StageResult, stage: str) -> StageResult:
    """The failure that becomes of a result for a stage that its attempt does not run."""
    message = f"the result speaks of stage {result.fence.stage!r}; this attempt runs {stage!r}"
    wrong_stage = Failure(kind="WrongStage", message=message)
    return StageResult(
        fence=result.fence._replace(stage=stage),
        outcome=Outcome.FAIL,
        max_attempts=result.max_attempts,
        error=result.error or wrong_stage,
        started_ms=result.started_ms,
        finished_ms=result.finished_ms,
    )
