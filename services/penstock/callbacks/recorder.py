"""The third stage: records in PostgreSQL what became of each callback.

A callback that was called has an outcome. One that was not leaves as a `Deferral`: it is held for
its target, or postponed. The `ledger` writes each kind in batches; records of ended callbacks are
published afterwards (`results`), and the requeuer learns when the next attempt is due.

While PostgreSQL is unavailable, everything waits here. Nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.callbacks.ledger import EndedAttempt, Ledger, outcome_linger_s
from penstock.callbacks.requeuer import Requeuer
from penstock.callbacks.results import ResultsPublisher
from penstock.callbacks.router import Deferral
from penstock.callbacks.target_cache import TargetCache
from penstock.concurrency.batcher import Batcher
from penstock.process import run_all


class Recorder:
    """Records outcomes and deferrals.

    Args:
        cache: learns which targets have held callbacks.
        ledger: writes the rows.
        results: publishes the records of ended callbacks.
        requeuer: publishes callbacks again when they are due.
    """

    def __init__(
        self, cache: TargetCache, ledger: Ledger, results: ResultsPublisher, requeuer: Requeuer
    ) -> None:
        self._cache = cache
        self._ledger = ledger
        self._results = results
        self._requeuer = requeuer
        self._ended = Batcher(self._record_outcomes, linger_s=outcome_linger_s)
        self._postponed = Batcher(self._postpone)
        self._held = Batcher(self._hold)
        # Callbacks whose last outcome is not recorded yet.
        self._unrecorded: set[str] = set()

    def __len__(self) -> int:
        """Unrecorded outcomes, and results that are published."""
        return len(self._unrecorded) + len(self._results)

    def __contains__(self, callback_id: object) -> bool:
        """Whether the last outcome of a callback is not recorded yet."""
        return callback_id in self._unrecorded

    def record(self, ended: EndedAttempt) -> None:
        """Queues the outcome of a call."""
        self._unrecorded.add(ended.callback.id)
        self._ended.add(ended)

    def defer(self, deferrals: Iterable[Deferral]) -> None:
        """Queues callbacks that leave without a call."""
        for deferral in deferrals:
            (self._held if deferral.due_in_s is None else self._postponed).add(deferral)

    async def notify_due(self) -> None:
        """Says that callbacks are due now."""
        await self._requeuer.notify_due(0.0)

    async def run(self) -> None:
        """Records until cancelled.

        Raises:
            Exception: any error but those of unavailable servers.
        """
        await run_all(self._ended.run(), self._postponed.run(), self._held.run(), self._results.run())

    async def _postpone(self, batch: Sequence[Deferral]) -> None:
        await self._requeuer.notify_due(await self._ledger.postpone(batch))

    async def _hold(self, batch: Sequence[Deferral]) -> None:
        await self._ledger.hold(batch)
        for deferral in batch:
            target_id = deferral.in_flight.callback.target
            (self._cache.mark_queued if deferral.queued else self._cache.mark_held)([target_id])

    async def _record_outcomes(self, batch: Sequence[EndedAttempt]) -> None:
        recorded = await self._ledger.record_outcomes(batch)
        self._unrecorded.difference_update(ended.callback.id for ended in batch)
        self._cache.disabling.difference_update(recorded.gone)
        self._results.publish(recorded.enqueued)
        if recorded.due_in_s is not None:
            await self._requeuer.notify_due(recorded.due_in_s)
