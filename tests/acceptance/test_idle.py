"""An idle deployment: what all of its services together ask and use when there is nothing to do.

PENSTOCK_LOAD_LONG=1 watches it for five minutes in place of some seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import asyncpg
import psutil
import pytest

from penstock.client import Client
from penstock.local.deployment import SERVICES, Deployment, Options
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from tests.waiting import wait_until

# The short form shares its machine with other tests, which costs caches and so CPU; without rest in its fetches it fails.
WATCHED_S, MOST_CPU = (300.0, 0.03) if os.environ.get("PENSTOCK_LOAD_LONG") else (20.0, 0.06)
# Before it: what was done is acknowledged, committed and reported by then.
SETTLES_S = 15.0


async def transactions(connection):
    """How many have ended in this database, as far as its backends have told; this one is told with the next."""
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    return await connection.fetchval(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    )


def cpu_s(processes):
    """Seconds of CPU that these have used so far, by name."""
    return {
        name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in processes.items() if name in SERVICES
    }


# It judges a figure that other tests on the same machine spoil; CONTRIBUTING.md has the command.
@pytest.mark.skipif(
    not (os.environ.get("PENSTOCK_LOAD") or os.environ.get("PENSTOCK_LOAD_LONG")),
    reason="set PENSTOCK_LOAD=1",
)
async def test_an_idle_deployment_asks_and_uses_next_to_nothing(tmp_path):
    """S6: with nothing to do, all services together make one query a second at most and use less than 3 % of a core (6 % in the short form)."""
    async with Deployment(
        Options(data_dir=tmp_path, kafka_port=0, postgres_port=0, gateway_port=0)
    ) as deployment:
        async with open_pool(deployment.postgres, "test", size=1) as pool:
            await types.register(pool, types.TaskType(name="t"))
            async with Client(deployment.gateway_url) as client:
                # So that there is something to forget: nobody works on it.
                await client.submit("t", {"n": 1})
            await wait_until(lambda: pool.fetchval("SELECT count(*) = 1 FROM task WHERE state = 'queued'"))
            await pool.execute("DELETE FROM task")
        connection = await asyncpg.connect(deployment.postgres)
        await asyncio.sleep(SETTLES_S)
        asked, used, began_s = await transactions(connection), cpu_s(deployment.processes), time.monotonic()
        await asyncio.sleep(WATCHED_S)
        used_now, took_s = cpu_s(deployment.processes), time.monotonic() - began_s
        queries = (await transactions(connection) - asked) / took_s
        await connection.close()
    shares = {name: (used_now[name] - used[name]) / took_s for name in used}
    shown = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
    sys.stderr.write(
        f"\nidle for {took_s:.0f} s: {queries:.2f} queries/s, CPU {sum(shares.values()):.2%} ({shown})\n"
    )
    assert set(shares) == set(SERVICES)
    assert queries <= 1
    assert sum(shares.values()) < MOST_CPU
