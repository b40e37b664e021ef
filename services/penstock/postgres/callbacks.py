"""Callbacks in PostgreSQL: claims of attempts, and their outcomes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import orjson

from penstock.contracts.callback_end import EndRecord
from penstock.contracts.event import Callback
from penstock.core.target import TargetId
from penstock.postgres import callback_outbox, targets
from penstock.postgres.callback_outbox import OutboxRow
from penstock.postgres.connection import translated
from penstock.postgres.queries import bound, execute, fetch, query
from penstock.postgres.repeating import transacted
from penstock.postgres.session import Session
from penstock.postgres.targets import target_columns

# Notified with the seconds until a callback is due, for the active requeuer.
DUE_CHANNEL = "penstock_callback_due"

# (callback id, attempts recorded before)
CallbackAttempt = tuple[str, int]


# Not frozen: there is one per call, and freezing costs time.
@dataclass(slots=True, kw_only=True)
class OutcomeRow:
    """The outcome of an attempt.

    Attributes:
        id: of the callback.
        attempt: number of the attempt, from 1.
        state: delivered, dead, or pending when another attempt follows.
        error: the failure as JSON; None when delivered.
        due_in_s: seconds until the next attempt, when pending.
        uncounted: attempts up to this one that the retry schedule does not count.
    """

    id: str
    attempt: int
    state: str
    error: str | None = None
    due_in_s: float = 0.0
    uncounted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The result of claiming attempts of ordered callbacks.

    Attributes:
        granted: the attempts to make, as `claim` returns them.
        behind: attempts that wait for an earlier callback; `requeue_unblocked` checks whether that
            has ended meanwhile.
        held: attempts behind an earlier callback that is held; they are held from now on.
    """

    granted: dict[CallbackAttempt, int]
    behind: list[CallbackAttempt] = field(default_factory=list)
    held: list[CallbackAttempt] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCounts:
    """How many callbacks there are.

    Attributes:
        pending: due now or later.
        overdue: of the pending ones: those that were not claimed in time.
        held: until their target may be called.
        dead: not delivered, and in no history yet.
        held_s: seconds for which the oldest held one has been held; 0 without one.
    """

    pending: int
    overdue: int
    held: int
    dead: int
    held_s: float


async def claim(
    pool: asyncpg.Pool[asyncpg.Record], attempts: Sequence[CallbackAttempt], *, horizon_s: float
) -> dict[CallbackAttempt, int]:
    """Claims attempts: of those that no process has claimed before, records the number.

    Args:
        pool: of the database.
        attempts: distinct attempts.
        horizon_s: seconds after which another attempt is made unless the outcome is recorded by
            then.

    Returns:
        The claimed attempts, each with the number of attempts that the retry schedule does not
        count: 0 unless the callback was replayed, or called in self-check mode.

    Raises:
        PostgresUnavailable: some may be claimed; those are attempted again after the horizon.
    """
    rows = await fetch(pool, "callbacks.claim", *_columns(attempts), horizon_s)
    return {(row["id"], row["attempt"] - 1): row["spent"] for row in rows}


async def claim_in_order(
    pool: asyncpg.Pool[asyncpg.Record], attempts: Sequence[CallbackAttempt], *, horizon_s: float
) -> Claims:
    """As `claim`, but an ordered callback waits for earlier ones of its task and target.

    Raises:
        PostgresUnavailable: as `claim`.
    """
    rows = await fetch(pool, "callbacks.claim_in_order", *_columns(attempts), horizon_s)
    return Claims(
        granted={(row["id"], row["attempt"] - 1): row["spent"] for row in rows if row["waits"] is None},
        behind=[(row["id"], row["attempt"]) for row in rows if row["waits"] == "pending"],
        held=[(row["id"], row["attempt"]) for row in rows if row["waits"] == "held"],
    )


