"""Ends attempts: the fenced statement, and the events and callbacks that are written with it.

An ending takes effect only while its attempt is the task's current one. Its history, its event and
its callbacks are in the same transaction. `kafka.processing.outbox` publishes them, and after a
crash the sweeper does. One module, because all of this is one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.contracts.context import Context
from penstock.contracts.event import Event, OutboxEntry
from penstock.contracts.result import Failure, StageResult, traceback_end
from penstock.contracts.revocation import Revocation
from penstock.contracts.task_type import policy_of
from penstock.core.attempt import AttemptId
from penstock.core.completion import SUSPENDING, Conclusion, FailureCounts, Fence, Outcome
from penstock.core.endings import RetryState, conclude_result, stored_state
from penstock.core.flow.waiting import waiting_definition
from penstock.core.task import FINAL, State
from penstock.postgres.connection import translated
from penstock.postgres.outbox import PendingEvent, enqueue, sparse
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


# Not frozen: constructing a frozen dataclass is slower, and one is made for each stage that ends.
@dataclass(slots=True, kw_only=True)
class Ending:
    """An attempt that ended, and where its task goes.

    Attributes:
        fence: the attempt.
        outcome: how it ended.
        conclusion: where the task goes.
        worker: the worker that reported it, or that was lost.
        context: the new context (next), the result (done), or what the task waits for (spawn,
            wait).
        next_stage: the stage after waiting (spawn, wait).
        terms: of waiting (spawn, wait).
        error: why, with fail, retry, handed_back and expired.
        started_ms: when the handler began, milliseconds since 1970.
        finished_ms: when it ended.
    """

    fence: Fence
    outcome: Outcome
    conclusion: Conclusion
    worker: str | None
    context: Context | None = None
    next_stage: str | None = None
    terms: Mapping[str, Any] | None = None
    error: Failure | None = None
    started_ms: int = 0
    finished_ms: int = 0

    @classmethod
    def of(
        cls, worker: str, result: StageResult, state: RetryState | None, chance: Callable[[], float]
    ) -> Ending:
        """The end of an attempt by its result.

        Args:
            worker: that reported it.
            result: of the attempt.
            state: with a result for which `counts_failures` is true.
            chance: random numbers from 0 to 1, for the jitter.
        """
        conclusion = conclude_result(
            result.fence,
            result.outcome,
            state,
            next_stage=result.next_stage,
            delay_s=None if result.delay_ms is None else result.delay_ms / 1000,
            permanent=result.permanent,
            max_attempts=result.max_attempts,
            no_handler=result.no_handler,
            chance=chance,
        )
        return cls(
            fence=result.fence,
            outcome=result.outcome,
            conclusion=conclusion,
            worker=worker,
            context=result.context,
            next_stage=result.next_stage,
            terms=result.terms,
            error=result.error_of(conclusion),
            started_ms=result.started_ms,
            finished_ms=result.finished_ms,
        )


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
    late: bool = False,
    waits: bool = True,
    source: str = Platform.event_source,
) -> Advanced:
    """Commits a batch of endings, at most one an attempt, each with its events.

    Args:
        pool: of the database.
        endings: the attempts that ended.
        late: they end attempts that may not have begun (see `late_attempts`).
        waits: whether to wait for tasks that another transaction locks; else they are `locked`.
        source: of CloudEvents (see `Platform`).

    Raises:
        PostgresUnavailable: those that took effect are stale when they are committed again.
    """
    columns = _columns(endings)
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
            rest_columns = columns if len(rest) == len(endings) else _columns(rest)

            async def move(connection: Any) -> tuple[frozenset[int], list[asyncpg.Record], OutboxEntry]:
                if waits:
                    await connection.fetch(query("advance.lock"), rest_columns["id"])
                moved = await connection.fetch(
                    *bound("advance.advance", **rest_columns, late=late, alone=False)
                )
                locked = frozenset(moved.pop()["locked"] if moved and moved[-1]["locked"] else ())
                return locked, moved, await _enqueue(connection, moved, details, source)

            locked, with_events, outbox = await transacted(pool, move)
    rows += with_events
    applied = [_fence(row) for row in rows]
    outbox.revocation = _revocation(endings, applied, late=late)
    traces = {f: row["traceparent"] for f, row in zip(applied, rows, strict=True) if row["traceparent"]}
    return Advanced(set(applied), outbox, traces, locked)


def _fence(row: asyncpg.Record) -> Fence:
    """The attempt that ended, from a row of `advance.advance`."""
    return Fence(row["id"], row["from_step"], row["from_stage"], row["from_attempt"])


async def _enqueue(
    connection: Any, rows: Sequence[asyncpg.Record], details: Mapping[Fence, Ending], source: str
) -> OutboxEntry:
    """Writes the waits, events and callbacks of tasks that have moved, in their transaction."""
    ended = [details[_fence(row)] for row in rows]
    if suspended := [ending for ending in ended if ending.outcome in SUSPENDING]:
        await suspend(connection, suspended)
    return await enqueue(
        connection,
        [
            end_event(row, ending)
            for row, ending in zip(rows, ended, strict=True)
            if row["events"] == "all" or row["state"] in FINAL or row["callbacks"]
        ],
        source,
    )


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
    event = Event(
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
            **({"flow": flow_of(orjson.loads(row["flow"]))} if row["flow"] else {}),
        },
        detail=detail,
    )
    return PendingEvent(event, row["callbacks"], row["events"], row["traceparent"])


def _columns(endings: Sequence[Ending]) -> dict[str, list[Any] | None]:
    conclusions = [e.conclusion for e in endings]
    states = [stored_state(c) for c in conclusions]
    contexts = [e.context for e in endings]
    return {
        "id": [e.fence.id for e in endings],
        "step": [e.fence.step for e in endings],
        "stage": [e.fence.stage for e in endings],
        "attempt": [e.fence.attempt for e in endings],
        "to_state": [state.value for state in states],
        "to_stage": [c.stage for c in conclusions],
        "to_step": [c.step for c in conclusions],
        "to_attempt": [c.attempt for c in conclusions],
        "failures": sparse([c.counts.failures or None for c in conclusions]),
        "losses": sparse([c.counts.losses or None for c in conclusions]),
        # Added to the database's clock, which decides when it is due.
        "delay_s": sparse(
            [
                conclusion.delay_s if state is State.SCHEDULED else None
                for conclusion, state in zip(conclusions, states, strict=True)
            ]
        ),
        "content_type": [c.content_type.value if c else None for c in contexts],
        "context": [c.data if c else None for c in contexts],
        "context_ref": sparse([encode_ref(c.ref) if c else None for c in contexts]),
        "error": sparse([_error(e) if e.error else None for e in endings]),
        "outcome": [e.outcome.value for e in endings],
        "worker": [e.worker for e in endings],
        "started_ms": [e.started_ms or None for e in endings],
        "finished_ms": [e.finished_ms or None for e in endings],
    }


def _error(ending: Ending) -> str:
    """The column `error`."""
    assert ending.error is not None
    wire = ending.error.to_wire()
    seconds = ending.conclusion.unhandled_s
    return orjson.dumps({**wire, "unhandled_s": round(seconds, 3)} if seconds else wire).decode()
