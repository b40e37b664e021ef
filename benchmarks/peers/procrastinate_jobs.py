"""Procrastinate: each stage defers the next one.

    python -m benchmarks.peers.procrastinate_jobs      # the worker

The worker listens for notifications, runs up to 20 jobs at once (the default is one; its guide on
concurrency advises more for asynchronous tasks) and has a pool of 10 connections. Finished jobs
stay in the table, as is the default: the run reads their end. A periodic task retries stalled jobs,
as its guide on that advises. It runs each 10 s instead of 10 minutes, so that the run shows whether
it does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from procrastinate import App, JobContext, PsycopgConnector

from benchmarks.peers import job

app = App(connector=PsycopgConnector(conninfo=os.environ[job.POSTGRES], min_size=2, max_size=10))


@app.task(name="three")
async def three(context: dict[str, Any]) -> None:
    """The last stage."""
    await job.work_async()
    job.ended(context)


@app.task(name="two")
async def two(context: dict[str, Any]) -> None:
    """The second stage."""
    await job.work_async()
    await three.defer_async(context=context)


@app.task(name="one")
async def one(context: dict[str, Any]) -> None:
    """The first stage."""
    job.started(context)
    await job.work_async()
    await two.defer_async(context=context)


@app.periodic(cron="* * * * * */10")
@app.task(name="retry", queueing_lock="retry", pass_context=True)
async def retry_stalled(_context: JobContext, timestamp: int) -> None:  # noqa: ARG001 (its name is given)
    """Retries the jobs of workers that sent no heartbeat for 30 s."""
    for stalled in await app.job_manager.get_stalled_jobs():
        await app.job_manager.retry_job(stalled)


async def prepare() -> None:
    """Creates Procrastinate's tables."""
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Defers a job per task."""
    async with app.open_async():

        async def submit(context: dict[str, Any]) -> None:
            await one.defer_async(context=context)

        yield submit


async def _work() -> None:
    async with app.open_async():
        await app.run_worker_async(concurrency=20)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    uvloop.run(_work())
