"""Statements that submit and read tasks, a batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.contracts import subscription
from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.contracts.submission import Submission
from penstock.core.access import namespace_of
from penstock.core.attempt import count_of
from penstock.errors import IdempotencyConflict, NotFound
from penstock.postgres import history
from penstock.postgres.columns import SUBMITTED
from penstock.postgres.ingest_positions import OffsetRange, offset_parameters, offsets_passed
from penstock.postgres.queries import fetch, fetchrow


@dataclass(frozen=True, slots=True)
class Submitted:
    """The task of a submission.

    Attributes:
        id: task id.
        created: False when an earlier submission with the same idempotency key created the task.
    """

    id: int
    created: bool


class Existing(NamedTuple):
    """The task that has an idempotency key, and the digest of its context, if there is one."""

    id: int
    digest: bytes | None

    def outcome(self, submission: Submission) -> Submitted | IdempotencyConflict:
        """The outcome of a later submission with the key; a conflict if both digests differ."""
        digest = submission.context_digest
        if None in (digest, self.digest) or digest == self.digest:
            return Submitted(self.id, created=False)
        return IdempotencyConflict(
            f"{submission.idempotency_key!r} was used for task {self.id} with another context, and the type "
            f"{submission.type} is strict: use another idempotency key, or send the same context",
            pointer="/idempotency_key",
        )


async def submit(
    executor: Any, submissions: Sequence[Submission], source: OffsetRange | None = None
) -> list[Submitted | IdempotencyConflict]:
    """Inserts tasks in one statement, all of them or none.

    Args:
        executor: a pool, or a connection whose transaction the statement joins.
        submissions: their types must exist; contexts above the inline limit must be in the object
            store.
        source: where the batch was read; the same statement moves the reader's offset from `first`
            to `following`.

    Returns:
        The tasks in the order of `submissions`. One whose idempotency key has a task with another
        context is a conflict; nothing was inserted for it.

    Raises:
        SessionLost: the offset was not at `source.first`, because another process reads the
            partition. Nothing was inserted.
        LockConflict: another transaction has one of the keys, or the offset, for about half a
            second. Nothing was inserted.
        PostgresUnavailable: nothing was inserted.
    """
    answer = await fetch(executor, "tasks.submit", **offset_parameters(source), **_parameters(submissions))
    if not answer:
        raise offsets_passed(source)
    rows = answer[1:]
    created = {(row["type"], row["idempotency_key"]): row["id"] for row in rows if row["idempotency_key"]}
    existing = await _existing(executor, [key for key in map(_unique_key, submissions) if key not in created])
    # PostgreSQL assigns ids in the order of the batch: the nth submission without an idempotency
    # key is the nth such row.
    ids_without_key = deque(row["id"] for row in rows if not row["idempotency_key"])
    result: list[Submitted | IdempotencyConflict] = []
    for submission in submissions:
        key = _unique_key(submission)
        if key is None:
            result.append(Submitted(ids_without_key.popleft(), created=True))
        elif (new_id := created.pop(key, None)) is not None:
            # A later submission of the batch may have the same key.
            existing[key] = Existing(new_id, submission.context_digest)
            result.append(Submitted(new_id, created=True))
        else:
            result.append(existing[key].outcome(submission))
    return result


def _unique_key(submission: Submission) -> tuple[str, str] | None:
    """Type and idempotency key; None without an idempotency key."""
    return (submission.type, submission.idempotency_key) if submission.idempotency_key is not None else None


async def _existing(
    executor: Any, unique_keys: Sequence[tuple[str, str] | None]
) -> dict[tuple[str, str], Existing]:
    """The existing tasks by type and idempotency key.

    A task may move to history after the insertion has met its key, so history is searched too.
    """
    found: dict[tuple[str, str], Existing] = {}
    for name in ("tasks.by_idempotency_keys", "history.by_idempotency_keys"):
        missing = [key for key in unique_keys if key is not None and key not in found]
        if missing:
            types, idempotency_keys = zip(*missing, strict=True)
            rows = await fetch(executor, name, list(types), list(idempotency_keys))
            found |= {
                (row["type"], row["idempotency_key"]): Existing(row["id"], row["context_digest"])
                for row in rows
            }
    return found


# The columns whose value is not simply the field of the same name.
_ENCODERS: Mapping[str, Callable[[Submission], Any]] = {
    "priority": lambda submission: int(submission.priority),
    "content_type": lambda submission: submission.context.content_type.value,
    "context": lambda submission: submission.context.data,
    "context_ref": lambda submission: encode_ref(submission.context.ref),
    "due_at": lambda submission: submission.run_at,
    "callbacks": lambda submission: (
        None
        if submission.callbacks is None
        else orjson.dumps(subscription.to_wire(submission.callbacks)).decode()
    ),
    "labels": lambda submission: orjson.dumps(submission.labels).decode() if submission.labels else None,
}


def _parameters(submissions: Sequence[Submission]) -> dict[str, list[Any]]:
    """One array for each column that a submission fills, by the name of the column."""
    encoders = {column.name: _ENCODERS.get(column.name, attrgetter(column.name)) for column in SUBMITTED}
    arrays = {name: [encode(each) for each in submissions] for name, encode in encoders.items()}
    # The statement fills up short arrays with NULL. Most columns are empty, and encoding an array
    # of NULL is slow.
    return {name: [] if values.count(None) == len(values) else values for name, values in arrays.items()}


def encode_ref(ref: ObjectRef | None) -> str | None:
    """A reference as the JSON text of its column."""
    return orjson.dumps(ref.to_wire()).decode() if ref else None


def context_of(row: Mapping[str, Any] | asyncpg.Record, prefix: str = "context") -> Context | None:
    """The context of a row, or its result with the prefix `result`; None when the row has none."""
    content_type = row["content_type" if prefix == "context" else f"{prefix}_type"]
    if content_type is None:
        return None
    ref = row[f"{prefix}_ref"]
    return Context(
        ContentType(content_type),
        data=row[prefix],
        ref=_decode_ref(ref),
    )


def flow_of(place: Mapping[str, Any]) -> dict[str, Any]:
    """The field `flow` of a task's document and of its events.

    Args:
        place: id of the flow, node, generation and item, which is None for a node without items.
    """
    return {name: value for name, value in place.items() if name != "item" or value is not None}


def _decode_ref(text: str | None) -> ObjectRef | None:
    return ObjectRef.from_wire(orjson.loads(text)) if text else None


async def namespaces(executor: Any, ids: Iterable[int]) -> dict[int, str]:
    """The namespaces of tasks with these ids that are not in history, by id.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    rows = await fetch(executor, "tasks.types", list(set(ids)))
    return {row["id"]: namespace_of(row["type"]) for row in rows}