async def requeue_unblocked(pool: asyncpg.Pool[asyncpg.Record], behind: Sequence[CallbackAttempt]) -> bool:
    """Makes callbacks due whose earlier one has ended since `claim_in_order`.

    Returns:
        Whether there were any.

    Raises:
        PostgresUnavailable: perhaps nothing was written; safe to repeat.
    """
    rows = await fetch(pool, "callbacks.requeue_unblocked", *_columns(behind))
    return bool(rows)


async def hold(
    executor: Any,
    attempts: Sequence[CallbackAttempt],
    uncounted: Sequence[int | None],
    diverted: Sequence[bool] | None = None,
) -> None:
    """Holds callbacks: their records are not published until their targets are drained.

    Args:
        executor: a pool or a connection.
        attempts: the callbacks, each with its attempts so far.
        uncounted: for a callback with a claimed attempt that is not made, the attempts that the
            retry schedule does not count from now on; else None.
        diverted: whether each is drained to the diverted path (all, by default), or only waits for
            callbacks before it (`read_queued`).

    Raises:
        PostgresUnavailable: perhaps nothing was written; safe to repeat.
    """
    if diverted is None:
        diverted = [True] * len(attempts)
    ids, numbers = _columns(attempts)
    await execute(
        executor, "callbacks.hold", id=ids, attempt=numbers, spent=list(uncounted), diverted=list(diverted)
    )


async def read_queued(executor: Any, target: TargetId, after: int, limit: int) -> list[tuple[int, Callback]]:
    """The next callbacks that were held until a target has called those before them.

    Args:
        executor: a pool or a connection.
        target: the target.
        after: number of the last callback that was read; 0 for the first.
        limit: most callbacks.

    Returns:
        Each with its number in the order of creation.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(
        executor,
        "callbacks.read_queued",
        namespace=target.namespace,
        target=target.url,
        after=after,
        limit=limit,
    )
    return [(row["seq"], callback_in(row, target)) for row in rows]


async def drain_held(
    executor: Any, wanted: Mapping[TargetId, int], queued: Collection[TargetId] = ()
) -> dict[TargetId, int]:
    """Makes the oldest held callbacks of each target due; returns how many of each.

    Args:
        executor: a pool or a connection.
        wanted: most callbacks of each target.
        queued: targets of which `read_queued` reads the callbacks that are not diverted.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    namespaces, urls = target_columns(wanted)
    rows = await fetch(
        executor,
        "callbacks.drain_held",
        namespace=namespaces,
        target=urls,
        most=list(wanted.values()),
        every=[target not in queued for target in wanted],
    )
    return {TargetId(row["namespace"], row["target"]): row["count"] for row in rows}


async def record_outcomes(
    pool: asyncpg.Pool[asyncpg.Record],
    outcomes: Sequence[OutcomeRow],
    records: Iterable[EndRecord] = (),
    *,
    ordered: Collection[str] = (),
    gone: Mapping[TargetId, str] | None = None,
    owner: str = "",
) -> list[OutboxRow]:
    """Records the outcomes of attempts; the outcome of an outdated attempt changes nothing.

    Args:
        pool: of the database.
        outcomes: no two of one callback.
        records: about callbacks that end; they are enqueued.
        ordered: ids of ended callbacks that others may wait for; the next ones become due.
        gone: targets to disable in the same transaction, each with the reason.
        owner: the process that owns these targets.

    Returns:
        What was enqueued, to be published.

    Raises:
        PostgresUnavailable: perhaps nothing was written; safe to repeat.
    """
    assigned = callback_outbox.assign(records)
    statement = bound(
        "callbacks.record_outcomes",
        id=[row.id for row in outcomes],
        attempt=[row.attempt for row in outcomes],
        state=[row.state for row in outcomes],
        error=[row.error for row in outcomes],
        due_in=[row.due_in_s for row in outcomes],
        spent=[row.uncounted for row in outcomes],
        row=[row_id for row_id, _record in assigned],
        callback_id=[record.callback_id for _id, record in assigned],
        topic=[record.topic for _id, record in assigned],
        key=[record.key for _id, record in assigned],
        value=[record.value for _id, record in assigned],
    )

    async def record(connection: Any) -> set[str]:
        rows = await connection.fetch(*statement)
        ended = {row["id"] for row in rows}
        if ordered:
            await connection.execute(query("callbacks.requeue_next"), [*ended.intersection(ordered)])
        if gone:
            await targets.disable_gone(connection, gone, owner)
        return ended

    with translated():
        ended = await (transacted(pool, record) if ordered or gone else record(pool))
    return callback_outbox.rows_of(assigned, ended)


