"""Ends attempts: the fenced statement, and the events and callbacks that are written with it.

An ending takes effect only while its attempt is the task's current one. Its history, its event and
its callbacks are in the same transaction. `penstock.kafka.outbox` publishes them, and after a crash
the sweeper does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.contracts.context import Context
from penstock.contracts.event import Event, OutboxEntry
from penstock.contracts.result import Failure
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.core.completion import Conclusion, FailureCounts, Fence, Outcome
from penstock.core.retry import RetryPolicy
from penstock.core.task import FINAL, State
from penstock.postgres.connection import translated
from penstock.postgres.outbox import PendingEvent, enqueue, sparse
from penstock.postgres.queries import query
from penstock.postgres.repeating import transacted
from penstock.postgres.tasks import encode_ref
from penstock.postgres.types import policy_of
from penstock.settings import Platform

_WORD = {
    Outcome.NEXT: "advanced",
    Outcome.RETRY: "retried",
    Outcome.FAIL: "retried",
    Outcome.EXPIRED: "expired",
}


# Not frozen: constructing a frozen dataclass is slower, and one is made for each stage that ends.
@dataclass(slots=True, kw_only=True)
class Ending:
    """An attempt that ended, and where its task goes.

    Attributes:
        fence: the attempt.
        outcome: how it ended.
        conclusion: where the task goes.
        worker: the worker that reported it, or that was lost.
        context: the new context (next) or the result (done).
        error: why, with fail, retry and expired.
        started_ms: when the handler began, milliseconds since 1970.
        finished_ms: when it ended.
    """

    fence: Fence
    outcome: Outcome
    conclusion: Conclusion
    worker: str | None
    context: Context | None = None
    error: Failure | None = None
    started_ms: int = 0
    finished_ms: int = 0


@dataclass(frozen=True, slots=True)
class RetryState:
    """The stage of a task, its failures and losses so far, and their limits."""

    type: str
    stage: str
    counts: FailureCounts
    policy: RetryPolicy
    max_losses: int


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
    with translated():
        rows = await executor.fetch(query("advance.retry_states"), list(ids))
    return {
        row["id"]: RetryState(
            row["type"],
            row["stage"],
            FailureCounts(row["failures"], row["losses"]),
            policy_of(row),
            row["max_losses"],
        )
        for row in rows
    }


async def advance(
    pool: asyncpg.Pool[asyncpg.Record],
    endings: Sequence[Ending],
    *,
    late: bool = False,
    waits: bool = True,
    source: str = Platform.event_source,
) -> Advanced:
    """Commits a batch of endings, at most one an attempt, in one transaction.

    Args:
        pool: of the database.
        endings: the attempts that ended.
        late: they end attempts that may not have begun (see `late_attempts`).
        waits: whether to wait for tasks that another transaction locks; else they are `locked`.
        source: of CloudEvents (see `Platform`).

    Raises:
        PostgresUnavailable: nothing took effect.
    """
    columns = _columns(endings)
    details = {ending.fence: ending for ending in endings}

    locked: frozenset[int] = frozenset()

    async def move(connection: Any) -> tuple[list[asyncpg.Record], list[Fence], OutboxEntry]:
        nonlocal locked
        if waits:
            await connection.fetch(query("advance.lock"), columns[0])
        rows = await connection.fetch(query("advance.advance"), *columns, late)
        locked = frozenset(rows.pop()["locked"] if rows and rows[-1]["locked"] else ())
        applied = [Fence(row["id"], row["from_step"], row["from_stage"], row["from_attempt"]) for row in rows]
        outbox = await enqueue(
            connection,
            [
                PendingEvent(_event(row, details[fence]), row["callbacks"], row["events"], row["traceparent"])
                for row, fence in zip(rows, applied, strict=True)
                if row["events"] == "all" or row["state"] in FINAL or row["callbacks"]
            ],
            source,
        )
        return rows, applied, outbox

    with translated():
        rows, applied, outbox = await transacted(pool, move)
    outbox.revocation = _revocation(endings, applied, late=late)
    traces = {f: row["traceparent"] for f, row in zip(applied, rows, strict=True) if row["traceparent"]}
    return Advanced(set(applied), outbox, traces, locked)


async def stages_of(executor: Any, fences: Sequence[Fence]) -> dict[Fence, str]:
    """Finds stale fences whose attempt is current in another stage; returns that stage.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await executor.fetch(
            query("advance.stages_of"),
            [fence.id for fence in fences],
            [fence.step for fence in fences],
            [fence.attempt for fence in fences],
        )
    stages = {AttemptId(row["id"], row["step"], row["attempt"]): row["stage"] for row in rows}
    found = {fence: stages.get(fence.attempt_id) for fence in fences}
    return {fence: stage for fence, stage in found.items() if stage is not None and stage != fence.stage}


