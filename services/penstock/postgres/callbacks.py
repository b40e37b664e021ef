"""Deliveries as PostgreSQL knows them: attempts are numbered and written down before they are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import orjson

from penstock.contracts.event import Callback
from penstock.core.target import TargetId
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.session import Session
from penstock.postgres.targets import columns

# Notified with the seconds until a retry is due, for the process that releases them.
DUE_CHANNEL = "penstock_callback_due"

# (callback id, attempts made before)
Turn = tuple[str, int]


# Not frozen: there is one for each call.
@dataclass(slots=True, kw_only=True)
class Settled:
    """What became of an attempt.

    Attributes:
        id: of the callback.
        attempt: which one, from 1.
        state: delivered, dead, or pending when there is to be another.
        error: what the attempt met, as JSON; None when it was delivered.
        due_in_s: seconds until the next one, while pending.
        spent: attempts up to this one that its schedule does not count.
    """

    id: str
    attempt: int
    state: str
    error: str | None = None
    due_in_s: float = 0.0
    spent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What has become of turns that may have to wait for one another.

    Attributes:
        turns: that nobody had taken before, as `begin` returns them.
        behind: that wait for an earlier one; `overtaken` is to be asked whether that has ended meanwhile.
        held: that wait for one that is held, and are held themselves from now on.
    """

    turns: dict[Turn, int]
    behind: list[Turn] = field(default_factory=list)
    held: list[Turn] = field(default_factory=list)


async def begin(
    pool: asyncpg.Pool[asyncpg.Record], turns: Sequence[Turn], *, horizon_s: float
) -> dict[Turn, int]:
    """Takes the right to make attempts; returns the turns that nobody had taken before.

    With each stands how many attempts its schedule does not count: 0 unless it was replayed, or some were made while
    the service suspected itself.

    Args:
        pool: of the database.
        turns: no two of them alike.
        horizon_s: seconds after which the attempt is made again unless its fate is known.

    Raises:
        PostgresUnavailable: it is not known which were taken; those are made again after the horizon.
    """
    with translated():
        rows = await pool.fetch(
            query("callbacks.begin"), [turn[0] for turn in turns], [turn[1] for turn in turns], horizon_s
        )
    return {(row["id"], row["attempt"] - 1): row["spent"] for row in rows}


async def begin_in_order(
    pool: asyncpg.Pool[asyncpg.Record], turns: Sequence[Turn], *, horizon_s: float
) -> Begun:
    """As `begin`; an ordered one whose task still owes its target an earlier one is not begun and comes again.

    Raises:
        PostgresUnavailable: as `begin`.
    """
    with translated():
        rows = await pool.fetch(
            query("callbacks.begin_in_order"),
            [turn[0] for turn in turns],
            [turn[1] for turn in turns],
            horizon_s,
        )
    return Begun(
        turns={(row["id"], row["attempt"] - 1): row["spent"] for row in rows if row["waits"] is None},
        behind=[(row["id"], row["attempt"]) for row in rows if row["waits"] == "pending"],
        held=[(row["id"], row["attempt"]) for row in rows if row["waits"] == "held"],
    )


async def overtaken(pool: asyncpg.Pool[asyncpg.Record], behind: Sequence[Turn]) -> bool:
    """A second look at those that `begin_in_order` put behind others; whether some are due now, since those have ended.

    Raises:
        PostgresUnavailable: perhaps nothing was written; write it again.
    """
    with translated():
        rows = await pool.fetch(
            query("callbacks.overtaken"), [turn[0] for turn in behind], [turn[1] for turn in behind]
        )
    return bool(rows)


async def hold(executor: Any, turns: Sequence[Turn], spent: Sequence[int | None]) -> None:
    """Takes callbacks off the topics until their targets may have them.

    Args:
        executor: a pool or a connection.
        turns: which.
        spent: of each whose last attempt was begun and is not made, how many attempts its schedule does not count by now.

    Raises:
        PostgresUnavailable: perhaps nothing was written; write it again.
    """
    with translated():
        await executor.execute(
            query("callbacks.hold"), [turn[0] for turn in turns], [turn[1] for turn in turns], list(spent)
        )