async def postpone(
    pool: asyncpg.Pool[asyncpg.Record],
    attempts: Sequence[CallbackAttempt],
    due_in_s: Sequence[float],
    uncounted: Sequence[int | None],
) -> None:
    """Postpones callbacks: their records are published again when they are due.

    Args:
        pool: of the database.
        attempts: the callbacks, each with its attempts so far.
        due_in_s: seconds until each is due.
        uncounted: as in `hold`.

    Raises:
        PostgresUnavailable: perhaps nothing was written; safe to repeat.
    """
    ids, numbers = _columns(attempts)
    await execute(
        pool,
        "callbacks.postpone",
        id=ids,
        attempt=numbers,
        due_in=list(due_in_s),
        spent=list(uncounted),
    )


async def notify_due(executor: Any, due_in_s: float) -> None:
    """Notifies the active requeuer that a callback is due in so many seconds.

    Raises:
        PostgresUnavailable: no notification was sent; the requeuer also polls from time to time.
    """
    await execute(executor, "callbacks.notify_due", str(due_in_s))


async def acquire_requeuer_lock(session: Session) -> bool:
    """Acquires the requeuer's lock for the session; False when another process holds it."""
    return bool(await session.fetchval("outbox.sweep", "callbacks"))


async def take_due(session: Session, limit: int, *, horizon_s: float) -> list[tuple[Callback, bool]]:
    """Takes due callbacks, each with whether it is diverted, and postpones them.

    Args:
        session: holds the requeuer's lock.
        limit: most callbacks to take.
        horizon_s: seconds after which a record is published again unless its attempt is claimed by
            then.

    Raises:
        SessionLost: the lock is gone.
        PostgresUnavailable: the server refused for now.
    """
    rows = await session.fetch("callbacks.take_due", limit, horizon_s)
    return [(callback_in(row, TargetId(row["namespace"], row["target"])), row["diverted"]) for row in rows]


def callback_in(row: asyncpg.Record, target: TargetId) -> Callback:
    """The callback of a row, with its attempts so far."""
    return Callback(
        id=row["id"],
        target=target,
        task_id=row["task_id"],
        attempt=row["attempt"],
        body=row["body"],
        headers=orjson.loads(row["headers"]) if row["headers"] else None,
        ordered=row["ordered"],
    )


async def count_states(session: Session, *, most: int, overdue_s: float) -> StateCounts:
    """Counts callbacks by state.

    Args:
        session: holds the requeuer's lock.
        most: of each state, counts no more.
        overdue_s: seconds that a callback may be due, or published without a claim.

    Raises:
        SessionLost, PostgresUnavailable: as `take_due`.
    """
    [row] = await session.fetch("callbacks.count_states", most, overdue_s)
    return StateCounts(**row)


async def next_due_s(session: Session) -> float | None:
    """Seconds until a callback is due, negative when it is overdue; None when none is pending.

    Raises:
        SessionLost, PostgresUnavailable: as `take_due`.
    """
    wait_s: float | None = await session.fetchval("callbacks.next_due")
    return wait_s


def _columns(attempts: Sequence[CallbackAttempt]) -> tuple[list[str], list[int]]:
    """Ids and attempts, as the statements take them."""
    return [attempt[0] for attempt in attempts], [attempt[1] for attempt in attempts]
