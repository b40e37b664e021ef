"""An idle deployment: the queries and the CPU of all its services together."""

from __future__ import annotations

import asyncio
import sys
import time

import asyncpg
import psutil
import pytest

from penstock.client import Client
from penstock.local.deployment import SERVICES, Deployment, Options
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from tests.support.waiting import wait_until

MEASURE_S = 20.0
# Twice what the services use alone on a machine: other tests take CPU caches away. A service that
# fetches without a pause uses more.
CPU_LIMIT = 0.06
# Pause before the measurement, in which services acknowledge, commit and report earlier work.
SETTLE_S = 15.0


async def transactions(connection):
    """Returns how many transactions of this database have ended, as far as its backends have
    reported them. The transaction of this call is reported with the next one."""
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    return await connection.fetchval(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    )


def cpu_s(processes):
    """Returns the CPU seconds that the services have used so far, by name."""
    return {
        name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in processes.items() if name in SERVICES
    }


@pytest.mark.long
@pytest.mark.alone
async def test_an_idle_deployment_uses_few_queries_and_little_cpu(tmp_path):
    """S6: the services of an idle deployment together send at most two queries a second, and use
    less than 6 % of a core."""
    async with Deployment(
        Options(data_dir=tmp_path, kafka_port=0, postgres_port=0, gateway_port=0)
    ) as deployment:
        async with open_pool(deployment.postgres, "test", size=1) as pool:
            await types.register(pool, types.TaskType(name="t"))
            async with Client(deployment.gateway_url) as client:
                # A released task without a worker, then deleted, leaves state to clean up.
                await client.submit("t", {"n": 1})
            await wait_until(lambda: pool.fetchval("SELECT count(*) = 1 FROM task WHERE state = 'queued'"))
            await pool.execute("DELETE FROM task")
        connection = await asyncpg.connect(deployment.postgres)
        await asyncio.sleep(SETTLE_S)
        transactions_before = await transactions(connection)
        used_before, began_s = cpu_s(deployment.processes), time.monotonic()
        await asyncio.sleep(MEASURE_S)
        used_now, took_s = cpu_s(deployment.processes), time.monotonic() - began_s
        queries = (await transactions(connection) - transactions_before) / took_s
        await connection.close()
    shares = {name: (used_now[name] - used_before[name]) / took_s for name in used_before}
    shares_text = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
    sys.stderr.write(
        f"\nidle for {took_s:.0f} s: {queries:.2f} queries/s, CPU {sum(shares.values()):.2%} ({shares_text})\n"
    )
    assert set(shares) == set(SERVICES)
    assert queries <= 2
    assert sum(shares.values()) < CPU_LIMIT
