"""Choosing what is released of types with limits or keys, through the session that owns the type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.choosing import Line
from penstock.core.order import Head
from penstock.postgres.release import Batch, ready_of
from penstock.postgres.session import Session
from penstock.postgres.types import TaskType


class Place(NamedTuple):
    """Behind a task in the line of what is ready."""

    priority: int = -1
    id: int = 0


# Of a key without a limit.
UNLIMITED = 2**31


async def keyed(session: Session) -> frozenset[str]:
    """Names of the types that are released key by key."""
    return frozenset([row["name"] for row in await session.fetch("limits.keyed")])


async def track(session: Session, type_name: str, limit: int, *, begun: bool) -> tuple[int, int]:
    """Makes what is in flight count that was released while the type had no limits.

    Args:
        session: the one that owns the type.
        type_name: which.
        limit: most tasks.
        begun: so does what is delayed or paused and in a later stage.

    Returns:
        How many did not count before, 0 when all do now, and how many of these do now: some may be held by others.
    """
    [row] = await session.fetch("limits.track", type_name, begun, limit)
    return row["found"], row["done"]


async def track_ready(session: Session, type_name: str, place: Place, limit: int) -> Place | None:
    """Makes known what is ready and in a later stage, among the next `limit` of the line; where to go on, None is nowhere.

    What others hold is looked at again: the place is the same then.
    """
    [row] = await session.fetch("limits.track_ready", type_name, *place, limit)
    if row["done"] < row["found"]:
        return place
    return None if row["id"] is None else Place(row["priority"], row["id"])


async def in_flight(session: Session, type_name: str) -> int:
    """How many tasks are queued or running, of a type whose tasks are tracked."""
    return int(await session.fetchval("limits.in_flight", type_name))


async def adopt(session: Session, type_name: str, place: Place, limit: int) -> Place | None:
    """Gives ready tasks without a key, which no line of a key would have, the empty one.

    Among the next `limit` behind a place in the line of all; returns where to go on, None when it ends there.
    """
    rows = await session.fetch("limits.adopt", type_name, *place, limit)
    return Place(rows[0]["priority"], rows[0]["id"]) if rows else None


async def heads(session: Session, task_type: TaskType, limit: int) -> list[Head]:
    """The first tasks of each level, and of those that have begun where these go first; at most `limit` each."""
    rows = await session.fetch("limits.heads", task_type.name, limit, task_type.finish_first)
    return [Head(row["id"], row["level"], row["waited_s"], begun=row["begun"]) for row in rows]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for of one level.

    Attributes:
        level: priority.
        limit: most tasks that will be chosen.
        keys: most keys to answer with.
    """

    level: int
    limit: int
    keys: int


async def lines(
    session: Session, task_type: TaskType, asked: Asked, first: str, end: str | None = None
) -> list[Line]:
    """What waits at a level under keys from `first` on and before `end`, by key; also of keys without room.

    Args:
        session: the one that owns the type.
        task_type: with its tasks tracked.
        asked: how much.
        first: key to begin at.
        end: key to end before; None is none.
    """
    rows = await session.fetch(
        "limits.lines",
        task_type.name,
        asked.level,
        first,
        end,
        asked.keys,
        task_type.max_per_key,
        asked.limit,
    )
    return [
        Line(
            key=row["key"],
            ids=row["ids"] or (),
            room=UNLIMITED if row["room"] is None else row["room"],
            weight=row["weight"],
            more=len(row["ids"] or ()) == row["depth"],
        )
        for row in rows
    ]


async def release(
    session: Session,
    task_type: TaskType,
    ids: Sequence[int],
    take_confirmed: Callable[[], list[int]],
    levels: Mapping[int, int] | None = None,
) -> Batch | None:
    """Opens the gate for tasks that were chosen; None when none of them is ready any more.

    Args:
        session: the one that owns the type.
        task_type: of the tasks.
        ids: which, in the order of release.
        take_confirmed: gives the batches that Kafka has, to be forgotten.
        levels: by id, at which level each was chosen, for workers to keep this order by; None is its own priority.
    """
    rows = await session.fetch("limits.open", task_type.name, list(ids), take_confirmed())
    if not rows:
        return None
    place = {task_id: number for number, task_id in enumerate(ids)}
    rows.sort(key=lambda row: place[row["id"]])
    return Batch(rows[0]["release_id"], [ready_of(task_type, row, levels) for row in rows])
