"""Backlog counters: reads them, folds changes into them, and recounts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import asyncpg

from penstock.core.task import Priority
from penstock.postgres.connection import translated
from penstock.postgres.queries import execute, fetch, query

# Most rows that one statement reads or changes.
ROWS_PER_STATEMENT = 20_000

# The states that have counters.
STATES = ("ready", "scheduled", "paused", "waiting", "in_flight")


# Type, stage, priority and state.
_Counter: TypeAlias = tuple[str, str, int, str]


class Miscount(NamedTuple):
    """A counter that differs from the number of tasks."""

    type: str
    stage: str
    priority: int
    state: str
    counted: int
    tasks: int


class BacklogPosition(NamedTuple):
    """A position among entries, directly behind one."""

    type: str
    priority: int
    stage: str


@dataclass(frozen=True, slots=True)
class BacklogEntry:
    """How many tasks of one type, priority and stage have not ended.

    Attributes:
        type: name of the type.
        priority: of these tasks, or of the root flow of tasks of a flow.
        stage: of these tasks.
        ready: tasks that can be released.
        scheduled: tasks that are not due.
        paused: paused tasks.
        waiting: tasks that wait for a child or an event.
        in_flight: queued and running tasks.
        oldest_s: seconds since the oldest ready task became ready; None without ready tasks.
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
    def position(self) -> BacklogPosition:
        """The position behind this entry."""
        return BacklogPosition(self.type, int(self.priority), self.stage)


async def entries(
    pool: asyncpg.Pool[asyncpg.Record],
    *,
    type_name: str | None = None,
    among: Sequence[str] | None = None,
    behind: BacklogPosition | None = None,
    limit: int | None = None,
) -> list[BacklogEntry]:
    """Entries that are not empty, by type, priority and stage.

    Args:
        pool: of the database.
        type_name: only entries of this type.
        among: only entries of these types.
        behind: only entries behind this position.
        limit: most entries.

    Raises:
        PostgresUnavailable: no server.
    """
    behind_type, behind_priority, behind_stage = behind or (None, None, None)
    rows = await fetch(
        pool,
        "backlog.entries",
        type=type_name,
        behind_type=behind_type,
        behind_priority=behind_priority,
        behind_stage=behind_stage,
        limit=limit,
        among=among,
    )
    return [BacklogEntry(**{**row, "priority": Priority(row["priority"])}) for row in rows]


async def fold(
    pool: asyncpg.Pool[asyncpg.Record], type_names: Sequence[str], limit: int = ROWS_PER_STATEMENT
) -> tuple[int, bool]:
    """Adds at most `limit` recorded changes of types to their counters.

    Returns:
        The number of changes, and whether any task of these types is in flight.

    Raises:
        PostgresUnavailable: the changes may or may not be folded; the counts are right in both
            cases.
    """
    [row] = await fetch(pool, "backlog.fold", list(type_names), limit)
    return row["changes"], row["in_flight"]


async def delete_empty(pool: asyncpg.Pool[asyncpg.Record], type_names: Sequence[str]) -> None:
    """Deletes counters that are 0, some at a time.

    Raises:
        PostgresUnavailable: the counters may or may not be deleted; the counts are right in both
            cases.
    """
    await execute(pool, "backlog.delete_empty", list(type_names), ROWS_PER_STATEMENT)


async def miscounted(pool: asyncpg.Pool[asyncpg.Record]) -> list[Miscount]:
    """Counters that differ from the number of tasks, by type, stage, priority and state.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction(isolation="repeatable_read"):
            return await _miscounted(connection)


async def recount(pool: asyncpg.Pool[asyncpg.Record], *, rows_per_statement: int = ROWS_PER_STATEMENT) -> int:
    """Corrects the counters while other transactions write; returns how many were wrong.

    Later writes change tasks and counters equally, so a difference in one snapshot stays. It is
    recorded as one more change.

    Raises:
        PostgresUnavailable: the counters may or may not be corrected.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction(isolation="repeatable_read"):
            await connection.execute(query("backlog.lock_recount"))
            wrong = await _miscounted(connection, rows_per_statement)
            for m in wrong:
                await execute(
                    connection,
                    "backlog.correct",
                    type=m.type,
                    stage=m.stage,
                    priority=m.priority,
                    state=m.state,
                    tasks=m.tasks - m.counted,
                )
            return len(wrong)


async def _miscounted(connection: Any, rows_per_statement: int = ROWS_PER_STATEMENT) -> list[Miscount]:
    """Compares in the snapshot of a transaction, by statements of bounded length."""
    counted: Counter[_Counter] = Counter()
    cursor = await connection.cursor(query("backlog.counted"))
    while rows := await cursor.fetch(rows_per_statement):
        for row in rows:
            counted[_counter_of(row)] += row["tasks"]
    tasks: Counter[_Counter] = Counter()
    last_id = 0
    while rows := await connection.fetch(query("backlog.count_tasks"), last_id, rows_per_statement):
        last_id = max(row["last_id"] for row in rows)
        for row in rows:
            if row["state"] is not None:
                tasks[_counter_of(row)] += row["tasks"]
    return [
        Miscount(*counter, counted[counter], tasks[counter])
        for counter in sorted(counted.keys() | tasks.keys())
        if counted[counter] != tasks[counter]
    ]


def _counter_of(row: asyncpg.Record) -> _Counter:
    return row["type"], row["stage"], row["priority"], row["state"]
