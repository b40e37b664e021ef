"""Ends attempts: the fenced statement, and the events and callbacks that are written with it.

An ending takes effect only while its attempt is the task's current one. Its history, its event and
its callbacks are in the same transaction. `kafka.processing.outbox` publishes them, and after a
crash the sweeper does. One module, because all of this is one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.contracts.context import Context
from penstock.contracts.event import Event, OutboxEntry
from penstock.contracts.result import Failure, traceback_end
from penstock.contracts.revocation import Revocation
from penstock.contracts.task_type import policy_of
from penstock.core.attempt import AttemptId, count_of
from penstock.core.completion import SUSPENDING, FailureCounts, Fence, Outcome
from penstock.core.endings import RetryState
from penstock.core.flow.waiting import waiting_definition
from penstock.core.task import FINAL, State
from penstock.postgres.connection import translated
from penstock.postgres.ending import Ending, columns_of
from penstock.postgres.outbox import PendingEvent, enqueue
from penstock.postgres.queries import bound, fetch, query
from penstock.postgres.repeating import transacted
from penstock.postgres.tasks import encode_ref, flow_of
from penstock.settings import Platform

_WORD = {
    Outcome.NEXT: "advanced",
    Outcome.RETRY: "retried",
    Outcome.HANDED_BACK: "retried",
    Outcome.FAIL: "retried",
    Outcome.EXPIRED: "expired",
    Outcome.SPAWN: "suspended",
    Outcome.WAIT: "suspended",
}


NO_CHAINS: Mapping[Fence, Sequence[Ending]] = {}


@dataclass(frozen=True, slots=True)
class Advanced:
    """The effect of a batch of endings.

    Attributes:
        applied: fences of the endings whose attempts were current.
        outbox: written with them, to be published.
        traces: traceparents of traced tasks.
        locked: ids of tasks that another transaction locks: nothing is known of their endings.
    """

    applied: set[Fence]
    outbox: OutboxEntry
    traces: dict[Fence, str]
    locked: frozenset[int] = frozenset()


async def retry_states(executor: Any, ids: Sequence[int]) -> dict[int, RetryState]:
    """The retry states of tasks that are about to fail or expire; final tasks are left out.

    Safe to read before the fenced write: stage and counts don't change within an attempt.

    Raises:
        PostgresUnavailable: no server.
    """
    rows: list[Any] = await fetch(executor, "advance.retry_states", list(ids))
    return {
        row["id"]: RetryState(
            row["type"],
            row["stage"],
            FailureCounts(row["failures"], row["losses"]),
            policy_of(row),
            row["max_losses"],
            orjson.loads(row["unhandled"]).get("unhandled_s", 0.0) if row["unhandled"] else 0.0,
            row["no_handler_s"],
        )
        for row in rows
    }


async def advance(
    pool: asyncpg.Pool[asyncpg.Record],
    endings: Sequence[Ending],
    *,
    chains: Mapping[Fence, Sequence[Ending]] = NO_CHAINS,
    late: bool = False,
    waits: bool = True,
    source: str = Platform.event_source,
) -> Advanced:
    """Commits a batch of endings, at most one a task, each with its events.

    Args:
        pool: of the database.
        endings: the attempts that ended.
        chains: by the attempt of an ending, those that its worker ended before, of earlier stages
            of the task (`core.going_on`). They take effect together, or none does.
        late: they end attempts that may not have begun (see `late_attempts`).
        waits: whether to wait for tasks that another transaction locks; else they are `locked`.
        source: of CloudEvents (see `Platform`).

    Raises:
        PostgresUnavailable: those that took effect are stale when they are committed again.
    """
    columns = columns_of(endings, chains)
    rows: list[asyncpg.Record] = []
    with translated():
        if not waits and all(e.outcome is Outcome.NEXT for e in endings):
            # One statement, without a transaction around it, for transitions that have no events.
            rows = await pool.fetch(*bound("advance.advance", **columns, late=late, alone=True))
            left = set(rows.pop()["locked"] if rows and rows[-1]["locked"] else ())
            rest = [ending for ending in endings if ending.fence.id in left]
        else:
            rest = list(endings)
        locked, with_events, outbox = frozenset[int](), list[asyncpg.Record](), OutboxEntry()
        if rest:
            details = {ending.fence: ending for ending in rest}
            rest_columns = columns if len(rest) == len(endings) else columns_of(rest, chains)

            async def move(connection: Any) -> tuple[frozenset[int], list[asyncpg.Record], OutboxEntry]:
                if waits:
                    await connection.fetch(query("advance.lock"), rest_columns["id"])
                moved = await connection.fetch(
                    *bound("advance.advance", **rest_columns, late=late, alone=False)
                )
                locked = frozenset(moved.pop()["locked"] if moved and moved[-1]["locked"] else ())
                return locked, moved, await _enqueue(connection, moved, details, chains, source)

            locked, with_events, outbox = await transacted(pool, move)
    rows += with_events
    applied = [_fence(row) for row in rows]
    outbox.revocation = _revocation(endings, applied, late=late)
    traces = {f: row["traceparent"] for f, row in zip(applied, rows, strict=True) if row["traceparent"]}
    for last in [fence for fence in applied if fence in chains]:
        chained = [ending.fence for ending in chains[last]]
        applied += chained
        traces.update(dict.fromkeys(chained, traces[last]) if last in traces else {})
    return Advanced(set(applied), outbox, traces, locked)


def _fence(row: asyncpg.Record) -> Fence:
    """The attempt that ended, from a row of `advance.advance`."""
    return Fence(row["id"], row["from_step"], row["from_stage"], row["from_attempt"])


async def _enqueue(
    connection: Any,
    rows: Sequence[asyncpg.Record],
    details: Mapping[Fence, Ending],
    chains: Mapping[Fence, Sequence[Ending]],
    source: str,
) -> OutboxEntry:
    """Writes the waits, events and callbacks of tasks that have moved, in their transaction."""
    ended = [details[_fence(row)] for row in rows]
    if suspended := [ending for ending in ended if ending.outcome in SUSPENDING]:
        await suspend(connection, suspended)
    return await enqueue(
        connection,
        [
            end_event(row if each is ending else _within(row, each), each)
            for row, ending in zip(rows, ended, strict=True)
            for each in [*chains.get(ending.fence, ()), ending]
            if row["events"] == "all" or row["callbacks"] or (row["state"] in FINAL and each is ending)
        ],
        source,
    )


def _within(row: asyncpg.Record, ending: Ending) -> Mapping[str, Any]:
    """The row of a task as it was after an ending before the last of its chain."""
    to = ending.conclusion
    return {**row, "state": State.RUNNING, "stage": to.stage, "step": to.step, "attempt": to.attempt}


async def suspend(connection: Any, endings: Sequence[Ending]) -> None:
    """Inserts the flows that tasks wait for, which have one node: children, or an event."""
    inputs = [ending.context or Context.encode({}) for ending in endings]
    await connection.execute(
        *bound(
            "flows.suspend",
            task_id=[ending.fence.id for ending in endings],
            stage=[ending.next_stage for ending in endings],
            definition=[
                orjson.dumps(waiting_definition(ending.outcome, ending.terms or {})).decode()
                for ending in endings
            ],
            inputs=[context.data for context in inputs],
            inputs_ref=[encode_ref(context.ref) for context in inputs],
        )
    )


async def stages_of(executor: Any, fences: Sequence[Fence]) -> dict[Fence, str]:
    """Finds stale fences whose attempt is current in another stage; returns that stage.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(
        executor,
        "advance.stages_of",
        [fence.id for fence in fences],
        [fence.step for fence in fences],
        [fence.attempt for fence in fences],
    )
    stages = {AttemptId(row["id"], row["step"], row["attempt"]): row["stage"] for row in rows}
    found = {fence: stages.get(fence.attempt_id) for fence in fences}
    return {fence: stage for fence, stage in found.items() if stage is not None and stage != fence.stage}


