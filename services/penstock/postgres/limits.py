"""Releases tasks of types with limits or keys, through the session that owns the type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import asyncpg

from penstock.contracts.task_type import TaskType
from penstock.core.fair_queueing import KeyQueue
from penstock.core.release_order import Head, Position, position_in
from penstock.postgres.release import Batch, Released, ready_of
from penstock.postgres.session import Session


def behind(row: asyncpg.Record) -> Position | None:
    """The position behind the last examined task; None when that was the last one."""
    return None if row["id"] is None else position_in(row)


# The room of a key without a limit.
UNLIMITED = 2**31


class TypeVersion(NamedTuple):
    """The version of a type's row.

    Attributes:
        version: every change of the row replaces it.
        keyed: the type is released by concurrency key.
    """

    version: str
    keyed: bool


async def versions(session: Session) -> dict[str, TypeVersion]:
    """The version of each registered type, by name."""
    rows = await session.fetch("limits.versions")
    return {row["name"]: TypeVersion(row["version"], row["keyed"]) for row in rows}


async def track(session: Session, type_name: str, limit: int, *, begun: bool) -> tuple[int, int]:
    """Tracks tasks in flight that were released while the type had no limits.

    Args:
        session: the owner of the type.
        type_name: the type.
        limit: most tasks.
        begun: also track delayed and paused tasks of later stages.

    Returns:
        The number of untracked tasks found (0 when all are tracked), and how many of them are
        tracked now. Other transactions lock the rest.
    """
    [row] = await session.fetch("limits.track", type_name, begun, limit)
    return row["found"], row["done"]


async def track_ready(session: Session, type_name: str, position: Position, limit: int) -> Position | None:
    """Tracks ready tasks of later stages, among the next `limit` ready tasks.

    Returns:
        The position to continue from: the same one when another transaction locks some of the
        tasks, None at the end.
    """
    [row] = await session.fetch("limits.track_ready", type_name, position, limit)
    if row["done"] < row["found"]:
        return position
    return behind(row)


async def in_flight(session: Session, type_name: str, limit: int) -> int:
    """How many tracked tasks of a type are queued or running, counted up to `limit`."""
    return int(await session.fetchval("limits.in_flight", type_name, limit))


async def set_empty_keys(
    session: Session, type_name: str, position: Position, limit: int
) -> tuple[Position | None, int]:
    """Sets the empty key on ready tasks without a key, among the next `limit`.

    Key queues leave out tasks without a key.

    Returns:
        The position to continue from, None at the end; and how many tasks without a key other
        transactions lock.
    """
    [row] = await session.fetch("limits.set_empty_keys", type_name, position, limit)
    return behind(row), row["locked"]


async def heads(
    session: Session, task_type: TaskType, limit: int, excluded: Sequence[int] = ()
) -> list[Head]:
    """The first `limit` tasks of each level; with `finish_first` also of those that have begun.

    Args:
        session: the owner of the type.
        task_type: the type.
        limit: most tasks of a level.
        excluded: tasks that are left out.
    """
    rows = await session.fetch(
        "limits.heads",
        type=task_type.name,
        limit=limit,
        finish_first=task_type.finish_first,
        excluded=list(excluded),
    )
    return [Head(position_in(row)[1:], row["level"], row["waited_s"], begun=row["begun"]) for row in rows]


@dataclass(frozen=True, slots=True)
class PageSize:
    """Bounds of a page of key queues.

    Attributes:
        waits_s: levels, with the seconds that tasks must have waited; see `release_order.waits_s`.
        tasks: most tasks that will be selected from it.
        keys: most concurrency keys.
        excluded: tasks that are left out.
    """

    waits_s: Mapping[int, float]
    tasks: int
    keys: int
    excluded: Sequence[int] = ()


async def key_queues(
    session: Session, task_type: TaskType, size: PageSize, first: str, end: str | None = None
) -> list[KeyQueue]:
    """The queues of some levels, merged, ordered by concurrency key, including keys without room.

    Args:
        session: the owner of the type.
        task_type: the type; its tasks are tracked.
        size: bounds of the page.
        first: smallest key of the page.
        end: the page ends before this key; None is no bound.
    """
    rows = await session.fetch(
        "limits.key_queues",
        type=task_type.name,
        levels=list(size.waits_s),
        waits_s=list(size.waits_s.values()),
        first=first,
        end=end,
        keys=size.keys,
        max_per_key=task_type.max_per_key,
        tasks=size.tasks,
        excluded=list(size.excluded),
    )
    return [
        KeyQueue(
            concurrency_key=row["key"],
            ids=[place[-1] for place in row["places"] or ()],
            room=UNLIMITED if row["room"] is None else row["room"],
            weight=row["weight"],
            more=len(row["places"] or ()) == row["depth"],
            places=list(map(tuple, row["places"] or ())),
        )
        for row in rows
    ]


async def release_selected(
    session: Session,
    task_type: TaskType,
    levels: Mapping[int, int],
    take_confirmed: Callable[[], list[int]],
    version: str,
) -> Released:
    """Releases those of the selected tasks that are still ready and that no transaction locks.

    Args:
        session: the owner of the type.
        task_type: the type of the tasks.
        levels: the tasks by id, in order of release, with their effective levels; workers keep this
            order by them.
        take_confirmed: returns the batches that Kafka has; their rows in `release` are deleted.
        version: of the type as it was loaded; if it has changed since, all tasks count as locked.
    """
    rows = await session.fetch(
        "limits.release_selected",
        type=task_type.name,
        ids=list(levels),
        confirmed=take_confirmed(),
        version=version,
    )
    order = {task_id: number for number, task_id in enumerate(levels)}
    rows.sort(key=lambda row: order[row["id"]])
    released = {row["id"] for row in rows}
    locked = [task_id for task_id in levels if task_id not in released]
    if not rows:
        return Released(None, locked)
    return Released(Batch(rows[0]["release_id"], [ready_of(task_type, row, levels) for row in rows]), locked)
