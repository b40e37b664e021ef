"""What PostgreSQL knows of why a task is waiting: the facts, without those of Kafka."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock.core.order import Head, level_of
from penstock.core.task import State
from penstock.core.why import COUNTED, Ahead, Facts
from penstock.errors import NotFound
from penstock.postgres.connection import translated
from penstock.postgres.queries import query

# Of more keys than these, some take turns also where the others go by id: `penstock.task_sync.limits`.
KEYS_IN_ORDER = 255


@dataclass(frozen=True, slots=True)
class Known:
    """The facts, and where to ask Kafka.

    Attributes:
        type: name of the task's type.
        partitions: of its ready topic.
        facts: all but `readers`.
    """

    type: str
    partitions: int
    facts: Facts


async def facts(pool: asyncpg.Pool[asyncpg.Record], task_id: int) -> Known:
    """What is known of one task.

    Raises:
        NotFound: no task has this id.
        PostgresUnavailable: no server.
    """
    with translated():
        row = await pool.fetchrow(query("why.facts"), task_id)
        if row is None:
            raise NotFound(f"there is no task {task_id}")
        ahead = await _ahead(pool, row) if row["state"] == State.READY else None
    limited = row["key_limit"] is not None
    found = Facts(
        now=row["now"],
        state=State(row["state"]),
        since=row["finished_at"] or row["updated_at"],
        attempt=row["attempt"],
        due_at=row["due_at"],
        pausing=row["pausing"],
        worker=row["worker"],
        lease_s=row["lease_ms"] / 1000,
        type_paused=row["type_paused"],
        # See `types.owners`.
        owner=row["session"] and row["session"].rpartition(" ")[2],
        noted=row["noted"],
        key=(row["key"] or None) if row["keyed"] else None,
        key_paused=bool(row["key_paused"]),
        key_in_flight=row["key_in_flight"] if limited else None,
        key_limit=row["key_limit"],
        in_flight=row["in_flight"] if row["max_in_flight"] is not None else None,
        max_in_flight=row["max_in_flight"],
        starts_per_s=row["starts_per_s"],
        ahead=ahead,
    )
    return Known(row["type"], row["partitions"], found)


async def _ahead(pool: Any, row: asyncpg.Record) -> Ahead:
    """How many are released before a ready task, by the order that its type goes by."""
    if row["keyed"]:
        return await (_in_turns(pool, row) if row["fair"] else _by_key(pool, row))
    if row["ageing_s"] is None and not row["finish_first"]:
        return await _in_line(pool, row, row["priority"])
    waited_s = (row["now"] - row["created_at"]).total_seconds()
    begun = row["step"] > 0 and row["tracked"]
    level = level_of(Head(row["id"], row["priority"], waited_s, begun), row["ageing_s"])
    options = (row["ageing_s"], row["finish_first"], begun)
    return _counted(
        await pool.fetchval(query("why.ahead_in_order"), row["type"], level, row["id"], COUNTED + 1, *options)
    )


async def _in_line(pool: Any, row: asyncpg.Record, level: int) -> Ahead:
    return _counted(await pool.fetchval(query("why.ahead"), row["type"], level, row["id"], COUNTED + 1))


async def _by_key(pool: Any, row: asyncpg.Record, task_id: int | None = None) -> Ahead:
    """Of all levels up to its own; with `task_id` 0 only of those above its own."""
    before = row["id"] if task_id is None else task_id
    found = await pool.fetchrow(
        query("why.ahead_by_key"), row["type"], row["priority"], before, COUNTED + 1, row["key"]
    )
    return Ahead(
        min(found["tasks"], COUNTED), more=found["looked"] > COUNTED, about=found["keys"] > KEYS_IN_ORDER
    )


async def _in_turns(pool: Any, row: asyncpg.Record) -> Ahead:
    above = await _by_key(pool, row, 0)
    beside = await pool.fetchval(
        query("why.ahead_in_turns"),
        row["type"],
        row["priority"],
        row["id"],
        COUNTED + 1,
        row["key"],
        row["weight"],
    )
    tasks = above.tasks + beside
    return Ahead(min(tasks, COUNTED), more=above.more or tasks > COUNTED, about=True)


def _counted(tasks: int) -> Ahead:
    return Ahead(min(tasks, COUNTED), more=tasks > COUNTED)
