"""Ends tasks whose ready records Kafka refuses: no worker can ever receive them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import asyncpg

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.result import Failure
from penstock.core.completion import Fence, Outcome, conclude
from penstock.postgres.advance import advance, retry_states
from penstock.postgres.ending import Ending

log = logging.getLogger(__name__)


class RefusedTasks:
    """Fails tasks for good; they can be recovered like any failed task.

    Args:
        pool: of the database.
        source: of CloudEvents (see `penstock.settings.Platform`).
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], source: str) -> None:
        self._pool = pool
        self._source = source

    async def fail(self, refused: Mapping[Fence, str]) -> None:
        """Fails the attempts that are current; the sweeper and the requeuer publish what follows.

        Args:
            refused: Kafka's reason for each attempt.
        """
        for fence, why in refused.items():
            log.error(
                "Kafka refuses the ready record of a task; the task fails",
                extra={"event": "ready_record_refused", **fence.ids(), "error": why},
            )
        await retry_until_available(lambda: self._fail(refused), waiting_for="failure of refused tasks")

    async def _fail(self, refused: Mapping[Fence, str]) -> None:
        states = await retry_states(self._pool, [fence.id for fence in refused])
        endings = [
            Ending(
                fence=fence,
                outcome=Outcome.FAIL,
                conclusion=conclude(fence, Outcome.FAIL, permanent=True, counts=states[fence.id].counts),
                worker=None,
                error=Failure(kind="RecordRefused", message=f"Kafka refuses its ready record: {why}"),
            )
            for fence, why in refused.items()
            if fence.id in states
        ]
        if endings:
            await advance(self._pool, endings, source=self._source)
