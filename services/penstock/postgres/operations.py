"""Bulk operations: a row of `audit` each, and the batches of those on tasks; any gateway runs them.

What this module guarantees: each batch changes its tasks, the position of the operation and its
count of changes in one transaction, and positions follow the order of ids. So each task that
matches when its batch runs is changed once and counted once, after any crash. Two processes that
run one operation take turns. A batch waits for the lock of a row only while it holds no other row,
so operations never deadlock with services.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.contracts.event import OutboxEntry
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.core.flow.operations import FlowVerb
from penstock.core.operations import Subject, TaskFilter, Verb, batch_size
from penstock.core.task import State
from penstock.postgres.advance import cancel_within
from penstock.postgres.queries import execute, fetch, fetchrow, fetchval, transaction
from penstock.settings import Platform

# Most rows that one statement examines. It bounds the cost of a batch when few tasks match.
ROWS_PER_STATEMENT = 20_000
# Most operations that a gateway adopts at once.
MAX_RUNNING = 100

# How long a process waits while another one runs a batch of the same operation.
CONTENDED_S = 0.2

Row = asyncpg.Record


class Matches(NamedTuple):
    """The result of a search.

    Attributes:
        states: state by id of the tasks that match, in the order of ids.
        reached_id: all tasks up to this id were examined; None without any task.
        ended: whether there are no more tasks.
        examined: number of tasks examined.
    """

    states: dict[int, str]
    reached_id: int | None
    ended: bool
    examined: int


class BatchResult(NamedTuple):
    """The result of one batch.

    Attributes:
        changed: number of tasks changed.
        outbox_entry: the records to publish.
        wait_s: seconds until the next batch is due; None when the operation has ended.
    """

    changed: int
    outbox_entry: OutboxEntry
    wait_s: float | None


async def find_matching(
    executor: Any,
    verb: Verb,
    filters: TaskFilter,
    *,
    after_id: int,
    last_id: int,
    limit: int,
    priority: int | None = None,
    ids: Sequence[int] | None = None,
) -> Matches:
    """Finds tasks that match and that a verb would change, among the next `ROWS_PER_STATEMENT`.

    Args:
        executor: a pool or a connection.
        verb: the change.
        filters: the tasks of the operation.
        after_id: examines tasks with larger ids.
        last_id: the largest id to examine.
        limit: most tasks to find.
        priority: the new priority of `reprioritise`.
        ids: examines these tasks in place of those of the filter.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    states = filters.states_for(verb)
    examined_ids = filters.ids if ids is None else ids
    if examined_ids is not None:
        source = "ids"
    elif filters.type is not None and set(states) <= {State.FAILED, State.QUARANTINED}:
        source = "failed"
    else:
        source = "all"
    [summary, *rows] = await fetch(
        executor,
        "operations.find_matching",
        after_id=after_id,
        last_id=last_id,
        rows=ROWS_PER_STATEMENT,
        limit=limit,
        source=source,
        ids=list(examined_ids) if examined_ids is not None else None,
        states=[state.value for state in states],
        verb=verb.value,
        type=filters.type,
        stage=filters.stage,
        labels=orjson.dumps(filters.labels).decode() if filters.labels else None,
        priorities=list(filters.priorities) if filters.priorities else None,
        created_since=filters.created_since,
        created_until=filters.created_until,
        finished_since=filters.finished_since,
        finished_until=filters.finished_until,
        error=filters.error,
        priority=priority,
        key=filters.key,
    )
    found = {row["id"]: row["state"] for row in rows}
    full = len(found) == limit
    return Matches(
        found,
        rows[-1]["id"] if full else summary["reached"],
        not full and summary["examined"] < ROWS_PER_STATEMENT,
        summary["examined"],
    )


