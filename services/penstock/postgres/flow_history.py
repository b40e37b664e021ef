"""History of flows: moves ended flows, and reads those that have moved.

Every write goes through the session that holds the lock of history (see `postgres.history`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

import asyncpg
import orjson

from penstock.core.history import span_of
from penstock.postgres.history import EndPosition, retriable, with_moments
from penstock.postgres.queries import fetch, fetchrow
from penstock.postgres.session import Session

_BYTES = ("inputs", "output", "list")


async def next_ended(
    session: Session, behind: EndPosition, before: datetime, limit: int
) -> list[EndPosition]:
    """The next flows that ended before a moment, in the order of their ends.

    Raises:
        SessionLost, PostgresUnavailable: nothing was read.
    """
    rows = await session.fetch(
        "history.next_ended_flows", finished_at=behind.finished_at, id=behind.id, before=before, limit=limit
    )
    return [EndPosition(row["finished_at"], row["id"]) for row in rows]


async def move(session: Session, ids: Sequence[int], before: datetime) -> tuple[int, list[date]]:
    """Moves ended flows in one statement: roots, and flows whose root has moved.

    A flow stays while it has an open callback, its inbox has a row, or its day has no partition or
    a sealed one.

    Returns:
        How many it moved, and the days without a partition.

    Raises:
        SessionLost, PostgresUnavailable: all were moved, or none.
    """
    with retriable():
        [row] = await session.fetch("history.move_flows", list(ids), before)
    return row["moved"], row["missing"]


async def page(session: Session, day: date, behind: int, limit: int) -> list[asyncpg.Record]:
    """Flows of a day behind an id, ordered by id.

    Raises:
        SessionLost, PostgresUnavailable: nothing was read.
    """
    since, until = span_of(day)
    return await session.fetch("history.flow_page", since=since, until=until, behind=behind, limit=limit)


async def count(session: Session, day: date) -> int:
    """How many flows of a day are in history.

    Raises:
        SessionLost, PostgresUnavailable: nothing was read.
    """
    return int(await session.fetchval("history.count_flows", *span_of(day)))


async def delete_events(session: Session, limit: int) -> int:
    """Deletes events that are older than a day, at most `limit`; returns how many.

    Raises:
        SessionLost, PostgresUnavailable: they may or may not be deleted.
    """
    return len(await session.fetch("history.delete_events", limit))


async def get(executor: Any, flow_id: int) -> dict[str, Any] | None:
    """A flow that has moved to history, for `GET /flows/{id}`; None when history does not have it.

    It has the columns of `penstock.flow`, and also `nodes` (rows of `flow_node` without `flow_id`),
    `past_nodes` (rows of `flow_node_history`) and `callbacks_owed` (as `tasks.get`). Look here
    after `flow` had no such row: a flow moves in one statement, so it is in one of both.

    Args:
        executor: a pool or a connection.
        flow_id: its id.

    Raises:
        PostgresUnavailable: no server.
    """
    row = await fetchrow(executor, "history.flow", flow_id)
    return None if row is None else as_flow(row)


async def list_family(
    executor: Any, filters: Mapping[str, Any], before_id: int | None, limit: int
) -> list[dict[str, Any]]:
    """Flows of a family that have moved to history, as `get`, newest first.

    Args:
        executor: a pool or a connection.
        filters: of `flow_views.find`, by the parameters of the statement.
        before_id: the last id of the page before.
        limit: most flows.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "history.family_list", **filters, before=before_id, limit=limit)
    return [as_flow(row) for row in rows]


async def nodes(executor: Any, flow: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows of an archived flow's nodes by name, each with its task or child flow.

    Args:
        executor: a pool or a connection.
        flow: of `get`.

    Raises:
        PostgresUnavailable: no server.
    """
    single = [row for row in flow["nodes"] if row["total"] is None]
    found = await fetch(
        executor,
        "history.children_of_nodes",
        flow["id"],
        [row["name"] for row in single],
        [row["generation"] for row in single],
    )
    none = dict.fromkeys(("task_id", "task_type", "task_state", "child_id", "child_status"))
    children = {row["name"]: dict(row) for row in found}
    return {row["name"]: {**row, **none, **children.get(row["name"], {})} for row in flow["nodes"]}


def as_flow(row: Mapping[str, Any] | asyncpg.Record) -> dict[str, Any]:
    """A row of history in the shape of `get`."""
    flow = _decoded(orjson.loads(row["flow"]))
    for name in ("versions", "labels"):
        # As asyncpg returns these columns of `flow`.
        flow[name] = None if flow[name] is None else orjson.dumps(flow[name]).decode()
    return {
        **flow,
        "callbacks": row["callbacks"],
        "nodes": [_decoded(node) for node in orjson.loads(row["nodes"])],
        "past_nodes": [with_moments(node) for node in orjson.loads(row["past_nodes"])],
        "callbacks_owed": [with_moments(callback) for callback in orjson.loads(row["callbacks_owed"])],
    }


def _decoded(row: dict[str, Any]) -> dict[str, Any]:
    # PostgreSQL writes bytes into JSON as \\x and hexadecimal digits.
    data = {name: bytes.fromhex(row[name][2:]) for name in _BYTES if row.get(name) is not None}
    return with_moments(row) | data
