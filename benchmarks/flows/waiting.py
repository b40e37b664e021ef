"""Many flows that wait for events: queries of an idle deployment, size, and time to go on.

The rows are written by SQL, as the owner leaves them, because submitting a million flows takes
longer than the measurement.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

import asyncpg

from benchmarks.flows.bench import Bench, Claims, Figures
from penstock.contracts.flow_submission import FlowEvent
from penstock.postgres.flow_events import deliver

_WOKEN = 100
_IDLE_S = 15.0
_CHUNK = 100_000
_SIZE = """SELECT sum(pg_total_relation_size(c.oid))::float FROM pg_class c
           WHERE c.relname IN ('flow', 'flow_node', 'flow_wait') AND c.relkind = 'r'"""
_INSERT = """WITH flows AS (
    INSERT INTO penstock.flow (name, version, unfinished, live, inputs)
    SELECT 'wait', 1, 2, 1, '{}' FROM generate_series(1, $1) RETURNING id
), nodes AS (
    INSERT INTO penstock.flow_node (flow_id, name, status, started_at) SELECT id, 'w', 'running', now() FROM flows
)
INSERT INTO penstock.flow_wait (flow_id, node, generation, root_id, namespace, event, key)
SELECT id, 'w', 0, id, 'default', 'go', id::text FROM flows"""


async def measure(bench: Bench, flows: int) -> tuple[Figures, Claims]:
    """Measures an idle deployment without and with so many flows."""
    connection = await asyncpg.connect(bench.deployment.postgres)
    try:
        await asyncio.sleep(_IDLE_S)
        without = await _idle(connection)
        before = await connection.fetchval(_SIZE)
        for first in range(0, flows, _CHUNK):
            await connection.execute(_INSERT, min(_CHUNK, flows - first))
        each = (await connection.fetchval(_SIZE) - before) / flows
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")
        await asyncio.sleep(_IDLE_S)
        waiting = await _idle(connection)
        delivered, woken = map(sorted, await _wake(bench, connection))
    finally:
        await connection.close()
    figures = {
        "flows": float(flows),
        "queries/s without": without,
        "queries/s with": waiting,
        "bytes a flow": each,
        "delivered p50 ms": median(delivered),
        "woken p50 ms": median(woken),
        "woken p99 ms": woken[int(len(woken) * 0.99)],
    }
    claims = {
        "waiting: at most one query a second more": (f"{waiting - without:+.2f}", waiting - without <= 1.0),
        "waiting: at most 2 KB a flow": (f"{each:,.0f}", each <= 2_048),
        "waiting: woken within 20 ms at p50": (f"{median(woken):.1f}", median(woken) <= 20),
    }
    return {"waiting": figures}, claims


async def _idle(connection: asyncpg.Connection[asyncpg.Record]) -> float:
    """Transactions a second of all services at rest."""

    async def ended() -> int:
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        found = await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
        return int(found)

    before, began_s = await ended(), time.perf_counter()
    await asyncio.sleep(_IDLE_S)
    return (await ended() - before) / (time.perf_counter() - began_s)


async def _wake(
    bench: Bench, connection: asyncpg.Connection[asyncpg.Record]
) -> tuple[list[float], list[float]]:
    """Milliseconds of the delivery of an event, and until the notification of a ready task."""
    ids = await connection.fetch("SELECT flow_id FROM penstock.flow_wait ORDER BY random() LIMIT $1", _WOKEN)
    ready = asyncio.Event()
    await connection.add_listener("penstock_ready", lambda *_: ready.set())
    delivered, woken = [], []
    for row in ids:
        ready.clear()
        begin_s = time.perf_counter()
        key = str(row["flow_id"])
        await deliver(bench.pool, [FlowEvent(id=key, event="go", key=key)])
        delivered.append((time.perf_counter() - begin_s) * 1000)
        await ready.wait()
        woken.append((time.perf_counter() - begin_s) * 1000)
    return delivered, woken
