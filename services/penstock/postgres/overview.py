"""Counts for the overview of the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg

from penstock.core.recent_ends import PART_S, Ends
from penstock.postgres.queries import fetch, fetchrow, fetchval


async def now_s(executor: Any) -> float:
    """The database's time, in seconds since 1970.

    Raises:
        PostgresUnavailable: no server.
    """
    return float(await fetchval(executor, "overview.now"))


async def ends(executor: Any, since_s: float, until_s: float) -> list[Ends]:
    """The ends of tasks between two moments, in parts of `PART_S`.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "overview.ends", since_s, float(PART_S), until_s)
    return [Ends(*row) for row in rows]


async def counts(executor: Any, namespaces: Sequence[str] | None, most: int) -> asyncpg.Record:
    """Targets, dead letters, flows and operations that may need an operator.

    Args:
        executor: of the database.
        namespaces: the visible ones; None is all.
        most: nothing is counted further.

    Raises:
        PostgresUnavailable: no server.
    """
    row: asyncpg.Record = await fetchrow(executor, "overview.counts", namespaces, most)
    return row
