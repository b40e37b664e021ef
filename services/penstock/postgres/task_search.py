"""Searches tasks by filters, newest first, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.core.task import State
from penstock.postgres.connection import translated
from penstock.postgres.queries import bound, fetch, fetchrow

# Seconds of a search by an index, and of a search in parts; tasks of the first part and of others.
LIST_WITHIN_S = 0.25
FIRST_PART = 1_000
ROWS_PER_PART = 20_000
# A search for recent tasks ends at a part whose tasks are older by this much: ids have the order of
# creation, except for long transactions and a clock that was set.
ID_ORDER = timedelta(hours=1)
# States whose tasks an index has.
INDEXED_STATES = frozenset(State) - {State.READY, State.SUCCEEDED}


class FoundTasks(NamedTuple):
    """A part of the tasks that match.

    Attributes:
        rows: of these tasks, newest first.
        searched_to: all tasks from this id on were searched, and older ones were not; None when the
            search reached its limit of rows or the oldest task.
    """

    rows: list[asyncpg.Record]
    searched_to: int | None = None


async def find(
    executor: Any,
    *,
    type_name: str | None = None,
    states: Sequence[str] | None = None,
    stage: str | None = None,
    labels: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    concurrency_key: str | None = None,
    flow_id: int | None = None,
    since: datetime | None = None,
    error: str | None = None,
    before_id: int | None = None,
    limit: int = 50,
    visible_types: Sequence[str] | None = None,
    within_s: float = LIST_WITHIN_S,
) -> FoundTasks:
    """Rows of tasks that match all filters, newest first.

    A search by an index runs for `within_s` seconds. When it takes longer, or no index serves it,
    tasks are examined in parts for as long. The answer then has what was found so far, and reads
    cost little more than that.

    Args:
        executor: a pool or a connection.
        type_name: task type.
        states: one of these states.
        stage: current stage, or the last one.
        labels: labels that the task has, with these values.
        idempotency_key: idempotency key.
        concurrency_key: concurrency key.
        flow_id: the flow that they belong to; tasks of its child flows do not match.
        since: created then or later.
        error: text in the error "kind: message", in any case; "" is any error.
        before_id: the last id of the page before.
        limit: most rows.
        visible_types: only tasks of these types; None is every type.
        within_s: see above.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    filters = {
        "type": type_name,
        "states": list(states) if states else None,
        "stage": stage,
        "labels": orjson.dumps(labels).decode() if labels else None,
        "idempotency_key": idempotency_key,
        "key": concurrency_key,
        "visible": None if visible_types is None else list(visible_types),
        "flow_id": flow_id,
        "created_since": since,
        "error": error,
    }
    rows: list[asyncpg.Record] = []
    with translated():
        if labels or idempotency_key or flow_id or (states and INDEXED_STATES.issuperset(states)):
            with suppress(TimeoutError):
                rows = await executor.fetch(
                    *bound("tasks.list", **filters, before=before_id, limit=limit, first_id=None),
                    timeout=within_s,
                )
                return FoundTasks(rows)
        deadline_s = time.monotonic() + within_s
        # Usually the first tasks match.
        part_rows = min(FIRST_PART, ROWS_PER_PART)
        while True:
            part = await fetchrow(executor, "tasks.walk", before_id, part_rows, since is not None)
            if not part["tasks"] or (since is not None and part["newest"] < since - ID_ORDER):
                return FoundTasks(rows)
            rows += await fetch(
                executor,
                "tasks.list",
                **filters,
                before=before_id,
                limit=limit - len(rows),
                first_id=part["last"],
            )
            before_id = part["last"]
            if len(rows) == limit or part["tasks"] < part_rows:
                return FoundTasks(rows)
            if time.monotonic() >= deadline_s:
                return FoundTasks(rows, before_id)
            part_rows = ROWS_PER_PART
