"""Submitting, reading and cancelling tasks, a batch a statement."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.contracts import subscription
from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.contracts.submission import Submission
from penstock.errors import NotFound, SessionLost
from penstock.postgres import history
from penstock.postgres.connection import translated
from penstock.postgres.queries import query


@dataclass(frozen=True, slots=True)
class Submitted:
    """The task a submission became.

    Attributes:
        id: task id.
        created: False when an earlier submission with the same idempotency key had created it.
    """

    id: int
    created: bool


@dataclass(frozen=True, slots=True)
class Stretch:
    """The records of a partition that a batch was read from: from offset `first` up to (not with) `following`."""

    topic: str
    partition: int
    first: int
    following: int


async def submit(
    executor: Any, submissions: Sequence[Submission], read: Stretch | None = None
) -> list[Submitted]:
    """Inserts tasks, all or none, in one statement; returns them in the order given.

    Args:
        executor: a pool, or a connection whose transaction this joins.
        submissions: with types that exist and contexts already checked in above the inline limit.
        read: where they were read; the reader's offset moves on with them.

    Raises:
        SessionLost: the offset was not at `read.first`: another reader has moved on; nothing was inserted.
        PostgresUnavailable: nothing was inserted.
    """
    where = (read.topic, read.partition, read.first, read.following) if read else (None,) * 4
    with translated():
        answer = await executor.fetch(
            query("tasks.submit"),
            *_columns(submissions),
            *where,
            _column([s.key for s in submissions]),
            _column([s.traceparent for s in submissions]),
        )
        if not answer:
            raise SessionLost(f"another process has read on from there: {read}")
        rows = answer[1:]
        keyed = {(row["type"], row["idempotency_key"]): row["id"] for row in rows if row["idempotency_key"]}
        missing = [s for s in submissions if s.idempotency_key and (s.type, s.idempotency_key) not in keyed]
        earlier: dict[tuple[str, str], int] = {}
        if missing:
            found = await executor.fetch(
                query("tasks.by_idempotency_keys"),
                [s.type for s in missing],
                [s.idempotency_key for s in missing],
            )
            earlier = {(row["type"], row["idempotency_key"]): row["id"] for row in found}
            moved = [s for s in missing if (s.type, s.idempotency_key) not in earlier]
            if moved:
                # The key was known to the insertion; its task has moved to history between the two statements.
                found = await executor.fetch(
                    query("history.by_idempotency_keys"),
                    [s.type for s in moved],
                    [s.idempotency_key for s in moved],
                )
                earlier |= {(row["type"], row["idempotency_key"]): row["id"] for row in found}
    # Ids are given out in the order of the batch, so the n-th without a key is the n-th row without one.
    keyless = deque(row["id"] for row in rows if not row["idempotency_key"])
    result = []
    for submission in submissions:
        if submission.idempotency_key is None:
            result.append(Submitted(keyless.popleft(), created=True))
            continue
        key = (submission.type, submission.idempotency_key)
        new = keyed.pop(key, None)
        if new is not None:
            earlier[key] = new
        result.append(Submitted(earlier[key], created=new is not None))
    return result


def _columns(submissions: Sequence[Submission]) -> list[list[Any]]:
    columns: list[list[Any]] = [
        [s.type for s in submissions],
        [s.stage for s in submissions],
        [int(s.priority) for s in submissions],
        [s.context.content_type.value for s in submissions],
        [s.context.data for s in submissions],
        [encode_ref(s.context.ref) for s in submissions],
        [s.idempotency_key for s in submissions],
        [s.run_at for s in submissions],
        [
            None if s.callbacks is None else orjson.dumps(subscription.to_wire(s.callbacks)).decode()
            for s in submissions
        ],
        [s.events for s in submissions],
        [orjson.dumps(s.labels).decode() if s.labels else None for s in submissions],
    ]
    return [_column(values) for values in columns]


def _column(values: list[Any]) -> list[Any]:
    # The statement fills up short columns with NULL, and the driver takes long for each element of an array: most
    # submissions leave most columns empty.
    return [] if values.count(None) == len(values) else values


def encode_ref(ref: ObjectRef | None) -> str | None:
    """A reference as its column holds it."""
    return orjson.dumps(ref.to_wire()).decode() if ref else None


def context_of(row: Mapping[str, Any] | asyncpg.Record, prefix: str = "context") -> Context | None:
    """The context (or, with prefix `result`, the result) in the columns of a row."""
    content_type = row["content_type" if prefix == "context" else f"{prefix}_type"]
    if content_type is None:
        return None
    ref = row[f"{prefix}_ref"]
    return Context(
        ContentType(content_type),
        data=row[prefix],
        ref=ObjectRef.from_wire(orjson.loads(ref)) if ref else None,
    )


async def get(executor: Any, task_id: int) -> dict[str, Any]:
    """One task with its attempts and callbacks, as rows; from history, when it has moved there.

    Raises:
        NotFound: no task has this id, or its day of history was dropped.
        PostgresUnavailable: no server.
    """
    with translated():
        row = await executor.fetchrow(query("tasks.get"), task_id)
        if row is not None:
            attempts = await executor.fetch(query("tasks.attempts"), task_id)
            callbacks = await executor.fetch(query("tasks.callbacks_of_task"), task_id)
        # What has ended may have moved between these statements, and its attempts with it.
        if row is None or (row["finished_at"] and not await executor.fetch(query("tasks.known"), [task_id])):
            row = await executor.fetchrow(query("history.get"), task_id)
            if row is None:
                raise NotFound(f"there is no task {task_id}")
            return history.as_task(row)
    return {**row, "attempts": [dict(a) for a in attempts], "callbacks_owed": [dict(c) for c in callbacks]}


async def find(
    executor: Any,
    *,
    type_name: str | None = None,
    states: Sequence[str] | None = None,
    stage: str | None = None,
    labels: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    key: str | None = None,
    before: int | None = None,
    limit: int = 50,
    among: Sequence[str] | None = None,
) -> list[asyncpg.Record]:
    """Tasks, newest first; give the last id of a page as `before` to get the next one. `among` is the types that may be seen.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        found: list[asyncpg.Record] = await executor.fetch(
            query("tasks.list"),
            type_name,
            list(states) if states else None,
            stage,
            orjson.dumps(labels).decode() if labels else None,
            idempotency_key,
            before,
            limit,
            key,
            None if among is None else list(among),
        )
    return found


