"""The claims of schedules that are due, and the outcome of their ticks.

A schedule is locked from its claim to the end of the transaction, so two replicas never decide
about the same one at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.core.schedule_policy import Skip
from penstock.postgres.connection import translated
from penstock.postgres.queries import execute, fetch, fetchrow
from penstock.postgres.schedule_rows import Schedule, from_row
from penstock.postgres.schedules import record_skips


@dataclass(slots=True)
class Advance:
    """The outcome of the ticks of a locked schedule.

    Attributes:
        schedule: its name.
        position: ticks up to this moment are decided.
        next_tick: the first tick after it.
        next_at: when the schedule is due again; None is never.
        queued: ticks that wait.
        queue_at: when the next of them may start.
        started: ticks that started a flow.
        skips: ticks that did not.
        decided: whether a tick was decided, which replaces the error.
        error: why the latest tick could not start.
    """

    schedule: str
    position: datetime
    next_tick: datetime | None
    next_at: datetime | None
    queued: Sequence[datetime] = ()
    queue_at: datetime | None = None
    started: list[datetime] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    decided: bool = False
    error: str | None = None


async def claim(connection: Any, limit: int) -> list[Schedule]:
    """Locks schedules that are due, those first that have been due the longest.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    rows = await fetch(connection, "schedules.claim", limit)
    return [from_row(row) for row in rows]


async def claim_queued(connection: Any, names: Collection[str] | None, limit: int) -> list[Schedule]:
    """Locks schedules with queued ticks and without a running flow.

    Args:
        connection: in a transaction.
        names: only these; None is all.
        limit: most schedules.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    rows = await fetch(connection, "schedules.claim_queued", None if names is None else list(names), limit)
    return [from_row(row) for row in rows]


async def running(connection: Any, names: Sequence[str]) -> set[str]:
    """Those schedules that have a running flow, without flows of backfills and reruns.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    if not names:
        return set()
    with translated():
        return {row["name"] for row in await fetch(connection, "schedules.running", list(names))}


async def cancel_running(connection: Any, names: Sequence[str]) -> None:
    """Cancels the running flows of schedules, without those of backfills.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    if names:
        await execute(connection, "schedules.cancel_running", list(names))


async def advance(connection: Any, advances: Sequence[Advance]) -> None:
    """Writes what became of the ticks of locked schedules.

    Raises:
        PostgresUnavailable: nothing is written.
    """
    with translated():
        await execute(
            connection,
            "schedules.advance",
            name=[each.schedule for each in advances],
            position=[each.position for each in advances],
            next_tick=[each.next_tick for each in advances],
            next_at=[each.next_at for each in advances],
            # PostgreSQL has no arrays of arrays of different lengths.
            queued=["{" + ",".join(tick.isoformat() for tick in each.queued) + "}" for each in advances],
            queue_at=[each.queue_at for each in advances],
            last_tick=[max(each.started, default=None) for each in advances],
            started=[len(each.started) for each in advances],
            error=[each.error for each in advances],
            decided=[each.decided for each in advances],
        )
        await record_skips(connection, ((each.schedule, skip) for each in advances for skip in each.skips))


@dataclass(frozen=True, slots=True)
class Outlook:
    """The next schedule and backfill that are due.

    Attributes:
        schedule_s: seconds until a schedule is due; None if none will be.
        backfill_s: seconds until a backfill is due; None if none runs.
        has_queue: whether ticks are queued.
    """

    schedule_s: float | None
    backfill_s: float | None
    has_queue: bool

    @property
    def due_s(self) -> float:
        """Seconds until either is due."""
        due = (self.schedule_s, self.backfill_s)
        return min((seconds for seconds in due if seconds is not None), default=float("inf"))


async def look(executor: Any) -> Outlook:
    """When the next schedule or backfill is due.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    row = await fetchrow(executor, "schedules.look")
    return Outlook(row["schedule_s"], row["backfill_s"], row["has_queue"])


async def prune_skips(executor: Any, days: int, limit: int) -> None:
    """Removes old records of skipped ticks.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    await execute(executor, "schedules.prune_skips", days, limit)