async def grant(executor: Any, wanted: Mapping[TargetId, int]) -> dict[TargetId, int]:
    """Lets the first few that are held for each target go: they are due now; returns how many of which.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        rows = await executor.fetch(query("callbacks.grant"), *columns(wanted), list(wanted.values()))
    return {TargetId(row["namespace"], row["target"]): row["count"] for row in rows}


async def settle(
    pool: asyncpg.Pool[asyncpg.Record], settled: Sequence[Settled], ordered: Collection[str] = ()
) -> None:
    """Writes down what became of attempts; those that were not the latest any more change nothing.

    Args:
        pool: of the database.
        settled: no two of one callback.
        ordered: those that have ended and for which others may wait: they are due now.

    Raises:
        PostgresUnavailable: perhaps nothing was written; write it again.
    """
    arguments = (
        [s.id for s in settled],
        [s.attempt for s in settled],
        [s.state for s in settled],
        [s.error for s in settled],
        [s.due_in_s for s in settled],
        [s.spent for s in settled],
    )
    with translated():
        if not ordered:
            await pool.fetch(query("callbacks.settle"), *arguments)
            return
        async with pool.acquire() as connection, connection.transaction():
            rows = await connection.fetch(query("callbacks.settle"), *arguments)
            ended = [row["id"] for row in rows if row["id"] in ordered]
            await connection.execute(query("callbacks.follow"), ended)


async def postpone(
    pool: asyncpg.Pool[asyncpg.Record],
    turns: Sequence[Turn],
    due_in_s: Sequence[float],
    spent: Sequence[int | None],
) -> None:
    """Puts back turns that were not taken, or not made: each record is written again in so many seconds.

    Args:
        pool: of the database.
        turns: which.
        due_in_s: of each.
        spent: of each, as in `hold`.

    Raises:
        PostgresUnavailable: perhaps nothing was written; write it again.
    """
    with translated():
        await pool.execute(
            query("callbacks.postpone"),
            [turn[0] for turn in turns],
            [turn[1] for turn in turns],
            list(due_in_s),
            list(spent),
        )


async def announce(executor: Any, due_in_s: float) -> None:
    """Tells whoever releases that something is due in so many seconds.

    Raises:
        PostgresUnavailable: nobody was told; the releaser looks by itself from time to time.
    """
    with translated():
        await executor.execute(query("callbacks.announce"), str(due_in_s))


async def own(session: Session) -> bool:
    """Takes the right to release for as long as the session lives; False when another process has it."""
    return bool(await session.fetchval("outbox.sweep", "callbacks"))


async def due(session: Session, limit: int, *, horizon_s: float) -> list[tuple[Callback, bool]]:
    """Callbacks whose time has come, and whether they go the diverted way.

    They come again after `horizon_s` seconds unless begun by then.

    Raises:
        SessionLost: the right to release is gone.
        PostgresUnavailable: the server refused for now.
    """
    rows = await session.fetch("callbacks.due", limit, horizon_s)
    return [
        (
            Callback(
                id=row["id"],
                target=TargetId(row["namespace"], row["target"]),
                task_id=row["task_id"],
                attempt=row["attempt"],
                body=row["body"],
                headers=orjson.loads(row["headers"]) if row["headers"] else None,
                ordered=row["ordered"],
            ),
            row["diverted"],
        )
        for row in rows
    ]


async def next_due_s(session: Session) -> float | None:
    """Seconds until something is due, negative when it is overdue; None when nothing is pending.

    Raises:
        SessionLost, PostgresUnavailable: as `due`.
    """
    wait_s: float | None = await session.fetchval("callbacks.next_due")
    return wait_s
