"""Release: moves tasks from `ready` to `queued`, through the session that owns their type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import asyncpg

from penstock.contracts.ready import ReadyTask
from penstock.contracts.task_type import TaskType
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence
from penstock.core.suspects import isolation_of
from penstock.core.task import Priority
from penstock.errors import InvalidRecord
from penstock.postgres.ownership import Group
from penstock.postgres.queries import fetch
from penstock.postgres.session import Session
from penstock.postgres.tasks import context_of

# Notified with a type's name when a task of it becomes ready, or is scheduled.
READY_CHANNEL = "penstock_ready"
DUE_CHANNEL = "penstock_due"
# The replicas of task-sync, and the types that they own.
TYPES = Group("penstock.release", "penstock_replicas", "task-sync")
# Prefix of the application name of a replica's session; host and process id follow.
REPLICA_NAME = "task-sync gate"

_LEVELS = {int(level): level for level in Priority}


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks that were released together.

    Attributes:
        release_id: the batch note, to be deleted once Kafka has all records.
        tasks: in order of release; empty when every task has changed its state since.
    """

    release_id: int
    tasks: list[ReadyTask]


class Released(NamedTuple):
    """The result of a statement that releases tasks.

    Attributes:
        batch: the released tasks; None when there are none.
        locked: tasks that it did not release because another transaction locks them, or because
            they changed meanwhile.
    """

    batch: Batch | None
    locked: list[int]


async def release(
    session: Session,
    task_type: TaskType,
    limit: int,
    confirmed: Sequence[int],
    *,
    tracked: bool = False,
    excluded: Sequence[int] = (),
    version: str | None = None,
    goes_on: bool = False,
) -> Released:
    """Releases the first `limit` ready tasks of a type.

    Args:
        session: the owner of the type.
        task_type: the type.
        limit: most tasks to release.
        confirmed: earlier batches that Kafka has; the same statement deletes their notes.
        tracked: the tasks count for limits while they are in flight, and their end notifies the
            type's owner.
        excluded: tasks that are left out.
        version: of the type as it was loaded; if it has changed since, nothing is released. None
            releases by any version.
        goes_on: workers may go on with those that do not count for limits (`core.going_on`).
    """
    rows = await session.fetch(
        "release.release",
        type=task_type.name,
        limit=limit,
        confirmed=list(confirmed),
        tracked=tracked,
        excluded=list(excluded),
        version=version,
    )
    locked = rows.pop()["locked"] if rows and rows[-1]["locked"] else []
    if not rows:
        return Released(None, locked)
    tasks = [ready_of(task_type, row) for row in rows]
    for task, row in zip(tasks, rows, strict=True):
        task.goes_on = goes_on and not row["tracked"]
    return Released(Batch(rows[0]["release_id"], tasks), locked)


async def delete_notes(session: Session, confirmed: Sequence[int]) -> None:
    """Deletes the notes of batches that Kafka has."""
    await session.fetch("release.delete_notes", list(confirmed))


async def unconfirmed(session: Session, task_type: TaskType) -> list[Batch]:
    """Batches that an earlier owner may not have written to Kafka, with their queued tasks."""
    batches: dict[int, Batch] = {}
    for row in await session.fetch("release.unconfirmed", task_type.name):
        batch = batches.setdefault(row["release_id"], Batch(row["release_id"], []))
        if row["id"] is not None:
            batch.tasks.append(ready_of(task_type, row))
    return list(batches.values())


async def with_ready_tasks(session: Session, type_names: Sequence[str]) -> list[str]:
    """The given types that have ready tasks."""
    return [row["type"] for row in await session.fetch("release.with_ready_tasks", list(type_names))]


async def first_ready(session: Session, type_name: str) -> Priority | None:
    """The priority of the type's first ready task; that of its root flow, if it belongs to one.

    None without such a task, and of a type that is released by concurrency key.
    """
    rows = await session.fetch("release.first_ready", type_name)
    return _LEVELS[rows[0]["level"]] if rows else None