async def get(executor: Any, task_id: int) -> dict[str, Any]:
    """The row of one task with its attempts and callbacks, from the live tables or history.

    The number of its attempt is the count (`core.attempt.count_of`), as that of its history.

    Raises:
        NotFound: no task has this id, or its day of history was dropped.
        PostgresUnavailable: the server does not answer.
    """
    row = await fetchrow(executor, "tasks.get", task_id)
    if row is not None:
        attempts = await fetch(executor, "tasks.attempts", task_id)
        callbacks = await fetch(executor, "tasks.callbacks_of_task", task_id)
    # A final task can move to history between these statements, together with its attempts.
    if row is None or (row["finished_at"] and not await fetch(executor, "tasks.existing", [task_id])):
        row = await fetchrow(executor, "history.get", task_id)
        if row is None:
            raise NotFound(f"there is no task {task_id}")
        return history.as_task(row)
    return {
        **row,
        "attempt": count_of(row["attempt"]),
        "attempts": [dict(a) for a in attempts],
        "callbacks_owed": [dict(c) for c in callbacks],
    }


async def by_ids(executor: Any, ids: Sequence[int]) -> list[asyncpg.Record]:
    """The rows of the tasks with these ids, by id; without those in history.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    return await fetch(executor, "tasks.by_ids", list(ids))


async def states_of(executor: Any, ids: Iterable[int]) -> dict[str, int]:
    """The number of these tasks by state, with those in history.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    unique = list(set(ids))
    rows = await fetch(executor, "tasks.states_of", unique)
    if sum(row["tasks"] for row in rows) < len(unique):
        rows = await fetch(executor, "history.states_of", unique)
    return {row["state"]: row["tasks"] for row in rows}


async def ends_of(executor: Any, ids: Iterable[int]) -> dict[int, datetime | None]:
    """When these tasks ended, with those in history; None for the others, unknown ids left out.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    unique = list(set(ids))
    rows = await fetch(executor, "tasks.ends_of", unique)
    if len(rows) < len(unique):
        rows = await fetch(executor, "history.ends_of", unique)
    return {row["id"]: row["ended_at"] for row in rows}


async def existing_ids(executor: Any, ids: Iterable[int]) -> set[int]:
    """The ids that belong to a task, with those in history.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    unique = set(ids)
    found = {row["id"] for row in await fetch(executor, "tasks.existing", list(unique))}
    if missing := unique - found:
        found |= {row["id"] for row in await fetch(executor, "history.known", list(missing))}
    return found


async def ids_of_types(executor: Any, ids: Iterable[int], types: Sequence[str]) -> set[int]:
    """The ids that belong to a task of one of these types, with those in history.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    unique = set(ids)
    rows = await fetch(executor, "tasks.of_types", list(unique), list(types))
    found = {row["id"] for row in rows}
    if missing := unique - found:
        rows = await fetch(executor, "history.own_tasks", list(missing), list(types))
        found |= {row["id"] for row in rows}
    return found
