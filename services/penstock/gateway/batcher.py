"""Inserts submissions of concurrent requests with shared statements (micro-batching)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock.concurrency.batcher import Batcher
from penstock.contracts.submission import Submission
from penstock.errors import Unavailable, ValueRefused
from penstock.postgres import tasks
from penstock.postgres.connection import acquired_connection
from penstock.postgres.halving import in_halves
from penstock.postgres.tasks import Submitted

# A larger statement is no faster, and delays the requests behind it.
TASKS_PER_STATEMENT = 1_000

# Concurrent statements. While one waits for an idempotency key that another gateway has not
# committed, the other one continues.
CONCURRENT_STATEMENTS = 2


@dataclass(frozen=True, slots=True)
class _SubmitRequest:
    submissions: Sequence[Submission]
    answer: asyncio.Future[list[Submitted | ValueRefused]]


class SubmissionBatcher:
    """Inserts submissions.

    Args:
        pool: the database.
        connect_s: seconds to wait for a connection.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], connect_s: float) -> None:
        self._pool = pool
        self._connect_s = connect_s
        self._requests: Batcher[_SubmitRequest] = Batcher(
            self._insert,
            max_size=TASKS_PER_STATEMENT,
            size_of=lambda request: len(request.submissions),
            writers=CONCURRENT_STATEMENTS,
        )

    async def submit(self, submissions: Sequence[Submission]) -> list[Submitted | ValueRefused]:
        """Inserts the tasks of one request, and returns them in their order.

        A submission with a value that PostgreSQL cannot store is replaced by the refusal.

        Raises:
            Throttled: no connection was free in time; no task was inserted.
            PostgresUnavailable: the tasks may be inserted or not; submitting them again is safe
                with idempotency keys.
        """
        request = _SubmitRequest(submissions, asyncio.get_running_loop().create_future())
        self._requests.add(request)
        return await request.answer

    async def _insert(self, requests: Sequence[_SubmitRequest]) -> None:
        submissions = [submission for request in requests for submission in request.submissions]
        try:
            async with acquired_connection(self._pool, self._connect_s) as connection:
                submitted = await _insert_each(connection, submissions)
        except Unavailable as error:
            for request in requests:
                _answer(request, error)
        except Exception as error:  # noqa: BLE001 (raised by `submit`)
            if len(requests) == 1:
                _answer(requests[0], error)
                return
            # One invalid request must not fail the other requests of its statement.
            for request in requests:
                await self._insert([request])
        else:
            position = 0
            for request in requests:
                end = position + len(request.submissions)
                _answer(request, submitted[position:end])
                position = end


async def _insert_each(connection: Any, submissions: Sequence[Submission]) -> list[Submitted | ValueRefused]:
    """Inserts submissions; returns the task of each, or why PostgreSQL refuses it."""
    parts = await in_halves(submissions, lambda part: tasks.submit(connection, part))
    return [
        outcome
        for _part, answer in parts
        for outcome in ([answer] if isinstance(answer, ValueRefused) else answer)
    ]


def _answer(request: _SubmitRequest, outcome: list[Submitted | ValueRefused] | Exception) -> None:
    # The handler was cancelled when its client disconnected.
    if request.answer.done():
        return
    if isinstance(outcome, Exception):
        request.answer.set_exception(outcome)
    else:
        request.answer.set_result(outcome)
