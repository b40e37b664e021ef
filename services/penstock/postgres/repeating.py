"""Statements and transactions that a deadlock, a serialization failure or an id ended are repeated.

All statements lock the rows of a table in the order of their keys, or skip locked rows, so a
deadlock with another service should not occur. One with an operator's transaction still may. It had
no effect, and must not end a service.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncpg

from penstock.core.retry import Backoff

log = logging.getLogger(__name__)

# PostgreSQL has waited for a second already when it reports a deadlock.
BACKOFF = Backoff(base_s=0.01, factor=2, max_s=0.5, jitter=0.5)
ATTEMPTS = 12
# Keys whose values `advance_ids` gives. It moves a sequence beyond the ids of the last millisecond.
# Many sessions that take more of them in the moment of the move may meet.
IDS = frozenset({"task_pkey", "flow_pkey", "outbox_pkey", "release_pkey"})

R = TypeVar("R")


async def repeated(work: Callable[[], Awaitable[R]]) -> R:
    """Calls `work`, a statement or transaction, again after a failure that it is not the cause of.

    Raises:
        asyncpg.TransactionRollbackError: all attempts failed.
        asyncpg.UniqueViolationError: likewise, or a key is not one that the database gives.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await work()
        except (asyncpg.TransactionRollbackError, asyncpg.UniqueViolationError) as error:
            given_twice = getattr(error, "constraint_name", None) in IDS
            if attempt == ATTEMPTS or (isinstance(error, asyncpg.UniqueViolationError) and not given_twice):
                raise
            log.warning(
                "PostgreSQL ended a transaction because of another one; it is repeated",
                extra={"event": "transaction_repeated", "error": str(error)},
            )
        await asyncio.sleep(BACKOFF.delay_s(attempt, random.random()))  # noqa: S311 (jitter, no secret)


class RepeatingConnection(asyncpg.Connection):
    """A connection that repeats single statements; the caller repeats whole transactions."""

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109 (the driver's signature)
        """As the driver's method."""
        execute = super().execute
        return await self._repeated(lambda: execute(query, *args, timeout=timeout))

    async def fetch(
        self,
        query: str,
        *args: Any,
        timeout: float | None = None,  # noqa: ASYNC109 (the driver's signature)
        record_class: Any = None,
    ) -> list[Any]:
        """As the driver's method."""
        fetch = super().fetch
        return await self._repeated(lambda: fetch(query, *args, timeout=timeout, record_class=record_class))

    async def fetchrow(
        self,
        query: str,
        *args: Any,
        timeout: float | None = None,  # noqa: ASYNC109 (the driver's signature)
        record_class: Any = None,
    ) -> Any:
        """As the driver's method."""
        fetchrow = super().fetchrow
        return await self._repeated(
            lambda: fetchrow(query, *args, timeout=timeout, record_class=record_class)
        )

    async def fetchval(
        self,
        query: str,
        *args: Any,
        column: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 (the driver's signature)
    ) -> Any:
        """As the driver's method."""
        fetchval = super().fetchval
        return await self._repeated(lambda: fetchval(query, *args, column=column, timeout=timeout))

    async def _repeated(self, statement: Callable[[], Awaitable[R]]) -> R:
        return await (statement() if self.is_in_transaction() else repeated(statement))


async def transacted(pool: asyncpg.Pool[asyncpg.Record], work: Callable[[Any], Awaitable[R]]) -> R:
    """Runs `work` with a connection in a transaction, and repeats both after a deadlock.

    Args:
        pool: of the database.
        work: safe to repeat: it has no effect but on the connection.

    Raises:
        asyncpg.TransactionRollbackError: all attempts failed.
    """

    async def attempt() -> R:
        async with pool.acquire() as connection, connection.transaction():
            return await work(connection)

    return await repeated(attempt)
