"""Rows of the audit of requests."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import asyncpg

from penstock.postgres.columns import LISTS
from penstock.postgres.queries import execute, fetch, fetchval

# Time, actor, route, path, status, remote address, and the JSON text of what was changed.
Entry = tuple[datetime, str, str, str, int, str | None, str | None]


async def write(executor: Any, entries: Iterable[Entry]) -> None:
    """Inserts entries with one statement.

    Raises:
        PostgresUnavailable: the entries may be inserted or not.
    """
    columns = map(list, zip(*entries, strict=True))
    await execute(executor, "audit.write", **dict(zip(LISTS["audit_entry"], columns, strict=True)))


async def prune(executor: Any, days: int, *, limit: int) -> int:
    """Removes at most `limit` rows that are older than `days`; returns their number.

    Raises:
        PostgresUnavailable: the rows may be removed or not.
    """
    return int(await fetchval(executor, "audit.prune", days, limit))


async def find(
    executor: Any, *, before: int | None = None, actor: str | None = None, limit: int = 50
) -> list[asyncpg.Record]:
    """Entries, the latest first; the last `seq` of a page is `before` of the next page.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return await fetch(executor, "audit.list", before, actor, limit)
