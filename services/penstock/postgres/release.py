"""Release: from `ready` to `queued`, through the session that owns the type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.core.leases import Key
from penstock.core.task import Priority
from penstock.errors import InvalidRecord
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.session import Session
from penstock.postgres.tasks import context_of
from penstock.postgres.types import TaskType

# Notified with a type's name when a task of it becomes ready, or is scheduled.
READY_CHANNEL = "penstock_ready"
DUE_CHANNEL = "penstock_due"
# Notified when a replica of task-sync comes or goes, or gives types up.
REPLICAS_CHANNEL = "penstock_replicas"
# What follows tells replicas apart, in the name by which the server knows a session.
REPLICA_NAME = "task-sync gate"

_LEVELS = {int(level): level for level in Priority}


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks on their way to a ready topic.

    Attributes:
        release_id: note to forget once Kafka has them all.
        tasks: in order of release; empty when all of them have moved on since.
    """

    release_id: int
    tasks: list[ReadyTask]


async def join(session: Session) -> None:
    """Makes this session known as a replica, for as long as it lives."""
    await session.fetch("release.join")


async def leave(session: Session) -> None:
    """Gives all types up and is no replica any more."""
    await session.fetch("release.leave")


async def tell_replicas(session: Session) -> None:
    """Makes replicas look what there is to own."""
    await session.fetch("release.tell_replicas")


async def owners(session: Session, type_names: Sequence[str]) -> tuple[list[int], dict[str, int | None]]:
    """The sessions of all replicas, in order, and by type the session that owns it."""
    [row] = await session.fetch("release.owners", list(type_names))
    return row["members"], dict(zip(type_names, row["owners"] or [], strict=True))


async def own(session: Session, type_name: str) -> bool:
    """Takes the right to release a type for as long as the session lives; False when another process has it."""
    return bool(await session.fetchval("release.own", type_name))


async def disown(session: Session, type_name: str) -> None:
    """Gives the right back, for another process to take."""
    await session.fetchval("release.disown", type_name)


async def release(
    session: Session, task_type: TaskType, limit: int, confirmed: Sequence[int], *, tracked: bool = False
) -> Batch | None:
    """Opens the gate for the first `limit` ready tasks; None when there are none.

    Args:
        session: the one that owns the type.
        task_type: whose tasks.
        limit: most tasks to release.
        confirmed: earlier batches that Kafka has, to be forgotten in the same statement.
        tracked: they are counted while they are in flight, and their ends are told to the type's owner.
    """
    rows = await session.fetch("release.release", task_type.name, limit, list(confirmed), tracked)
    return Batch(rows[0]["release_id"], [ready_of(task_type, row) for row in rows]) if rows else None


async def forget(session: Session, confirmed: Sequence[int]) -> None:
    """Removes the notes of batches that Kafka has."""
    await session.fetch("release.forget", list(confirmed))


async def unconfirmed(session: Session, task_type: TaskType) -> list[Batch]:
    """Batches an earlier owner may not have brought to Kafka, with what is still queued of each."""
    batches: dict[int, Batch] = {}
    for row in await session.fetch("release.unconfirmed", task_type.name):
        batch = batches.setdefault(row["release_id"], Batch(row["release_id"], []))
        if row["id"] is not None:
            batch.tasks.append(ready_of(task_type, row))
    return list(batches.values())


async def waiting(session: Session, type_names: Sequence[str]) -> list[str]:
    """Those of some types of which something is ready."""
    return [row["type"] for row in await session.fetch("release.waiting", list(type_names))]


async def under_way(session: Session, keys: Sequence[Key]) -> set[Key]:
    """Those of some released attempts that have not ended."""
    if not keys:
        return set()
    rows = await session.fetch("release.under_way", [task_id for task_id, _step, _attempt in keys])
    return {(row["id"], row["step"], row["attempt"]) for row in rows}


async def cuts(session: Session, type_names: Sequence[str]) -> dict[str, datetime]:
    """Those of some owned types that have queued tasks; what was queued before the moment given was brought to Kafka.

    Args:
        session: the one that owns the types, while no release of them is under way.
        type_names: which types.
    """
    rows = await session.fetch("release.cuts", list(type_names))
    return {row["type"]: row["cut"] for row in rows}


async def lost(pool: asyncpg.Pool[asyncpg.Record], type_name: str, cut: datetime, limit: int) -> list[int]:
    """Makes ready again what has been queued since before `cut`, at most `limit` tasks; returns their ids.

    Raises:
        PostgresUnavailable: nothing was changed.
    """
    with translated():
        rows = await pool.fetch(query("release.lost"), type_name, cut, limit)
    return [row["id"] for row in rows]


async def promote(session: Session, limit: int = 1_000) -> dict[str, int]:
    """Makes ready the first `limit` tasks that have fallen due, of all types; how many of each. Their owners are notified."""
    return {row["type"]: row["tasks"] for row in await session.fetch("release.promote", limit)}


async def next_due_s(session: Session) -> float | None:
    """Seconds until something falls due, negative when it already has; None when nothing will."""
    wait_s: float | None = await session.fetchval("release.next_due")
    return wait_s


def ready_of(task_type: TaskType, row: asyncpg.Record, levels: Mapping[int, int] | None = None) -> ReadyTask:
    """The record of a row that was released; `levels` tells by id at which level, where that is not its priority."""
    context = context_of(row)
    if context is None:
        raise InvalidRecord(f"task {row['id']} has no context")  # the schema's CHECK does not allow it
    return ReadyTask(
        fence=Fence(row["id"], row["step"], row["stage"], row["attempt"]),
        type=task_type.name,
        context=context,
        lease_ms=task_type.lease_ms,
        tries=row["tries"],
        priority=_LEVELS[row["priority"] if levels is None else levels[row["id"]]],
        traceparent=row["traceparent"],
    )
