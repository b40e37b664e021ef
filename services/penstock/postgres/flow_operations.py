"""Bulk operations on flows: the flows that match, and the batches of an operation.

What this module guarantees: each batch writes the commands to its flows, or the flows that repeat
them, with the position of the operation and its count in one transaction. So each flow that matches
when its batch runs is counted once, and is rerun once, after any crash. A command that its owner
refuses or finds done has no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import asyncpg
import orjson

from penstock.contracts.event import OutboxEntry
from penstock.core.flow.operations import FlowFilter, FlowVerb
from penstock.core.flow.state import FlowStatus
from penstock.core.operations import batch_size
from penstock.postgres import flow_commands, flow_starts, flow_views
from penstock.postgres.connection import translated
from penstock.postgres.flow_starts import FlowStart
from penstock.postgres.operations import (
    CONTENDED_S,
    ROWS_PER_STATEMENT,
    BatchResult,
    Matches,
    Row,
    is_running,
)
from penstock.postgres.queries import fetch, fetchrow, fetchval

# The start that repeats a flow; None leaves the flow out. The arguments are its row and `same` or
# `latest`.
MakeRerun = Callable[[Row, str], Awaitable[FlowStart | None]]


async def find_matching(
    executor: Any,
    verb: FlowVerb,
    filters: FlowFilter,
    *,
    after_id: int,
    last_id: int,
    limit: int,
    namespaces: Sequence[str] | None = None,
) -> Matches:
    """Finds flows that match and that a verb would change, among the next `ROWS_PER_STATEMENT`.

    Args:
        executor: a pool or a connection.
        verb: the change.
        filters: the flows of the operation.
        after_id: examines flows with larger ids.
        last_id: the largest id to examine.
        limit: most flows to find.
        namespaces: only flows of these; None is all.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    statuses = filters.statuses_for(verb)
    source = "all"
    if filters.ids is not None:
        source = "ids"
    elif filters.name is not None and statuses == [FlowStatus.RUNNING]:
        source = "running"
    elif filters.schedule is not None:
        source = "schedule"
    [summary, *rows] = await fetch(
        executor,
        "operations.find_flows",
        after_id=after_id,
        last_id=last_id,
        rows=ROWS_PER_STATEMENT,
        limit=limit,
        source=source,
        ids=None if filters.ids is None else list(filters.ids),
        statuses=[status.value for status in statuses],
        visible=None if namespaces is None else list(namespaces),
        verb=verb.value,
        name=filters.name,
        version=filters.version,
        labels=orjson.dumps(filters.labels).decode() if filters.labels else None,
        created_since=filters.created_since,
        created_until=filters.created_until,
        finished_since=filters.finished_since,
        finished_until=filters.finished_until,
        error=filters.error,
        schedule=filters.schedule,
    )
    found = {row["id"]: row["state"] for row in rows}
    full = len(found) == limit
    return Matches(
        found,
        rows[-1]["id"] if full else summary["reached"],
        not full and summary["examined"] < ROWS_PER_STATEMENT,
        summary["examined"],
    )


async def run_batch(
    pool: asyncpg.Pool[Row], operation_id: str, filters: FlowFilter, make_rerun: MakeRerun
) -> BatchResult:
    """Sends the commands of the next batch of an operation, if it is due.

    Args:
        pool: the database.
        operation_id: id of the operation.
        filters: its filter.
        make_rerun: for the verb `rerun`.

    Raises:
        PostgresUnavailable: the batch may be done or not; repeating the call is safe.
    """
    with translated():
        operation = await fetchrow(pool, "operations.get", operation_id)
        if operation is None or not is_running(operation):
            return BatchResult(0, OutboxEntry(), None)
        verb = FlowVerb(operation["verb"])
        # Outside the transaction: a rerun may read objects, and the owner alone writes flows.
        matches = await find_matching(
            pool,
            verb,
            filters,
            after_id=operation["behind"],
            last_id=operation["upto"],
            limit=batch_size(operation["rate"]),
            namespaces=operation["namespaces"],
        )
        reruns = (
            await _reruns(pool, matches, operation["version"], make_rerun) if verb is FlowVerb.RERUN else {}
        )
        async with pool.acquire() as connection, connection.transaction():
            claimed = await fetchrow(connection, "operations.claim", operation_id)
            if claimed is None or claimed["behind"] != operation["behind"]:
                # Another process runs this batch, or has stopped the operation.
                return BatchResult(0, OutboxEntry(), CONTENDED_S)
            if claimed["wait_s"] > 0:
                return BatchResult(0, OutboxEntry(), claimed["wait_s"])
            if verb is FlowVerb.RERUN:
                changed = [*reruns]
                if reruns:
                    await flow_starts.start(connection, [*reruns.values()])
            else:
                changed = await flow_commands.command(connection, [*matches.states], verb)
            counted = Counter(matches.states[flow_id] for flow_id in changed)
            total = Counter(orjson.loads(claimed["found_in"])) + counted
            wait_s = await fetchval(
                connection,
                "operations.record_batch",
                id=operation_id,
                behind=matches.reached_id if matches.reached_id is not None else claimed["upto"],
                changed=counted.total(),
                found_in=orjson.dumps(total).decode(),
                ended=matches.ended,
            )
    return BatchResult(counted.total(), OutboxEntry(), None if matches.ended else max(0.0, wait_s))


async def _reruns(
    pool: asyncpg.Pool[Row], matches: Matches, version: str | None, make_rerun: MakeRerun
) -> dict[int, FlowStart]:
    starts = {}
    for row in await flow_views.many(pool, [*matches.states]):
        start = await make_rerun(row, version or "same")
        if start is not None:
            starts[row["id"]] = start
    return starts
