"""Runs one named statement, and translates the errors of asyncpg.

The executor is a pool, or a connection whose transaction the statement joins. Each function raises
`PostgresUnavailable` when the server does not answer; then the statement took effect or not.
"""

from __future__ import annotations

from typing import Any

from penstock.postgres.connection import translated
from penstock.postgres.queries import query


async def fetch(executor: Any, name: str, *arguments: Any) -> list[Any]:
    """Its rows."""
    with translated():
        rows: list[Any] = await executor.fetch(query(name), *arguments)
    return rows


async def fetchrow(executor: Any, name: str, *arguments: Any) -> Any:
    """Its first row; None without any."""
    with translated():
        return await executor.fetchrow(query(name), *arguments)


async def fetchval(executor: Any, name: str, *arguments: Any) -> Any:
    """The first column of its first row; None without any."""
    with translated():
        return await executor.fetchval(query(name), *arguments)


async def execute(executor: Any, name: str, *arguments: Any) -> None:
    """Runs it without an answer."""
    with translated():
        await executor.execute(query(name), *arguments)