async def create(
    executor: Any,
    operation_id: str,
    verb: Verb | FlowVerb,
    created_by: str,
    filter_json: str,
    priority: int | None,
    rate: float | None,
    actor: str | None = None,
    namespaces: Collection[str] | None = None,
    version: str | None = None,
) -> Row | None:
    """Inserts an operation on tasks or flows, by its verb; returns None when the id exists.

    Args:
        executor: a pool or a connection.
        operation_id: id of the operation.
        verb: the change.
        created_by: the person that the request names.
        filter_json: the tasks, as JSON.
        priority: the new priority of `reprioritise`.
        rate: tasks a second; None is without a limit.
        actor: the authenticated sender.
        namespaces: the namespaces of the sender; None is all.
        version: of the verb `rerun`: `same` or `latest`.

    Raises:
        PostgresUnavailable: the row may be inserted or not; repeating the call is safe.
    """
    row: Row | None = await fetchrow(
        executor,
        "operations.create",
        id=operation_id,
        verb=verb.value,
        asked_by=created_by,
        filter=filter_json,
        priority=priority,
        rate=rate,
        actor=actor,
        namespaces=None if namespaces is None else sorted(namespaces),
        subject=Subject.FLOW if isinstance(verb, FlowVerb) else Subject.TASK,
        version=version,
    )
    return row


def is_running(operation: Row) -> bool:
    """Whether an operation has neither ended nor been stopped."""
    return bool(operation["state"] == "running")


async def task_in_flow(executor: Any, ids: Sequence[int]) -> tuple[int, int] | None:
    """The first of these tasks that belongs to a flow, and the flow; None if there is none.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    row = await fetchrow(executor, "operations.of_flows", list(ids))
    return None if row is None else (row["id"], row["flow_id"])


async def get(executor: Any, operation_id: str) -> Row | None:
    """The row of an operation; None when there is no such id.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    row: Row | None = await fetchrow(executor, "operations.get", operation_id)
    return row


async def find(
    executor: Any,
    *,
    verb: str | None,
    state: str | None,
    before_seq: int | None,
    limit: int,
    namespaces: Collection[str] | None = None,
) -> list[Row]:
    """Operations, the latest first; the last `seq` of a page is `before_seq` of the next page.

    Args:
        executor: a pool or a connection.
        verb: only operations with this verb.
        state: only operations in this state.
        before_seq: only operations with a smaller `seq`.
        limit: most rows.
        namespaces: only operations that are limited to some of these; None is all operations.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return await fetch(
        executor,
        "operations.list",
        verb=verb,
        state=state,
        before=before_seq,
        limit=limit,
        visible=None if namespaces is None else sorted(namespaces),
    )


async def running_ids(executor: Any, known_ids: Sequence[str]) -> list[str]:
    """The ids of the first `MAX_RUNNING` running operations, without those that the caller runs.

    Args:
        executor: a pool or a connection.
        known_ids: the operations that the caller runs.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return [row["id"] for row in await fetch(executor, "operations.running", MAX_RUNNING, known_ids)]


async def stop(executor: Any, operation_id: str, stopped_by: str) -> None:
    """Stops an operation; does nothing when it has ended or does not exist.

    Raises:
        PostgresUnavailable: the operation may still run; repeating the call is safe.
    """
    await execute(executor, "operations.stop", operation_id, stopped_by)


async def run_batch(
    pool: asyncpg.Pool[Row], operation_id: str, filters: TaskFilter, *, source: str = Platform.event_source
) -> BatchResult:
    """Changes the next batch of an operation's tasks, if it is due.

    Args:
        pool: the database.
        operation_id: id of the operation.
        filters: its filter.
        source: the source of its CloudEvents (see `Platform`).

    Raises:
        PostgresUnavailable: the batch may be done or not; repeating the call is safe.
    """
    result = await _try_batch(pool, operation_id, filters, source, single=False)
    if result is None:
        # Another transaction holds the first task. Waiting for its lock is safe with no other lock
        # held.
        result = await _try_batch(pool, operation_id, filters, source, single=True)
    assert result is not None
    return result


