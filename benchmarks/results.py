"""How soon a client has the results of its tasks.

    python -m benchmarks.results [--rate 30] [--tasks 400] [--waiters 10000] [--ends 200]

First a client submits tasks of three no-op stages at a steady rate, one by one, and waits for each:
with `task.result()`, then with `submit_and_wait`. Then it iterates with `as_completed` over tasks
that SQL ends in a random order, and reads all of them with one call of `results`. At last many
requests wait at one gateway, each for a task of its own, while SQL ends `--ends` tasks a second.
A delay begins at `task.finished_at`, before the commit of the end, and ends when the client has the
answer. A run takes two to three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
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
OPENING = 40
# The bound of the median delays.
MOST_MS = 5


def milliseconds(delays: list[float]) -> dict[str, Any]:
    """The median and the slowest hundredth."""
    return {
        "p50 (ms)": round(percentile(delays, 0.5) * 1000, 1),
        "p99 (ms)": round(percentile(delays, 0.99) * 1000, 1),
    }


async def of_single_tasks(deployment: Deployment, rate: float, tasks: int) -> dict[str, dict[str, Any]]:
    """Submits one task at a time at a steady rate, and waits for each, in both ways."""
    figures = {}
    async with whole(deployment) as loop, Client(deployment.environment["PENSTOCK_GATEWAY"]) as client:

        async def by_result(began: float) -> int:
            task = await client.submit("noop", {"at": began})
            await task.result()
            return task.id

        async def by_submit_and_wait(began: float) -> int:
            return (await client.submit_and_wait("noop", {"at": began})).id

        for name, warm_up, one in (
            ("task.result()", WARM_UP, by_result),
            ("submit_and_wait", 0, by_submit_and_wait),
        ):
            # Task, seconds since its submission, and when the client knew of its end.
            told: list[tuple[int, float, float]] = []
            due = time.perf_counter()
            for _ in range(warm_up + tasks):
                due += 1 / rate
                await asyncio.sleep(due - time.perf_counter())
                began = time.time()
                task_id = await one(began)
                now = time.time()
                told.append((task_id, now - began, now))
            ends = await ends_of(loop.connection, [task_id for task_id, *_ in told])
            figures[f"submission to the return of {name}"] = milliseconds(
                [total for _id, total, _at in told[warm_up:]]
            )
            figures[f"end to the return of {name}"] = milliseconds(
                [at - ends[task_id] for task_id, _total, at in told[warm_up:]]
            )
    return figures


async def ends_of(connection: asyncpg.Connection, ids: list[int]) -> dict[int, float]:
    """When tasks have ended, by id."""
    rows = await connection.fetch(
        "SELECT id, extract(epoch FROM finished_at)::float8 AS at FROM penstock.task WHERE id = ANY ($1)", ids
    )
    return {row["id"]: row["at"] for row in rows}


async def hold_tasks(connection: asyncpg.Connection, tasks: int) -> list[int]:
    """Inserts tasks that only SQL ends; returns their ids."""
    rows = await connection.fetch(
        """INSERT INTO penstock.task (type, stage, state, content_type, context)
           SELECT 'noop', 'held', 'running', 'json', '1' FROM generate_series(1, $1) RETURNING id""",
        tasks,
    )
    return [row["id"] for row in rows]


async def end_tasks(connection: asyncpg.Connection, ids: list[int], rate: float) -> None:
    """Ends tasks one after the other, at a steady rate."""
    began = time.perf_counter()
    for number, task_id in enumerate(ids):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        await connection.execute(
            "UPDATE penstock.task SET state = 'succeeded', finished_at = clock_timestamp() WHERE id = $1",
            task_id,
        )


async def of_many_tasks(deployment: Deployment, tasks: int, ends: float) -> dict[str, dict[str, Any]]:
    """Iterates over tasks while they end in a random order, then reads all results in one call."""
    connection = await asyncpg.connect(deployment.postgres)
    ids = await hold_tasks(connection, tasks)
    shuffled = random.Random(36).sample(ids, len(ids))
    told: dict[int, float] = {}
    async with Client(deployment.environment["PENSTOCK_GATEWAY"]) as client:
        ending = asyncio.create_task(end_tasks(connection, shuffled, ends))
        async for task in client.as_completed(ids):
            told[task.id] = time.time()
        await ending
        began = time.perf_counter()
        found = await client.results(ids)
        took_s = time.perf_counter() - began
    ended = await ends_of(connection, ids)
    await connection.close()
    return {
        "end to the yield of as_completed": {
            "tasks": tasks,
            **milliseconds([told[task_id] - ended[task_id] for task_id in ids]),
            "in order": [*told] == sorted(ended, key=ended.__getitem__),
        },
        "results of ended tasks, one call": {
            "tasks": tasks,
            "whole (ms)": round(took_s * 1000, 1),
            "in order": [task.id for task in found] == ids,
        },
    }


async def many_waiters(deployment: Deployment, waiters: int, ends: float) -> dict[str, Any]:
    """Holds a request for each of many tasks, and then ends these tasks."""
    connection = await asyncpg.connect(deployment.postgres)
    ids = await hold_tasks(connection, waiters)
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
                await asyncio.sleep(0.05)
                sent.append(task_id)
            while True:
                answer = await request
                # 429 would mean that the requests were opened faster than one gateway reads rows.
                answer.raise_for_status()
                state = (await answer.json())["state"]
                if state == "succeeded":
                    told[task_id] = time.time()
                    return
                request = asyncio.ensure_future(session.get(f"{gateway}/tasks/{task_id}", headers=HELD))

        waiting = [asyncio.create_task(wait(task_id)) for task_id in ids]
        # Each request is at the gateway, and the gateway has answered what was sent after it.
        while len(sent) < waiters:
            await asyncio.sleep(0.1)
        await (await session.get(f"{gateway}/livez")).read()
        await end_tasks(connection, ids, ends)
        await asyncio.gather(*waiting)
    ended = await ends_of(connection, ids)
    await connection.close()
    return {"tasks": waiters, **milliseconds([told[task_id] - ended[task_id] for task_id in ids])}


async def run(rate: float, tasks: int, waiters: int, ends: float) -> int:
    """Runs all parts and reports."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with Deployment(everything(Path(folder))) as deployment:
            figures = await of_single_tasks(deployment, rate, tasks)
            figures |= await of_many_tasks(deployment, tasks, ends / 4)
            figures["end to the answer, many waiters"] = await many_waiters(deployment, waiters, ends)

    def median(figure: str) -> tuple[str, bool]:
        p50 = figures[figure]["p50 (ms)"]
        return f"{p50} ms", p50 <= MOST_MS

    def in_order(figure: str) -> tuple[str, bool]:
        ordered = figures[figure]["in order"]
        return "yes" if ordered else "no", ordered

    bound = f"within {MOST_MS} ms of the end, median"
    return report(
        "results",
        figures,
        {
            f"task.result() returns {bound}": median("end to the return of task.result()"),
            f"submit_and_wait returns {bound}": median("end to the return of submit_and_wait"),
            f"{waiters:,} waiters on one gateway are answered {bound}": median(
                "end to the answer, many waiters"
            ),
            "as_completed yields tasks in the order of their ends": in_order(
                "end to the yield of as_completed"
            ),
            "results returns all tasks of one call in the given order": in_order(
                "results of ended tasks, one call"
            ),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=30)
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--ends", type=float, default=200)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.rate, arguments.tasks, arguments.waiters, arguments.ends)))
