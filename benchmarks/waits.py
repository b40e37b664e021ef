"""How soon a waiting client knows that its task has ended.

    python -m benchmarks.waits [--rate 30] [--tasks 600] [--waiters 10000] [--ends 200]

First a client submits tasks of three no-op stages at a steady rate, one by one, and waits for each.
Then many requests wait at one gateway, each for a task of its own, while SQL ends `--ends` tasks a
second. The delay begins at `task.finished_at`, before the commit of the end, and ends when the
answer is read.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg

from benchmarks.loops import everything, whole
from benchmarks.measurements import percentile, report
from penstock.client import Client
from penstock.local.deployment import Deployment

WARM_UP = 100
HELD = {"Prefer": "wait=60"}
# Connections that are opened at the same time.
OPENING = 100


def milliseconds(delays: list[float]) -> dict[str, Any]:
    """The median and the slowest hundredth."""
    return {
        "p50 (ms)": round(percentile(delays, 0.5) * 1000, 1),
        "p99 (ms)": round(percentile(delays, 0.99) * 1000, 1),
    }


async def submit_and_wait(deployment: Deployment, rate: float, tasks: int) -> dict[str, dict[str, Any]]:
    """Submits one task at a time at a steady rate, and waits for each."""
    waits, totals = [], []
    async with whole(deployment) as loop, Client(deployment.environment["PENSTOCK_GATEWAY"]) as client:

        async def one() -> None:
            began = time.time()
            task = await client.submit("noop", {"at": began})
            await client.wait([task.id])
            told = time.time()
            ended = await loop.connection.fetchval(
                "SELECT extract(epoch FROM finished_at)::float8 FROM penstock.task WHERE id = $1", task.id
            )
            waits.append(told - ended)
            totals.append(told - began)

        turn = asyncio.Lock()

        async def in_turn() -> None:
            async with turn:
                await one()

        began, running = time.perf_counter(), []
        for number in range(WARM_UP + tasks):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            running.append(asyncio.create_task(in_turn()))
        await asyncio.gather(*running)
    return {
        "submit and wait": milliseconds(totals[WARM_UP:]),
        "end of the task to the return of wait": milliseconds(waits[WARM_UP:]),
    }


async def many_waiters(deployment: Deployment, waiters: int, ends: float) -> dict[str, Any]:
    """Holds a request for each of many tasks, and then ends these tasks."""
    connection = await asyncpg.connect(deployment.postgres, server_settings={"search_path": "penstock"})
    rows = await connection.fetch(
        """INSERT INTO task (type, stage, state, content_type, context)
           SELECT 'noop', 'held', 'running', 'json', '1' FROM generate_series(1, $1) RETURNING id""",
        waiters,
    )
    gateway = deployment.environment["PENSTOCK_GATEWAY"]
    told: dict[int, float] = {}
    sent: list[int] = []
    opening = asyncio.Semaphore(OPENING)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
    ) as session:

        async def wait(task_id: int) -> None:
            async with opening:
                # The answer of an earlier request opens the connection.
                await (await session.get(f"{gateway}/livez")).read()
                request = asyncio.ensure_future(session.get(f"{gateway}/tasks/{task_id}", headers=HELD))
                await asyncio.sleep(0.01)
                sent.append(task_id)
            while True:
                answer = await request
                state = (await answer.json())["state"]
                if state == "succeeded":
                    told[task_id] = time.time()
                    return
                request = asyncio.ensure_future(session.get(f"{gateway}/tasks/{task_id}", headers=HELD))

        waiting = [asyncio.create_task(wait(row["id"])) for row in rows]
        # Each request is at the gateway, and the gateway has answered what was sent after it.
        while len(sent) < waiters:
            await asyncio.sleep(0.1)
        await (await session.get(f"{gateway}/livez")).read()
        began = time.perf_counter()
        for number, row in enumerate(rows):
            await asyncio.sleep(max(0.0, began + number / ends - time.perf_counter()))
            await connection.execute(
                "UPDATE task SET state = 'succeeded', finished_at = clock_timestamp() WHERE id = $1",
                row["id"],
            )
        await asyncio.gather(*waiting)
    ended = await connection.fetch(
        "SELECT id, extract(epoch FROM finished_at)::float8 AS at FROM task WHERE stage = 'held'"
    )
    await connection.close()
    return {"tasks": waiters, **milliseconds([told[row["id"]] - row["at"] for row in ended])}


async def run(rate: float, tasks: int, waiters: int, ends: float) -> int:
    """Runs both parts and reports."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with Deployment(everything(Path(folder))) as deployment:
            figures = await submit_and_wait(deployment, rate, tasks)
            figures["end to the answer, many waiters"] = many = await many_waiters(deployment, waiters, ends)
    waited = figures["end of the task to the return of wait"]["p50 (ms)"]
    return report(
        "waits",
        figures,
        {
            "wait returns within 5 ms of the end, median": (f"{waited} ms", waited <= 5),
            f"{waiters:,} waiters, median: at most 5 ms": (f"{many['p50 (ms)']} ms", many["p50 (ms)"] <= 5),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=30)
    parser.add_argument("--tasks", type=int, default=600)
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--ends", type=float, default=200)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.rate, arguments.tasks, arguments.waiters, arguments.ends)))
