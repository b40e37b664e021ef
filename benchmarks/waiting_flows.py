"""A million flows that wait for events: queries of an idle deployment, size, and time to go on.

    python -m benchmarks.waiting_flows [--flows 1000000] [--woken 100] [--seconds 20]

The rows are written by SQL, as the owner leaves them, because submitting a million flows takes
longer than the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import asyncpg

from benchmarks.flows import Bench
from benchmarks.loops import everything
from benchmarks.measurements import report
from penstock.contracts.flow_submission import FlowEvent
from penstock.local.deployment import Deployment
from penstock.postgres.connection import open_pool
from penstock.postgres.flow_events import deliver

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


async def _idle(connection: asyncpg.Connection[asyncpg.Record], seconds: float) -> float:
    """Transactions a second of all services at rest."""

    async def ended() -> int:
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        found = await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
        return int(found)

    before, began_s = await ended(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (await ended() - before) / (time.perf_counter() - began_s)


async def _wake(bench: Bench, connection: asyncpg.Connection[asyncpg.Record], number: int) -> list[float]:
    """Milliseconds from the delivery of an event to the notification of a ready task."""
    ids = await connection.fetch(
        "SELECT flow_id FROM penstock.flow_wait TABLESAMPLE SYSTEM (1) LIMIT $1", number
    )
    ready = asyncio.Event()
    await connection.add_listener("penstock_ready", lambda *_: ready.set())
    woken = []
    for row in ids:
        ready.clear()
        begin_s = time.perf_counter()
        key = str(row["flow_id"])
        await deliver(bench.pool, [FlowEvent(id=key, event="go", key=key)])
        await ready.wait()
        woken.append((time.perf_counter() - begin_s) * 1000)
    return woken


async def run(arguments: argparse.Namespace) -> int:
    """Measures an idle deployment without and with the flows, and reports."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        deployment = await stack.enter_async_context(Deployment(everything(folder)))
        pool = await stack.enter_async_context(open_pool(deployment.postgres, "benchmark", size=2))
        bench = Bench(deployment, pool)
        await bench.prepare()
        connection = await asyncpg.connect(deployment.postgres)
        await asyncio.sleep(arguments.seconds)
        without = await _idle(connection, arguments.seconds)
        before = await connection.fetchval(_SIZE)
        for first in range(0, arguments.flows, _CHUNK):
            await connection.execute(_INSERT, min(_CHUNK, arguments.flows - first))
        each = (await connection.fetchval(_SIZE) - before) / arguments.flows
        await connection.execute("VACUUM ANALYZE")
        await asyncio.sleep(arguments.seconds)
        waiting = await _idle(connection, arguments.seconds)
        woken = sorted(await _wake(bench, connection, arguments.woken))
        await connection.close()
    figures = {
        "flows": float(arguments.flows),
        "queries/s without": without,
        "queries/s with": waiting,
        "bytes a flow": each,
        "woken p50 ms": median(woken),
        "woken p99 ms": woken[int(len(woken) * 0.99)],
    }
    claims = {
        "at most one query a second more": (f"{waiting - without:+.2f}", waiting - without <= 1.0),
        "at most 2 KB a flow": (f"{each:,.0f}", each <= 2_048),
        "woken within 20 ms at p50": (f"{median(woken):.1f}", median(woken) <= 20),
    }
    rounded = {name: round(value, 2) for name, value in figures.items()}
    return report("waiting_flows", {"waiting": rounded}, claims)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flows", type=int, default=1_000_000)
    parser.add_argument("--woken", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    sys.exit(asyncio.run(run(parser.parse_args())))
