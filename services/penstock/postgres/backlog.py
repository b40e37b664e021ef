"""The maintained counters of what waits: read, folded, and counted anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import asyncpg

from penstock.core.task import Priority
from penstock.postgres.connection import translated
from penstock.postgres.queries import query

# Under which tasks are counted.
STATES = ("ready", "scheduled", "paused", "waiting", "in_flight")


class Place(NamedTuple):
    """Behind a line, in their order."""

    type: str
    priority: int
    stage: str


@dataclass(frozen=True, slots=True)
class Line:
    """The tasks of one type, priority and stage that have not ended.

    Attributes:
        type: name of the type.
        priority: of all of them.
        stage: likewise.
        ready: how many wait at the gate.
        scheduled: how many wait until they are due.
        paused: how many wait for somebody to resume them.
        waiting: how many wait for a child or an event.
        in_flight: how many are queued or running.
        oldest_s: for how long the first of the ready ones has been so, at this priority; None where none is.
    """

    type: str
    priority: Priority
    stage: str
    ready: int
    scheduled: int
    paused: int
    waiting: int
    in_flight: int
    oldest_s: float | None

    @property
    def place(self) -> Place:
        """Where the next one is."""
        return Place(self.type, int(self.priority), self.stage)


async def lines(
    pool: asyncpg.Pool[asyncpg.Record],
    *,
    type_name: str | None = None,
    among: Sequence[str] | None = None,
    behind: Place | None = None,
    limit: int | None = None,
) -> list[Line]:
    """The lines in which there is something, by type, priority and stage.

    Args:
        pool: of the database.
        type_name: only of this type.
        among: only of these types.
        behind: from the next one on.
        limit: at most so many.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await pool.fetch(
            query("backlog.lines"), type_name, *(behind or (None, None, None)), limit, among
        )
    return [Line(**{**row, "priority": Priority(row["priority"])}) for row in rows]


async def fold(pool: asyncpg.Pool[asyncpg.Record], type_names: Sequence[str]) -> tuple[int, bool]:
    """Takes the changes of some types into their counters.

    Returns:
        How many there were, and whether anything of these types is in flight.

    Raises:
        PostgresUnavailable: perhaps nothing was changed; what is counted is right either way.
    """
    with translated():
        [row] = await pool.fetch(query("backlog.fold"), list(type_names))
    return row["changes"], row["in_flight"]


async def sweep(pool: asyncpg.Pool[asyncpg.Record], type_names: Sequence[str]) -> None:
    """Removes the counters of stages in which nothing is.

    Raises:
        PostgresUnavailable: perhaps nothing was changed; what is counted is right either way.
    """
    with translated():
        await pool.execute(query("backlog.sweep"), list(type_names))


async def recount(pool: asyncpg.Pool[asyncpg.Record]) -> int:
    """Makes the counters what the tasks are, while all go on; how many were wrong.

    Raises:
        PostgresUnavailable: perhaps nothing was changed.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute(query("backlog.recount_alone"))
            return int(await connection.fetchval(query("backlog.recount")))
