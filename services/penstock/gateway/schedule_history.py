"""The history of a schedule: what became of its ticks, as answers have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
from aiohttp import web

from penstock.flows.scheduled import OF_TASKS
from penstock.gateway.views import pick
from penstock.http.problems import BadParameter
from penstock.http.server import MAX_ID, text_parameter
from penstock.postgres import flow_definitions, schedules
from penstock.postgres.schedules import Place

_COLUMNS = (
    *("first_tick", "last_tick", "ticks", "status", "backfill", "rerun_of", "reason", "detail", "created_at"),
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def cursor_of(place: Place) -> str:
    """The cursor behind a record."""
    return f"{(place.tick - _EPOCH) // _MICROSECOND}.{place.source}.{place.id}"


def read_cursor(request: web.Request) -> Place | None:
    """The place that a request's `cursor` names; None for the first page.

    Raises:
        BadParameter: it is no cursor.
    """
    text = text_parameter(request, "cursor")
    if text is None:
        return None
    try:
        microseconds, source, record = map(int, text.split("."))
        place = Place(_EPOCH + microseconds * _MICROSECOND, source, record)
    except (ValueError, OverflowError):
        place = None
    if place is None or place.source not in (1, 2) or not 0 < place.id <= MAX_ID:
        raise BadParameter("must be `next` of the page before", parameter="cursor")
    return place


async def tasks_of(
    pool: asyncpg.Pool[asyncpg.Record], name: str, rows: Sequence[asyncpg.Record]
) -> Mapping[int, int]:
    """The task of each run of a schedule of plain tasks, by flow; flows of others have none.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    # A schedule of tasks makes a definition with its own name.
    flows = [row["id"] for row in rows if row["flow"] == name]
    if not flows:
        return {}
    definition = await flow_definitions.find(pool, name, None)
    if definition is None or definition.definition.get("description") != OF_TASKS:
        return {}
    return await schedules.tasks_of_runs(pool, flows)


def record_of(row: asyncpg.Record, tasks: Mapping[int, int]) -> dict[str, Any]:
    """The document of a row of `penstock.postgres.schedules.history`."""
    is_run = row["flow"] is not None
    return {
        "outcome": _outcome(row) if is_run else "skipped",
        "flow_id": row["id"] if is_run else None,
        "task_id": tasks.get(row["id"]) if is_run else None,
        **pick(row, _COLUMNS),
    }


def _outcome(run: asyncpg.Record) -> str:
    if run["backfill"] is not None:
        return "backfilled"
    return "started" if run["rerun_of"] is None else "rerun"
