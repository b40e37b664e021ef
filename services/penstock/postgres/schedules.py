"""Schedules, as users read and change them, and the record of skipped ticks.

The flows of a tick, the position of its schedule and the record of what was skipped are written in
one transaction, by the database's clock (`penstock.postgres.schedule_claims`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.contracts import subscription
from penstock.core.schedule_policy import Skip
from penstock.postgres.connection import translated
from penstock.postgres.queries import execute, fetch, fetchrow, fetchval
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
        name=settings.name,
        flow=settings.flow,
        version=settings.version,
        cron=settings.cron,
        zone=settings.zone,
        input=settings.input,
        priority=int(settings.priority),
        labels=orjson.dumps(settings.labels).decode() if settings.labels else None,
        catch_up=rules.catch_up.value,
        catch_up_limit=rules.catch_up_limit,
        catch_up_rate=rules.catch_up_rate,
        overlap=rules.overlap.value,
        paused=settings.paused,
        position=position,
        next_tick=next_tick,
        created_by=actor,
        events=settings.events,
        callbacks=subscription.to_columns(settings.callbacks) or None,
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
    rows = await fetch(executor, "schedules.list", behind=after, visible=visible, flow=flow, limit=limit)
    return [from_row(row) for row in rows]


async def remove(connection: Any, name: str, removed_by: str) -> bool:
    """Removes a schedule with its record of skipped ticks, and stops its backfills.

    Its flows stay. Returns whether there was one.

    Raises:
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    with translated():
        if await fetchval(connection, "schedules.remove", name) is None:
            return False
        await execute(connection, "schedules.remove_skips", name)
        await execute(connection, "backfills.stop_all", name, removed_by)
    return True


async def set_paused(
    connection: Any, name: str, *, paused: bool, position: datetime, next_tick: datetime | None
) -> Schedule:
    """Pauses or resumes a locked schedule.

    Raises:
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    [row] = await fetch(
        connection, "schedules.set_paused", name=name, paused=paused, position=position, next_tick=next_tick
    )
    return from_row(row)


async def record_skips(connection: Any, skips: Iterable[tuple[str, Skip]]) -> None:
    """Records ticks that started no flow, each with its schedule.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    rows = list(skips)
    if rows:
        await execute(
            connection,
            "schedules.record_skips",
            schedule=[name for name, _skip in rows],
            first_tick=[skip.first for _name, skip in rows],
            last_tick=[skip.last for _name, skip in rows],
            ticks=[skip.count for _name, skip in rows],
            reason=[skip.reason.value for _name, skip in rows],
            detail=[skip.detail for _name, skip in rows],
        )


async def skips(executor: Any, name: str, *, before: int | None, limit: int) -> list[asyncpg.Record]:
    """The record of skipped ticks, the latest first.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return await fetch(executor, "schedules.skips", name, before, limit)


class Place(NamedTuple):
    """The place of a record in the history of a schedule.

    Attributes:
        tick: the last tick of the record.
        source: 2 for a run, 1 for skipped ticks.
        id: of the flow, or of the record of skipped ticks.
    """

    tick: datetime
    source: int
    id: int


async def history(
    executor: Any, name: str, *, behind: Place | None, limit: int
) -> list[tuple[Place, asyncpg.Record]]:
    """The runs and the skipped ticks of a schedule with their places, the latest tick first.

    Args:
        executor: a pool or a connection.
        name: of the schedule.
        behind: the last record of the page before.
        limit: most records.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    tick, source, record = behind or (None, None, None)
    rows = await fetch(
        executor, "schedules.history", name=name, behind=tick, source=source, id=record, limit=limit
    )
    return [(Place(row["last_tick"], row["source"], row["id"]), row) for row in rows]


async def tasks_of_runs(executor: Any, flow_ids: Sequence[int]) -> Mapping[int, int]:
    """The latest task of each of these flows of a schedule of tasks.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    rows = await fetch(executor, "schedules.tasks_of_runs", list(flow_ids))
    return {row["flow_id"]: row["id"] for row in rows}
