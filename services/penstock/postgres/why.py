"""Reads the facts that explain why a task is waiting, except those from Kafka."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.contracts.result import traceback_end
from penstock.core.attempt import AttemptId, count_of
from penstock.core.release_order import START, Head, Position, level_of, position_in
from penstock.core.task import Priority, State
from penstock.core.why import COUNTED, Ahead, Facts, FlowPriority
from penstock.errors import NotFound
from penstock.postgres.queries import fetch, fetchrow, fetchval

# With more keys than this, the release goes round the keys page by page, and the order by id is
# only approximate (`penstock.task_sync.key_scan`).
MAX_KEYS_BY_ID = 255


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """The facts about a task, and the ready topic to look up in Kafka.

    Attributes:
        type: name of the task's type.
        partitions: of its ready topic.
        attempt_id: its current attempt.
        facts: every fact but `group`.
    """

    type: str
    partitions: int
    attempt_id: AttemptId
    facts: Facts


async def facts(pool: asyncpg.Pool[asyncpg.Record], task_id: int) -> TaskFacts:
    """Reads the facts about one task.

    Raises:
        NotFound: no task has this id.
        PostgresUnavailable: no server.
    """
    row = await fetchrow(pool, "why.facts", task_id)
    if row is None:
        raise NotFound(f"there is no task {task_id}")
    ahead = await _ahead(pool, row) if row["state"] == State.READY else None
    limited = row["key_limit"] is not None
    failure = orjson.loads(row["error"]) if row["error"] else {}
    found = Facts(
        now=row["now"],
        state=State(row["state"]),
        since=row["finished_at"] or row["updated_at"],
        stage=row["stage"],
        attempt=count_of(row["attempt"]),
        due_at=row["due_at"],
        error=f"{failure['kind']}: {failure['message']}" if failure else None,
        traceback=traceback_end(failure["traceback"]) if "traceback" in failure else None,
        log=AttemptId(row["id"], *row["failed"]).log_path if row["failed"] else None,
        unhandled=failure.get("message") if "unhandled_s" in failure else None,
        unhandled_s=failure.get("unhandled_s", 0.0),
        no_handler_s=row["no_handler_s"],
        pausing=row["pausing"],
        worker=row["worker"],
        lease_s=row["lease_ms"] / 1000,
        waits_for=row["waits_for"],
        type_paused=row["type_paused"],
        # See `types.owners`.
        owner=row["session"] and row["session"].rpartition(" ")[2],
        noted=row["noted"],
        concurrency_key=(row["key"] or None) if row["keyed"] else None,
        key_paused=bool(row["key_paused"]),
        key_in_flight=row["key_in_flight"] if limited else None,
        key_limit=row["key_limit"],
        in_flight=row["in_flight"] if row["max_in_flight"] is not None else None,
        max_in_flight=row["max_in_flight"],
        starts_per_s=row["starts_per_s"],
        ahead=ahead,
        unrun=row["unrun"],
        flow=FlowPriority(row["flow_id"], row["flow_root_id"], Priority(row["level"]), row["root_is_task"])
        if row["flow_id"] is not None
        else None,
    )
    attempt_id = AttemptId(row["id"], row["step"], row["attempt"])
    return TaskFacts(row["type"], row["partitions"], attempt_id, found)


async def _ahead(pool: Any, row: asyncpg.Record) -> Ahead:
    """How many tasks are released before a ready task, by the order of release of its type."""
    waited_s = (row["now"] - row["waits_since"]).total_seconds()
    begun = row["step"] > 0 and row["tracked"]
    _, *place = position_in(row)
    level = level_of(Head(tuple(place), row["level"], waited_s, begun), row["ageing_s"])
    position = (level, *place)
    if row["keyed"]:
        return await (_by_round_robin if row["fair"] else _by_key)(pool, row, position)
    if row["ageing_s"] is None and not row["finish_first"]:
        return _counted(await fetchval(pool, "why.ahead", row["type"], position, COUNTED + 1))
    ahead = await fetchval(
        pool,
        "why.ahead_in_order",
        type=row["type"],
        position=position,
        limit=COUNTED + 1,
        ageing_s=row["ageing_s"],
        finish_first=row["finish_first"],
        begun=begun,
    )
    return _counted(ahead)


async def _before(pool: Any, row: asyncpg.Record, position: Position) -> asyncpg.Record:
    """Counts tasks before a position, whose level is the effective one."""
    [counted] = await fetch(
        pool,
        "why.ahead_by_key",
        type=row["type"],
        position=position,
        limit=COUNTED + 1,
        key=row["key"],
        ageing_s=row["ageing_s"],
    )
    return counted


async def _by_key(pool: Any, row: asyncpg.Record, position: Position) -> Ahead:
    counted = await _before(pool, row, position)
    return Ahead(
        min(counted["tasks"], COUNTED),
        more=counted["examined"] > COUNTED,
        # With ageing, keys of tasks that are not before it count for a page, too.
        about=counted["keys"] > MAX_KEYS_BY_ID or row["ageing_s"] is not None,
    )


async def _by_round_robin(pool: Any, row: asyncpg.Record, position: Position) -> Ahead:
    level, ageing_s = position[0], row["ageing_s"]
    above = await _before(pool, row, (level, *START[1:]))
    [same_level] = await fetch(
        pool,
        "why.ahead_by_round_robin",
        type=row["type"],
        position=position,
        levels=[level] if ageing_s is None else list(range(level, len(Priority))),
        above=0 if ageing_s is None else above["examined"],
        limit=COUNTED + 1,
        key=row["key"],
        weight=row["weight"],
        ageing_s=ageing_s,
    )
    tasks = above["tasks"] + same_level["tasks"]
    more = above["examined"] > COUNTED or same_level["more"] or tasks > COUNTED
    return Ahead(min(tasks, COUNTED), more=more, about=True)


def _counted(tasks: int) -> Ahead:
    return Ahead(min(tasks, COUNTED), more=tasks > COUNTED)