async def ahead(executor: Any, fences: Sequence[Fence]) -> set[Fence]:
    """Those of stale fences whose tasks are in an earlier step, and have not ended.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(
        executor,
        "advance.ahead",
        [fence.id for fence in fences],
        [fence.step for fence in fences],
        [fence.attempt for fence in fences],
    )
    found = {AttemptId(row["id"], row["step"], row["attempt"]) for row in rows}
    return {fence for fence in fences if fence.attempt_id in found}


def _revocation(endings: Sequence[Ending], applied: Sequence[Fence], *, late: bool) -> Revocation | None:
    """Revokes attempts that a worker may still run: expired or superseded ones."""
    over = {e.fence for e in endings if late or e.outcome is Outcome.EXPIRED}
    attempt_ids = [fence.attempt_id for fence in applied if fence in over] if over else []
    return Revocation("superseded" if late else "expired", attempt_ids) if attempt_ids else None


async def late_attempts(executor: Any, fences: Sequence[Fence]) -> dict[Fence, int]:
    """Finds stale fences whose results may still count; returns the current attempt of each task.

    Their attempts expired, their stages are not finished since, and their types accept late
    results. None has a number that a worker chose (`core.going_on`).

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(
        executor,
        "advance.late_attempts",
        id=[fence.id for fence in fences],
        step=[fence.step for fence in fences],
        stage=[fence.stage for fence in fences],
        attempt=[fence.attempt for fence in fences],
    )
    return {Fence(row["id"], row["step"], row["stage"], row["attempt"]): row["now_at"] for row in rows}


