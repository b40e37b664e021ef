"""The hand-written table: rows claimed with SKIP LOCKED, polled.

    python -m benchmarks.peers.table [--batch 500 | --loops 4]

Each stage is a claim and a commit. A claim takes a lease of 30 s, and a statement each second makes
rows ready whose lease has expired: without it, a row of a dead worker would never run again. A
worker that finds no row waits 50 ms. `--batch` claims up to so many rows and commits them with one
statement. `--loops` claims one row at a time, in so many loops with a connection each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import uvloop

from benchmarks.peers import job

POLL_S = 0.05
REAP_S = 1.0
SQL = Path(__file__).with_suffix(".sql")


def queries() -> dict[str, str]:
    """Returns the statements of table.sql by name."""
    parts = SQL.read_text().split("-- name: ")[1:]
    return {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in parts}


async def prepare() -> None:
    """Creates the table."""
    connection = await asyncpg.connect(os.environ[job.POSTGRES])
    await connection.execute(queries()["create"])
    await connection.close()


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Inserts a row per task."""
    insert = queries()["submit"]
    async with asyncpg.create_pool(os.environ[job.POSTGRES], min_size=8, max_size=8) as pool:

        async def submit(context: dict[str, Any]) -> None:
            await pool.execute(insert, orjson.dumps(context))

        yield submit


async def _run(row: asyncpg.Record) -> tuple[int, int, str | None, bytes]:
    context, stage = orjson.loads(row["context"]), row["stage"]
    if stage == job.STAGES[0]:
        job.started(context)
    await job.work_async()
    last = stage == job.STAGES[-1]
    if last:
        job.ended(context)
    following = None if last else job.STAGES[job.STAGES.index(stage) + 1]
    return row["id"], row["attempt"], following, orjson.dumps(context)


async def _claim(connection: asyncpg.Connection, most: int) -> None:
    sql = queries()
    while True:
        rows = await connection.fetch(sql["claim"], most)
        if not rows:
            await asyncio.sleep(POLL_S)
            continue
        done = await asyncio.gather(*map(_run, rows))
        if most == 1:
            await connection.execute(sql["complete"], *done[0])
        else:
            await connection.execute(sql["complete_all"], *map(list, zip(*done, strict=True)))


async def _reap(connection: asyncpg.Connection) -> None:
    while True:
        await connection.execute(queries()["reap"])
        await asyncio.sleep(REAP_S)


async def work(batch: int, loops: int) -> None:
    """Runs the worker until it loses its database; its supervisor then restarts it."""
    connections = [await asyncpg.connect(os.environ[job.POSTGRES]) for _ in range(loops + 1)]
    async with asyncio.TaskGroup() as group:
        group.create_task(_reap(connections[-1]))
        for connection in connections[:-1]:
            group.create_task(_claim(connection, batch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--loops", type=int, default=1)
    arguments = parser.parse_args()
    uvloop.run(work(arguments.batch, arguments.loops))