def _revocation(endings: Sequence[Ending], applied: Sequence[Fence], *, late: bool) -> Revocation | None:
    """Revokes attempts that a worker may still run: expired or superseded ones."""
    over = {e.fence for e in endings if late or e.outcome is Outcome.EXPIRED}
    attempt_ids = [fence.attempt_id for fence in applied if fence in over] if over else []
    return Revocation("superseded" if late else "expired", attempt_ids) if attempt_ids else None


async def late_attempts(executor: Any, fences: Sequence[Fence]) -> dict[Fence, int]:
    """Finds stale fences whose results may still count; returns the current attempt of each task.

    Their attempts expired, their stages are not finished since, and their types accept late
    results.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await executor.fetch(
            query("advance.late_attempts"),
            [fence.id for fence in fences],
            [fence.step for fence in fences],
            [fence.stage for fence in fences],
            [fence.attempt for fence in fences],
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
        connection,
        [
            PendingEvent(
                _transition(row, State.CANCELLED.value, {}),
                row["callbacks"],
                row["events"],
                row["traceparent"],
            )
            for row in rows
        ],
        source,
    )
    if rows:
        outbox.revocation = Revocation(
            "cancelled", [AttemptId(row["id"], row["step"], row["attempt"]) for row in rows]
        )
    return [row["id"] for row in rows], outbox


def _event(row: asyncpg.Record, ending: Ending) -> Event:
    detail: dict[str, Any] = {}
    if ending.outcome is Outcome.DONE and ending.context is not None:
        detail = ending.context.to_wire("result")
    if ending.error is not None:
        detail["error"] = ending.error.to_wire()
    word = row["state"] if row["state"] in FINAL else _WORD[ending.outcome]
    return _transition(row, word, detail, ending.fence)


def _transition(
    row: asyncpg.Record, word: str, detail: Mapping[str, Any], ended: Fence | None = None
) -> Event:
    # The id contains the attempt that ended, so each transition has its own.
    step, attempt = (ended.step, ended.attempt) if ended else (row["step"], row["attempt"])
    return Event(
        id=f"{row['id']}-{step}-{attempt}-{word}",
        name=f"task.{word}",
        at=row["updated_at"],
        task={
            "id": row["id"],
            "type": row["type"],
            "stage": row["stage"],
            "step": row["step"],
            "attempt": row["attempt"],
            "state": row["state"],
            "idempotency_key": row["idempotency_key"],
            "labels": orjson.loads(row["labels"]) if row["labels"] else {},
        },
        detail=detail,
    )


def _columns(endings: Sequence[Ending]) -> list[list[Any] | None]:
    conclusions = [e.conclusion for e in endings]
    states = [_state(c) for c in conclusions]
    contexts = [e.context for e in endings]
    return [
        [e.fence.id for e in endings],
        [e.fence.step for e in endings],
        [e.fence.stage for e in endings],
        [e.fence.attempt for e in endings],
        [state.value for state in states],
        [c.stage for c in conclusions],
        [c.step for c in conclusions],
        [c.attempt for c in conclusions],
        sparse([c.counts.failures or None for c in conclusions]),
        sparse([c.counts.losses or None for c in conclusions]),
        # Added to the database's clock, which decides when it is due.
        sparse(
            [
                conclusion.delay_s if state is State.SCHEDULED else None
                for conclusion, state in zip(conclusions, states, strict=True)
            ]
        ),
        [c.content_type.value if c else None for c in contexts],
        [c.data if c else None for c in contexts],
        sparse([encode_ref(c.ref) if c else None for c in contexts]),
        sparse([orjson.dumps(e.error.to_wire()).decode() if e.error else None for e in endings]),
        [e.outcome.value for e in endings],
        [e.worker for e in endings],
        [e.started_ms or None for e in endings],
        [e.finished_ms or None for e in endings],
    ]


def _state(conclusion: Conclusion) -> State:
    # A next stage with a delay is scheduled like any other delayed task.
    delayed = conclusion.state is State.READY and conclusion.delay_s > 0
    return State.SCHEDULED if delayed else conclusion.state