async def cancel(
    pool: asyncpg.Pool[asyncpg.Record], ids: Sequence[int], *, source: str = Platform.event_source
) -> tuple[list[int], OutboxEntry]:
    """Cancels those of the tasks that are not final; returns them and their outbox entry.

    Args:
        pool: of the database.
        ids: of the tasks.
        source: of CloudEvents (see `Platform`).

    Raises:
        PostgresUnavailable: nothing took effect.
    """
    with translated():
        return await transacted(pool, lambda connection: cancel_within(connection, ids, source=source))


async def cancel_within(
    connection: Any, ids: Sequence[int], *, source: str = Platform.event_source
) -> tuple[list[int], OutboxEntry]:
    """As `cancel`, in the caller's transaction.

    Args:
        connection: inside a transaction, and inside `translated`.
        ids: of the tasks.
        source: of CloudEvents (see `Platform`).
    """
    rows = await connection.fetch(query("tasks.cancel"), list(ids))
    outbox = await enqueue(
        connection, [transition_event(row, State.CANCELLED.value, {}) for row in rows], source
    )
    if rows:
        outbox.revocation = Revocation(
            "cancelled", [AttemptId(row["id"], row["step"], row["attempt"]) for row in rows]
        )
    return [row["id"] for row in rows], outbox


def end_event(row: Mapping[str, Any] | asyncpg.Record, ending: Ending) -> PendingEvent:
    """The event of an attempt's end, from the row of its task after it."""
    detail: dict[str, Any] = {}
    if ending.outcome is Outcome.DONE and ending.context is not None:
        detail = ending.context.to_wire("result")
    if ending.error is not None:
        detail["error"] = _event_error(ending.error, ending.fence)
    word = row["state"] if row["state"] in FINAL else _WORD[ending.outcome]
    return transition_event(row, word, detail, ending.fence)


def _event_error(error: Failure, fence: Fence) -> dict[str, Any]:
    """The field `error` of an event: bounded, because targets of callbacks receive it."""
    wire = {**error.to_wire(), "log": fence.attempt_id.log_path}
    if error.traceback is not None:
        wire["traceback"] = traceback_end(error.traceback)
    return wire


def transition_event(
    row: Mapping[str, Any] | asyncpg.Record, word: str, detail: Mapping[str, Any], ended: Fence | None = None
) -> PendingEvent:
    """The event of a task's transition, from its row after it, as the outbox takes it.

    Args:
        row: of the task.
        word: the transition.
        detail: further fields.
        ended: the attempt that ended; None for the present one.
    """
    # The id contains the attempt that ended, so each transition has its own.
    step, attempt = (ended.step, ended.attempt) if ended else (row["step"], row["attempt"])
    attempt = count_of(attempt)
    event = Event(
        id=f"{row['id']}-{step}-{attempt}-{word}",
        name=f"task.{word}",
        at=row["updated_at"],
        task={
            "id": row["id"],
            "type": row["type"],
            "stage": row["stage"],
            "step": row["step"],
            "attempt": count_of(row["attempt"]),
            "state": row["state"],
            "idempotency_key": row["idempotency_key"],
            "labels": orjson.loads(row["labels"]) if row["labels"] else {},
            **({"flow": flow_of(orjson.loads(row["flow"]))} if row["flow"] else {}),
        },
        detail=detail,
    )
    return PendingEvent(event, row["callbacks"], row["events"], row["traceparent"])
