"""The audit of requests, as rows."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import asyncpg

from penstock.postgres.connection import translated
from penstock.postgres.queries import query

# At, actor, route, path, status and remote address.
Entry = tuple[datetime, str, str, str, int, str | None]


async def write(executor: Any, entries: Iterable[Entry]) -> None:
    """Writes requests down, in one statement.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    columns = [list(column) for column in zip(*entries, strict=True)]
    with translated():
        await executor.execute(query("audit.write"), *columns)


async def prune(executor: Any, days: int, *, most: int) -> int:
    """Removes at most `most` of those older than so many days; returns how many.

    Raises:
        PostgresUnavailable: perhaps nothing was removed.
    """
    with translated():
        return int(await executor.fetchval(query("audit.prune"), days, most))


async def find(
    executor: Any, *, before: int | None = None, actor: str | None = None, limit: int = 50
) -> list[asyncpg.Record]:
    """Requests, latest first; give the last `seq` of a page as `before` to get the next one.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(query("audit.list"), before, actor, limit)
    return rows
