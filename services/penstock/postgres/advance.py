"""Ending attempts: the fenced statement, and the events and callbacks that are written with it.

What this module guarantees: a verdict takes effect only while its task is still in the very attempt the
verdict speaks of; its history, its event and its callbacks are in the same transaction. Publishing them is
`penstock.kafka.outbox`'s business, and the sweeper's after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.contracts import subscription
from penstock.contracts.cloudevent import envelope
from penstock.contracts.context import Context
from penstock.contracts.event import FINAL_EVENTS, Callback, Event, Owed
from penstock.contracts.result import Failure
from penstock.contracts.revocation import Revocation
from penstock.contracts.subscription import Format
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.core.completion import Fence, Outcome, Tally, Verdict
from penstock.core.retry import RetryPolicy
from penstock.core.target import target_of
from penstock.core.task import FINAL, State
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.tasks import encode_ref
from penstock.postgres.types import policy_of
from penstock.settings import Platform

# A callback's record is written again after this long unless its fate is known (see callback.due_at).
CALLBACK_HORIZON_S = 60.0

# An event, the columns `callbacks`, `events` and `traceparent` of its task.
Told = tuple[Event, Sequence[str] | None, str, str | None]

_WORD = {
    Outcome.NEXT: "advanced",
    Outcome.RETRY: "retried",
    Outcome.FAIL: "retried",
    Outcome.EXPIRED: "expired",
}


# Not frozen: at the rate of stages the guard costs more than it guards.
@dataclass(slots=True, kw_only=True)
class Ending:
    """An attempt that ended and what is to become of its task.

    Attributes:
        fence: the attempt.
        outcome: how it ended.
        verdict: where the task goes.
        worker: who reported it, or who was lost.
        context: the new context (next) or the result (done).
        error: why, with fail, retry and expired.
        started_ms: when the handler began, milliseconds since 1970.
        finished_ms: when it ended.
    """

    fence: Fence
    outcome: Outcome
    verdict: Verdict
    worker: str | None
    context: Context | None = None
    error: Failure | None = None
    started_ms: int = 0
    finished_ms: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """The stage a task is in, its vain tries so far, and how many of which kind it may have."""

    type: str
    stage: str
    tally: Tally
    policy: RetryPolicy
    max_losses: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """What took effect: the fence of each ending that still found its attempt, what it owes, and the traceparents of traced tasks."""

    applied: set[Fence]
    owed: Owed
    traces: dict[Fence, str]


async def tallies(executor: Any, ids: Sequence[int]) -> dict[int, Trial]:
    """What is known of the stages that tasks are in, for those about to fail or expire; final ones are left out.

    Safe to read before the fenced write: while the attempt is the same, so are stage and tally.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await executor.fetch(query("advance.tallies"), list(ids))
    return {
        row["id"]: Trial(
            row["type"],
            row["stage"],
            Tally(row["failures"], row["losses"]),
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
    source: str = Platform.event_source,
) -> Advanced:
    """Commits a batch of endings, at most one an attempt, in one transaction.

    Args:
        pool: of the database.
        endings: what ended and what is to become of it.
        late: they end attempts that may not have begun (see `late_attempts`).
        source: of CloudEvents (see `Platform`).

    Raises:
        PostgresUnavailable: nothing took effect.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            rows = await connection.fetch(query("advance.advance"), *_columns(endings), late)
            applied = [
                Fence(row["id"], row["from_step"], row["from_stage"], row["from_attempt"]) for row in rows
            ]
            details = {ending.fence: ending for ending in endings}
            owed = await owe(
                connection,
                [
                    (_event(row, details[fence]), row["callbacks"], row["events"], row["traceparent"])
                    for row, fence in zip(rows, applied, strict=True)
                    if row["events"] == "all" or row["state"] in FINAL or row["callbacks"]
                ],
                source,
            )
            owed.revocation = _revocation(endings, applied, late=late)
    traces = {f: row["traceparent"] for f, row in zip(applied, rows, strict=True) if row["traceparent"]}
    return Advanced(set(applied), owed, traces)


async def stages_of(executor: Any, fences: Sequence[Fence]) -> dict[Fence, str]:
    """Of fences that found nothing: those whose attempt is under way, but in another stage, and that stage.

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
    stages = {(row["id"], row["step"], row["attempt"]): row["stage"] for row in rows}
    found = {fence: stages.get((fence.id, fence.step, fence.attempt)) for fence in fences}
    return {fence: stage for fence, stage in found.items() if stage is not None and stage != fence.stage}


def _revocation(endings: Sequence[Ending], applied: Sequence[Fence], *, late: bool) -> Revocation | None:
    """What somebody may still be working on in vain: expired attempts, and those a late result has made useless."""
    over = {e.fence for e in endings if late or e.outcome is Outcome.EXPIRED}
    keys = [(fence.id, fence.step, fence.attempt) for fence in applied if fence in over] if over else []
    return Revocation("superseded" if late else "expired", keys) if keys else None


async def late_attempts(executor: Any, fences: Sequence[Fence]) -> dict[Fence, int]:
    """Of fences that found nothing, those that may still count, with the attempt that each task is at now.

    Their attempts expired, nobody has finished their stages since, and their types accept late results.

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
) -> tuple[list[int], Owed]:
    """Cancels those of the tasks that are not final; returns them, and what that owes.

    Args:
        pool: of the database.
        ids: of the tasks.
        source: of CloudEvents (see `Platform`).

    Raises:
        PostgresUnavailable: nothing took effect.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            return await cancel_within(connection, ids, source=source)


async def cancel_within(
    connection: Any, ids: Sequence[int], *, source: str = Platform.event_source
) -> tuple[list[int], Owed]:
    """As `cancel`, in the transaction under way.

    Args:
        connection: inside a transaction, and inside `translated`.
        ids: of the tasks.
        source: of CloudEvents (see `Platform`).
    """
    rows = await connection.fetch(query("tasks.cancel"), list(ids))
    owed = await owe(
        connection,
        [
            (_transition(row, State.CANCELLED.value, {}), row["callbacks"], row["events"], row["traceparent"])
            for row in rows
        ],
        source,
    )
    if rows:
        owed.revocation = Revocation("cancelled", [(row["id"], row["step"], row["attempt"]) for row in rows])
    return [row["id"] for row in rows], owed


async def owe(connection: Any, events: Sequence[Told], source: str = Platform.event_source) -> Owed:
    """Writes events and their callbacks into the transaction under way.

    The topic gets what the task's `events` asks for, each target what it asks for itself: neither is
    bound by the other, and what nobody asks for is not written at all.

    Args:
        connection: inside the transaction of the transitions.
        events: with the targets of their tasks.
        source: of CloudEvents (see `Platform`).
    """
    owed = Owed()
    for event, targets, asked, traceparent in events:
        published = asked == "all" or event.name in FINAL_EVENTS
        # Numbered before they are chosen: made from the event and the place among the task's targets, so that the same
        # transition can never owe the same call twice.
        wanted = [
            (f"msg_{event.id}-{number}", target)
            for number, target in enumerate(map(subscription.of, subscription.from_columns(targets)))
            if target.wants(event.name, asked)
        ]
        if not published and not wanted:
            continue
        body = event.encode()
        if published:
            owed.keys.append(str(event.task["id"]).encode())
            owed.events.append(body)
        owed.callbacks += [
            Callback(
                id=callback_id,
                target=target_of(event.task["type"], target.url),
                task_id=event.task["id"],
                attempt=0,
                body=envelope(event, source) if target.format is Format.CLOUDEVENTS else body,
                headers=_traced(target.sent_headers(), traceparent),
                ordered=target.ordered,
            )
            for callback_id, target in wanted
        ]
    if owed.events:
        owed.outbox_id = await connection.fetchval(query("outbox.owe_events"), owed.keys, owed.events)
    if owed.callbacks:
        await connection.execute(query("outbox.owe_callbacks"), *callback_columns(owed.callbacks))
    return owed


def _traced(headers: dict[str, str] | None, traceparent: str | None) -> dict[str, str] | None:
    """The headers of a call, with that of its trace unless the submitter has said another."""
    return headers if traceparent is None else {"traceparent": traceparent, **(headers or {})}


def callback_columns(callbacks: Sequence[Callback], due_in_s: float = CALLBACK_HORIZON_S) -> list[Any]:
    """What `outbox.owe_callbacks` takes.

    Args:
        callbacks: in the order of their transitions.
        due_in_s: seconds until their records are written again unless their fate is known.
    """
    return [
        [c.id for c in callbacks],
        [c.target.url for c in callbacks],
        [c.task_id for c in callbacks],
        [c.body for c in callbacks],
        due_in_s,
        _sparse([orjson.dumps(c.headers).decode() if c.headers else None for c in callbacks]),
        _sparse([c.ordered or None for c in callbacks]),
        _sparse([None if c.target.namespace == DEFAULT_NAMESPACE else c.target.namespace for c in callbacks]),
    ]


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
    # Named after the attempt that ended, which is in no other transition.
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


def _sparse(column: list[Any]) -> list[Any] | None:
    """A column, or None when it has nothing but None: `unnest` fills it up, and nobody has to encode it."""
    return column if any(value is not None for value in column) else None


def _columns(endings: Sequence[Ending]) -> list[list[Any] | None]:
    verdicts = [e.verdict for e in endings]
    states = [_state(v) for v in verdicts]
    contexts = [e.context for e in endings]
    return [
        [e.fence.id for e in endings],
        [e.fence.step for e in endings],
        [e.fence.stage for e in endings],
        [e.fence.attempt for e in endings],
        [state.value for state in states],
        [v.stage for v in verdicts],
        [v.step for v in verdicts],
        [v.attempt for v in verdicts],
        _sparse([v.tally.failures or None for v in verdicts]),
        _sparse([v.tally.losses or None for v in verdicts]),
        # Added to the database's own clock, by which it is released.
        _sparse(
            [
                verdict.delay_s if state is State.SCHEDULED else None
                for verdict, state in zip(verdicts, states, strict=True)
            ]
        ),
        [c.content_type.value if c else None for c in contexts],
        [c.data if c else None for c in contexts],
        _sparse([encode_ref(c.ref) if c else None for c in contexts]),
        _sparse([orjson.dumps(e.error.to_wire()).decode() if e.error else None for e in endings]),
        [e.outcome.value for e in endings],
        [e.worker for e in endings],
        [e.started_ms or None for e in endings],
        [e.finished_ms or None for e in endings],
    ]


def _state(verdict: Verdict) -> State:
    # A next stage that is not to begin yet waits like any other delayed task.
    return State.SCHEDULED if verdict.state is State.READY and verdict.delay_s > 0 else verdict.state
