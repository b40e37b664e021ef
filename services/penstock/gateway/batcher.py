"""Inserts submissions of concurrent requests with shared statements (micro-batching)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import asyncpg

from penstock.concurrency.batcher import Batcher
from penstock.concurrency.cancellation import own_cancellation
from penstock.errors import LockConflict, PostgresUnavailable, Throttled, Unavailable, ValueRefused
from penstock.postgres.connection import acquired_connection, translated
from penstock.postgres.halving import in_halves
from penstock.postgres.queries import execute

# A larger statement is no faster, and delays the requests behind it.
ROWS_PER_STATEMENT = 1_000

# Concurrent statements. While one waits for an idempotency key that another gateway has not
# committed, the other one continues.
CONCURRENT_STATEMENTS = 2


S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _SubmitRequest(Generic[S, R]):
    submissions: Sequence[S]
    answer: asyncio.Future[list[R | ValueRefused]]


class SubmissionBatcher(Generic[S, R]):
    """Inserts submissions.

    Args:
        pool: the database.
        connect_s: seconds to wait for a connection.
        insert: inserts submissions by a connection, all of them or none; returns what each became.
    """

    def __init__(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        connect_s: float,
        insert: Callable[[Any, Sequence[S]], Awaitable[Sequence[R]]],
    ) -> None:
        self._pool = pool
        self._connect_s = connect_s
        self._insert_rows = insert
        self._requests: Batcher[_SubmitRequest[S, R]] = Batcher(
            self._insert,
            max_size=ROWS_PER_STATEMENT,
            size_of=lambda request: len(request.submissions),
            writers=CONCURRENT_STATEMENTS,
        )

    async def submit(self, submissions: Sequence[S]) -> list[R | ValueRefused]:
        """Inserts the submissions of one request, and returns what each became.

        A submission with a value that PostgreSQL cannot store is replaced by the refusal.

        Raises:
            Throttled: no connection was free in time, or another transaction has changed a task
                with one of their idempotency keys and has not ended; nothing was inserted.
            PostgresUnavailable: they may be inserted or not; submitting them again is safe with
                idempotency keys.
        """
        request: _SubmitRequest[S, R] = _SubmitRequest(
            submissions, asyncio.get_running_loop().create_future()
        )
        self._requests.add(request)
        return await request.answer

    async def _insert(self, requests: Sequence[_SubmitRequest[S, R]], *, briefly: bool = False) -> None:
        submissions = [submission for request in requests for submission in request.submissions]
        try:
            with own_cancellation(lambda: PostgresUnavailable("the connection has closed itself")):
                async with acquired_connection(self._pool, self._connect_s) as connection:
                    submitted = await self._insert_each(connection, submissions, briefly=briefly)
        except LockConflict as error:
            locked = Throttled(f"another transaction locks what this submission needs ({error})")
            await self._divide(requests, locked)
        except Unavailable as error:
            for request in requests:
                _answer(request, error)
        except Exception as error:  # noqa: BLE001 (raised by `submit`)
            await self._divide(requests, error)
        else:
            position = 0
            for request in requests:
                end = position + len(request.submissions)
                _answer(request, submitted[position:end])
                position = end

    async def _divide(self, requests: Sequence[_SubmitRequest[S, R]], error: Exception) -> None:
        """Inserts halves until the request at fault is alone: it must not fail or delay others."""
        if len(requests) == 1:
            _answer(requests[0], error)
            return
        middle = len(requests) // 2
        await self._insert(requests[:middle], briefly=True)
        await self._insert(requests[middle:], briefly=True)

    async def _insert_each(
        self, connection: Any, submissions: Sequence[S], *, briefly: bool
    ) -> list[R | ValueRefused]:
        """Inserts submissions; returns what each became, or why PostgreSQL refuses it.

        An error leaves none of them inserted: parts are savepoints of one transaction. Otherwise a
        part without idempotency keys would be inserted again with the rest.
        """
        if not briefly:
            with suppress(ValueRefused):
                return [*await self._insert_rows(connection, submissions)]

        async def insert(part: Sequence[S]) -> Sequence[R]:
            async with connection.transaction():
                return await self._insert_rows(connection, part)

        with translated():
            async with connection.transaction():
                await execute(connection, "tasks.wait_briefly")
                parts = await in_halves(submissions, insert)
        return [
            outcome
            for _part, answer in parts
            for outcome in ([answer] if isinstance(answer, ValueRefused) else answer)
        ]


def _answer(request: _SubmitRequest[S, R], outcome: list[R | ValueRefused] | Exception) -> None:
    # The handler was cancelled when its client disconnected.
    if request.answer.done():
        return
    if isinstance(outcome, Exception):
        request.answer.set_exception(outcome)
    else:
        request.answer.set_result(outcome)
