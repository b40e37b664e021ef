"""Schedules, as users read and change them, and the record of skipped ticks.

The flows of a tick, the position of its schedule and the record of what was skipped are written in
one transaction, by the database's clock (`penstock.postgres.schedule_claims`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

import asyncpg
import orjson

from penstock.contracts import subscription
from penstock.core.schedule_policy import Skip
from penstock.postgres.connection import translated
from penstock.postgres.queries import execute, fetch, fetchrow, fetchval, query
from penstock.postgres.schedule_rows import Schedule, Settings, from_row

# Notified when a schedule or a backfill may have something to do; the payload is the schedule.
CHANNEL = "penstock_schedules"


async def locked(connection: Any, name: str) -> Schedule | None:
    """The schedule, locked until the end of the transaction; None if there is none.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    row = await fetchrow(connection, "schedules.lock", name)
    return None if row is None else from_row(row)


async def clock(executor: Any) -> datetime:
    """The database's clock.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    now: datetime = await fetchval(executor, "schedules.now")
    return now


async def put(
    connection: Any,
    settings: Settings,
    *,
    position: datetime,
    next_tick: datetime | None,
    actor: str | None,
) -> Schedule:
    """Inserts a schedule, or replaces the settings of one that is locked.

    Args:
        connection: in the transaction that has locked the schedule, if it exists.
        settings: of the schedule.
        position: ticks up to this moment are decided.
        next_tick: the first tick after it.
        actor: who creates it.

    Raises:
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    rules = settings.rules
    [row] = await fetch(
        connection,
        "schedules.put",
        settings.name,
        settings.flow,
        settings.version,
        settings.cron,
        settings.zone,
        settings.input,
        int(settings.priority),
        orjson.dumps(settings.labels).decode() if settings.labels else None,
        rules.catch_up.value,
        rules.catch_up_limit,
        rules.catch_up_rate,
        rules.overlap.value,
        settings.paused,
        position,
        next_tick,
        actor,
        settings.events,
        subscription.to_columns(settings.callbacks) or None,
    )
    return from_row(row)


async def get(executor: Any, name: str) -> Schedule | None:
    """A schedule; None if there is none.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    row = await fetchrow(executor, "schedules.get", name)
    return None if row is None else from_row(row)


async def find(
    executor: Any,
    *,
    after: str = "",
    namespaces: Collection[str] | None = None,
    flow: str | None = None,
    limit: int,
) -> list[Schedule]:
    """Schedules by name.

    Args:
        executor: a pool or a connection.
        after: the last name of the page before.
        namespaces: only schedules of these; None is all.
        flow: only schedules of this definition.
        limit: most schedules.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    visible = None if namespaces is None else sorted(namespaces)
    rows = await fetch(executor, "schedules.list", after, visible, flow, limit)
    return [from_row(row) for row in rows]


async def remove(connection: Any, name: str, removed_by: str) -> bool:
    """Removes a schedule with its record of skipped ticks, and stops its backfills.

    Its flows stay. Returns whether there was one.

    Raises:
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    with translated():
        if await connection.fetchval(query("schedules.remove"), name) is None:
            return False
        await connection.execute(query("schedules.remove_skips"), name)
        await connection.execute(query("backfills.stop_all"), name, removed_by)
    return True


async def set_paused(
    connection: Any, name: str, *, paused: bool, position: datetime, next_tick: datetime | None
) -> Schedule:
    """Pauses or resumes a locked schedule.

    Raises:
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    [row] = await fetch(connection, "schedules.set_paused", name, paused, position, next_tick)
    return from_row(row)


async def record_skips(connection: Any, skips: Iterable[tuple[str, Skip]]) -> None:
    """Records ticks that started no flow, each with its schedule.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    rows = [(name, skip.first, skip.last, skip.count, skip.reason.value, skip.detail) for name, skip in skips]
    if rows:
        await execute(connection, "schedules.record_skips", *map(list, zip(*rows, strict=True)))


async def skips(executor: Any, name: str, *, before: int | None, limit: int) -> list[asyncpg.Record]:
    """The record of skipped ticks, the latest first.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return await fetch(executor, "schedules.skips", name, before, limit)