async def _try_batch(
    pool: asyncpg.Pool[Row], operation_id: str, filters: TaskFilter, source: str, *, single: bool
) -> BatchResult | None:
    """One transaction; None, without changes, when another transaction holds the first task.

    With `single` the batch is one task, and the transaction waits for its lock.
    """
    async with transaction(pool) as connection:
        operation = await fetchrow(connection, "operations.claim", operation_id)
        if operation is None:
            existing = await fetchrow(connection, "operations.get", operation_id)
            contended = existing is not None and is_running(existing)
            return BatchResult(0, OutboxEntry(), CONTENDED_S if contended else None)
        if operation["wait_s"] > 0:
            return BatchResult(0, OutboxEntry(), operation["wait_s"])
        verb, last_id = Verb(operation["verb"]), operation["upto"]
        matches = await find_matching(
            connection,
            verb,
            filters,
            after_id=operation["behind"],
            last_id=last_id,
            limit=1 if single else batch_size(operation["rate"]),
            priority=operation["priority"],
        )
        reached_id, ended = matches.reached_id, matches.ended
        ids = [*matches.states]
        if single and ids:
            await execute(connection, "operations.lock_one", *ids)
        elif ids:
            locked = {row["id"] for row in await fetch(connection, "operations.lock", ids)}
            held_at = next((i for i, task_id in enumerate(ids) if task_id not in locked), None)
            if held_at == 0:
                return None
            if held_at is not None:
                # The next batch starts at the task that another transaction holds.
                ids, reached_id, ended = ids[:held_at], ids[held_at - 1], False
        changed: Counter[str] = Counter()
        outbox_entry = OutboxEntry()
        if ids:
            # The tasks may have changed before they were locked.
            matches = await find_matching(
                connection,
                verb,
                filters,
                after_id=operation["behind"],
                last_id=last_id,
                limit=len(ids),
                priority=operation["priority"],
                ids=ids,
            )
            changed_ids, outbox_entry = await _apply(
                connection, verb, matches.states, operation["priority"], source
            )
            changed = Counter(matches.states[task_id] for task_id in changed_ids)
        total = Counter(orjson.loads(operation["found_in"])) + changed
        wait_s = await fetchval(
            connection,
            "operations.record_batch",
            id=operation_id,
            behind=reached_id if reached_id is not None else last_id,
            changed=changed.total(),
            found_in=orjson.dumps(total).decode(),
            ended=ended,
        )
    return BatchResult(changed.total(), outbox_entry, None if ended else max(0.0, wait_s))


async def _apply(
    connection: Any, verb: Verb, states: Mapping[int, str], priority: int | None, source: str
) -> tuple[list[int], OutboxEntry]:
    """Applies a verb to locked tasks; returns the changed ids and the records to publish."""
    ids = [*states]
    if not ids:
        return [], OutboxEntry()
    if verb is Verb.CANCEL:
        return await cancel_within(connection, ids, source=source)
    parameters = [priority] if verb is Verb.REPRIORITISE else []
    rows = await fetch(connection, f"operations.{verb.value}", ids, *parameters)
    outbox_entry = OutboxEntry()
    if verb is Verb.PAUSE:
        # A worker may run the attempt of a queued task, since quick claims are not written to
        # PostgreSQL.
        superseded = [
            AttemptId(row["id"], row["step"], row["attempt"] - 1)
            for row in rows
            if states[row["id"]] == State.QUEUED
        ]
        outbox_entry.revocation = Revocation("over", superseded) if superseded else None
    return [row["id"] for row in rows], outbox_entry


async def fail(executor: Any, operation_id: str, error: str) -> None:
    """Ends an operation with an error that its next batch would repeat.

    Raises:
        PostgresUnavailable: the operation may still run.
    """
    await execute(executor, "operations.fail", operation_id, error)