async def some(executor: Any, ids: Sequence[int]) -> list[asyncpg.Record]:
    """Those of some tasks that there are, in the order of their ids.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(query("tasks.some"), list(ids))
    return rows


async def states_of(executor: Any, ids: Iterable[int]) -> dict[str, int]:
    """How many of these tasks are in which state, also of those in history.

    Raises:
        PostgresUnavailable: no server.
    """
    wanted = list(set(ids))
    with translated():
        rows = await executor.fetch(query("tasks.states_of"), wanted)
        if sum(row["tasks"] for row in rows) < len(wanted):
            rows = await executor.fetch(query("history.states_of"), wanted)
    return {row["state"]: row["tasks"] for row in rows}


async def known(executor: Any, ids: Iterable[int]) -> set[int]:
    """Which of these ids are tasks', also of those in history.

    Raises:
        PostgresUnavailable: no server.
    """
    wanted = set(ids)
    with translated():
        found = {row["id"] for row in await executor.fetch(query("tasks.known"), list(wanted))}
        if missing := wanted - found:
            found |= {row["id"] for row in await executor.fetch(query("history.known"), list(missing))}
    return found


async def own(executor: Any, ids: Iterable[int], among: Sequence[str]) -> set[int]:
    """Which of these ids are of tasks of some types, also of those in history.

    Raises:
        PostgresUnavailable: no server.
    """
    wanted = set(ids)
    with translated():
        found = {row["id"] for row in await executor.fetch(query("tasks.own"), list(wanted), list(among))}
        if missing := wanted - found:
            rows = await executor.fetch(query("history.own_tasks"), list(missing), list(among))
            found |= {row["id"] for row in rows}
    return found