async def in_flight(session: Session, attempt_ids: Sequence[AttemptId]) -> set[AttemptId]:
    """The given attempts, and other attempts of their tasks, that have not ended."""
    if not attempt_ids:
        return set()
    rows = await session.fetch("release.in_flight", [task_id for task_id, _step, _attempt in attempt_ids])
    return {AttemptId(row["id"], row["step"], row["attempt"]) for row in rows}


async def queued_cutoffs(session: Session, type_names: Sequence[str]) -> dict[str, str]:
    """By type with queued tasks: Kafka has the records of all tasks queued before this transaction.

    Args:
        session: the owner of the types, while it releases none of their tasks.
        type_names: the types.
    """
    rows = await session.fetch("release.queued_cutoffs", list(type_names))
    return {row["type"]: row["cutoff"] for row in rows}


async def make_lost_ready(
    pool: asyncpg.Pool[asyncpg.Record], type_name: str, cutoff: str, limit: int
) -> list[int]:
    """Makes tasks ready again that were queued before a cutoff, at most `limit`; returns their ids.

    Raises:
        PostgresUnavailable: nothing was changed.
    """
    rows = await fetch(pool, "release.make_lost_ready", type_name, cutoff, limit)
    return [row["id"] for row in rows]


async def withdraw(
    session: Session, attempt_ids: Sequence[AttemptId]
) -> tuple[set[AttemptId], set[AttemptId]]:
    """Makes those of the attempts that are still queued ready again, each as a new attempt.

    Args:
        session: the owner of their type.
        attempt_ids: of records that no worker has taken.

    Returns:
        The attempts that were withdrawn, and those that are still queued, because another
        transaction locks their tasks.
    """
    rows = await session.fetch("release.withdraw", *_columns(attempt_ids))
    found = {AttemptId(row["id"], row["step"], row["attempt"]): row["moved"] for row in rows}
    return {each for each, moved in found.items() if moved}, {
        each for each, moved in found.items() if not moved
    }


async def durations_s(session: Session, attempt_ids: Sequence[AttemptId]) -> list[float]:
    """How long those of the attempts took that have ended."""
    return [row["took_s"] for row in await session.fetch("release.durations", *_columns(attempt_ids))]


def _columns(attempt_ids: Sequence[AttemptId]) -> tuple[list[int], list[int], list[int]]:
    return (
        [attempt_id.task_id for attempt_id in attempt_ids],
        [attempt_id.step for attempt_id in attempt_ids],
        [attempt_id.attempt for attempt_id in attempt_ids],
    )


async def promote(session: Session, limit: int = 1_000) -> dict[str, int]:
    """Makes the first `limit` due tasks ready, and a share of each type, and notifies the owners.

    Returns the counts by type: at least `limit` together if more tasks are due.
    """
    return {row["type"]: row["tasks"] for row in await session.fetch("release.promote", limit)}


async def next_due_s(session: Session) -> float | None:
    """Seconds until the next scheduled task is due; negative when it is overdue."""
    wait_s: float | None = await session.fetchval("release.next_due")
    return wait_s


def ready_of(task_type: TaskType, row: asyncpg.Record, levels: Mapping[int, int] | None = None) -> ReadyTask:
    """The ready record of a released row.

    Args:
        task_type: of the task.
        row: as `release.release` returns it.
        levels: effective levels by id, when the type's order does not follow the priorities.
    """
    context = context_of(row)
    if context is None:
        # The schema's CHECK prevents this.
        raise InvalidRecord(f"task {row['id']} has no context")
    return ReadyTask(
        fence=Fence(row["id"], row["step"], row["stage"], row["attempt"]),
        type=task_type.name,
        context=context,
        lease_ms=task_type.lease_ms,
        tries=row["tries"],
        priority=_LEVELS[row["level"] if levels is None else levels[row["id"]]],
        traceparent=row["traceparent"],
        isolation=isolation_of(row["losses"], task_type.max_losses),
    )
