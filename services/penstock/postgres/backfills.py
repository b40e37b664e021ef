"""Backfills: runs of a schedule over a past range, a batch at a time.

What this module guarantees: each batch writes its flows and the position of the backfill in one
transaction, so a tick of a backfill is started once, after any crash. Replicas that run the same
backfill take turns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import asyncpg

from penstock.postgres.connection import translated
from penstock.postgres.queries import execute, fetch, fetchrow, fetchval

STATES = ("running", "done", "stopped", "failed")


async def create(
    connection: Any,
    *,
    schedule: str,
    since: datetime,
    until: datetime,
    total: int,
    position: datetime,
    rate: float | None,
    max_running: int | None,
    rerun: bool,
    asked_by: str,
    actor: str | None,
) -> asyncpg.Record:
    """Stores a backfill; the service `flows` runs it.

    Raises:
        PostgresUnavailable: the row may be inserted or not.
    """
    row: asyncpg.Record = await fetchrow(
        connection,
        "backfills.create",
        schedule=schedule,
        since=since,
        until=until,
        rate=rate,
        max_running=max_running,
        rerun=rerun,
        position=position,
        total=total,
        asked_by=asked_by,
        actor=actor,
    )
    return row


async def get(executor: Any, backfill_id: int) -> asyncpg.Record | None:
    """A backfill; None if there is none.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    row: asyncpg.Record | None = await fetchrow(executor, "backfills.get", backfill_id)
    return row


async def find(
    executor: Any,
    *,
    schedule: str | None,
    namespaces: Collection[str] | None,
    before: int | None,
    limit: int,
) -> list[asyncpg.Record]:
    """Backfills, the latest first.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    visible = None if namespaces is None else sorted(namespaces)
    return await fetch(
        executor, "backfills.list", schedule=schedule, visible=visible, before=before, limit=limit
    )


async def counts(executor: Any, backfill_ids: Sequence[int]) -> dict[int, dict[str, int]]:
    """The number of flows of each backfill, by their state.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    found: dict[int, dict[str, int]] = {backfill_id: {} for backfill_id in backfill_ids}
    with translated():
        for row in await fetch(executor, "backfills.counts", list(backfill_ids)):
            found[row["backfill"]][row["status"]] = row["flows"]
    return found


async def stop(connection: Any, backfill_id: int, stopped_by: str, *, cancel: bool) -> None:
    """Stops a backfill: it starts no further flow.

    Args:
        connection: in a transaction.
        backfill_id: of the backfill.
        stopped_by: who stops it.
        cancel: whether its running flows are cancelled, too; also if it has ended.

    Raises:
        PostgresUnavailable: the backfill may still run; repeating the call is safe.
    """
    with translated():
        # Waits for a batch that is being started, so that its flows are cancelled, too.
        await execute(connection, "backfills.stop", backfill_id, stopped_by)
        if cancel:
            await execute(connection, "backfills.cancel_running", backfill_id)


async def claim(connection: Any, ended: Collection[str]) -> asyncpg.Record | None:
    """Locks a backfill that is due; None if there is none.

    Args:
        connection: in a transaction.
        ended: schedules of which a flow has ended.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    row: asyncpg.Record | None = await fetchrow(connection, "backfills.claim", list(ended))
    return row


async def running(connection: Any, backfill_id: int) -> int:
    """How many flows of a backfill are running.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    flows: int = await fetchval(connection, "backfills.running", backfill_id)
    return flows


async def flows_of_ticks(connection: Any, schedule: str, ticks: Sequence[datetime]) -> Mapping[datetime, int]:
    """The latest flow of each of these ticks that has one.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    rows = await fetch(connection, "backfills.flows_of_ticks", schedule, list(ticks))
    return {row["tick"]: row["id"] for row in rows}


async def advance(
    connection: Any,
    backfill_id: int,
    position: datetime,
    *,
    started: int,
    already_run: int,
    refused: int,
    wait_s: float | None,
    ended: bool,
) -> None:
    """Writes the progress of a locked backfill.

    Args:
        connection: in the transaction that has locked it.
        backfill_id: of the backfill.
        position: ticks of its range up to this moment are done.
        started: ticks of this batch that started a flow.
        already_run: ticks of this batch that were left, because they had one.
        refused: ticks of this batch that could not start.
        wait_s: seconds until it looks at its running flows again; None if it does not wait for
            them.
        ended: whether all its flows have ended.

    Raises:
        PostgresUnavailable: nothing is written.
    """
    await execute(
        connection,
        "backfills.advance",
        id=backfill_id,
        position=position,
        started=started,
        already_run=already_run,
        refused=refused,
        wait_s=wait_s,
        ended=ended,
    )


async def fail(executor: Any, backfill_id: int, error: str) -> None:
    """Ends a backfill with an error that its next batch would repeat.

    Raises:
        PostgresUnavailable: the backfill may still run.
    """
    await execute(executor, "backfills.fail", backfill_id, error)
