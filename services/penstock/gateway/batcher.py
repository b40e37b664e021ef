"""One statement for many requests: what arrives while a statement runs goes into the next.

A single submission at low load is one statement at once; under load the batches grow by themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from penstock.contracts.submission import Submission
from penstock.errors import Unavailable
from penstock.postgres import tasks
from penstock.postgres.connection import lent
from penstock.postgres.tasks import Submitted

# Beyond this a statement gains nothing and delays those behind it.
STATEMENT_TASKS = 1_000

# Statements under way at once: while one waits for another gateway's uncommitted key, others go on.
LANES = 2


@dataclass(frozen=True, slots=True)
class _Request:
    submissions: Sequence[Submission]
    answer: asyncio.Future[list[Submitted]]


class Batcher:
    """Inserts submissions.

    Args:
        pool: of the database.
        connect_s: seconds to wait for a connection.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], connect_s: float) -> None:
        self._pool = pool
        self._connect_s = connect_s
        self._waiting: deque[_Request] = deque()
        self._lanes: set[asyncio.Task[None]] = set()

    async def submit(self, submissions: Sequence[Submission]) -> list[Submitted]:
        """Inserts one request's tasks, all or none, together with those of others; in the order given.

        Raises:
            Throttled: no connection was free in time; nothing was inserted.
            PostgresUnavailable: they may not be there; submitting them again is safe with idempotency keys.
        """
        request = _Request(submissions, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if len(self._lanes) < LANES:
            lane = asyncio.create_task(self._work())
            self._lanes.add(lane)
            lane.add_done_callback(self._lanes.discard)
        return await request.answer

    async def _work(self) -> None:
        # Requests that are ready to run now come first, so that a burst becomes one statement.
        await asyncio.sleep(0)
        while self._waiting:
            await self._insert(self._next_batch())

    def _next_batch(self) -> list[_Request]:
        batch = [self._waiting.popleft()]
        size = len(batch[0].submissions)
        while self._waiting and size + len(self._waiting[0].submissions) <= STATEMENT_TASKS:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].submissions)
        return batch

    async def _insert(self, batch: Sequence[_Request]) -> None:
        together = [submission for request in batch for submission in request.submissions]
        try:
            async with lent(self._pool, self._connect_s) as connection:
                submitted = await tasks.submit(connection, together)
        except Unavailable as error:
            for request in batch:
                _settle(request, error)
        except Exception as error:  # noqa: BLE001 (handed to whoever asked)
            if len(batch) == 1:
                _settle(batch[0], error)
                return
            # What the database will not take must cost its own request alone.
            for request in batch:
                await self._insert([request])
        else:
            position = 0
            for request in batch:
                end = position + len(request.submissions)
                _settle(request, submitted[position:end])
                position = end


def _settle(request: _Request, outcome: list[Submitted] | Exception) -> None:
    # The client may have gone, and its handler with it.
    if request.answer.done():
        return
    if isinstance(outcome, Exception):
        request.answer.set_exception(outcome)
    else:
        request.answer.set_result(outcome)
