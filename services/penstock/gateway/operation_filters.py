"""The filters of operations on tasks and flows, and their limits to what a request may see."""

from __future__ import annotations

from typing import Any

import asyncpg
from aiohttp import web

from penstock.core.flow.operations import FlowFilter
from penstock.core.flow.state import FlowStatus
from penstock.core.operations import TaskFilter
from penstock.core.task import Priority, State
from penstock.errors import InvalidRecord
from penstock.gateway.access import grant_of
from penstock.gateway.dry_run import timestamp_in
from penstock.gateway.visibility import visible_ids
from penstock.http.server import MAX_ID

# The id of no task, for a filter that must match nothing.
NO_TASK_ID = MAX_ID


def task_filter(raw: dict[str, Any]) -> TaskFilter:
    """Converts a filter that conforms to its schema.

    Raises:
        InvalidRecord: a date in it does not exist.
    """
    return TaskFilter(
        ids=_ids(raw),
        type=raw.get("type"),
        stage=raw.get("stage"),
        states=[State(state) for state in raw["states"]] if "states" in raw else None,
        key=raw.get("key"),
        labels=raw.get("labels"),
        priorities=[int(Priority[name]) for name in raw["priorities"]] if "priorities" in raw else None,
        created_since=timestamp_in(raw, "created_since", "/filter"),
        created_until=timestamp_in(raw, "created_until", "/filter"),
        finished_since=timestamp_in(raw, "finished_since", "/filter"),
        finished_until=timestamp_in(raw, "finished_until", "/filter"),
        error=raw.get("error"),
    )


def flow_filter(raw: dict[str, Any]) -> FlowFilter:
    """As `task_filter`, for operations on flows."""
    return FlowFilter(
        ids=_ids(raw),
        name=raw.get("name"),
        # To JSON Schema 2.0 is an integer.
        version=int(raw["version"]) if "version" in raw else None,
        statuses=[FlowStatus(status) for status in raw["statuses"]] if "statuses" in raw else None,
        labels=raw.get("labels"),
        created_since=timestamp_in(raw, "created_since", "/filter"),
        created_until=timestamp_in(raw, "created_until", "/filter"),
        finished_since=timestamp_in(raw, "finished_since", "/filter"),
        finished_until=timestamp_in(raw, "finished_until", "/filter"),
        error=raw.get("error"),
        schedule=raw.get("schedule"),
    )


def _ids(raw: dict[str, Any]) -> list[int] | None:
    # To JSON Schema 81.0 is an integer.
    return sorted({int(each) for each in raw["ids"]}) if "ids" in raw else None


async def limit_to_visible(
    request: web.Request, pool: asyncpg.Pool[asyncpg.Record], raw: dict[str, Any]
) -> None:
    """Changes a filter so that it matches only tasks that the request may see.

    The stored filter has the limit, so a gateway that continues the operation respects it. Checking
    once is enough, since the type of a task never changes. An operation on flows is limited by the
    namespaces in its row instead.
    """
    grant = grant_of(request)
    if grant.namespaces is None:
        return
    if "type" in raw:
        if not grant.covers(raw["type"]):
            # Matches nothing, like a type that does not exist.
            raw["ids"] = [NO_TASK_ID]
    elif "ids" in raw:
        ids = sorted({int(task_id) for task_id in raw["ids"]})
        visible = await visible_ids(request, pool, ids)
        raw["ids"] = list(visible) or [NO_TASK_ID]
    else:
        raise InvalidRecord(
            "give a type or ids: you may change tasks of some namespaces only", pointer="/filter"
        )
