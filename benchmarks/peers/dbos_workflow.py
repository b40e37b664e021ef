"""DBOS: a workflow of three steps on a queue.

    python -m benchmarks.peers.dbos_workflow      # the worker

A client enqueues and a worker runs, as DBOS's example of a queue worker does. The queue is polled
each 50 ms, as the hand-written table is; the default is a second. It has no limit of concurrency,
which is the default. At its start the worker recovers the workflows of its executor id, which stays
the same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from dbos import DBOS, DBOSClient, DBOSConfig

from benchmarks.peers import job

QUEUE, POLL_S = "jobs", 0.05
URL = os.environ[job.POSTGRES]


@DBOS.step()
def one(context: dict[str, Any]) -> dict[str, Any]:
    """The first stage."""
    job.started(context)
    job.work()
    return context


@DBOS.step()
def two(context: dict[str, Any]) -> dict[str, Any]:
    """The second stage."""
    job.work()
    return context


@DBOS.step()
def three(context: dict[str, Any]) -> dict[str, Any]:
    """The last stage."""
    job.work()
    job.ended(context)
    return context


@DBOS.workflow(name="job")
def run(context: dict[str, Any]) -> None:
    """The three stages."""
    three(two(one(context)))


def launch() -> None:
    """Starts DBOS in this process, and declares the queue."""
    config: DBOSConfig = {
        "name": "peers",
        "system_database_url": URL,
        "executor_id": "worker",
        "application_version": "1",
        "log_level": "ERROR",
    }
    DBOS(config=config)
    DBOS.launch()
    DBOS.register_queue(QUEUE, polling_interval_sec=POLL_S)


async def prepare() -> None:
    """Needs nothing: the worker creates DBOS's tables."""


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Enqueues a workflow per task."""
    client = DBOSClient(system_database_url=URL, lazy=True)

    async def submit(context: dict[str, Any]) -> None:
        await client.enqueue_async(
            {"workflow_name": "job", "queue_name": QUEUE, "workflow_id": f"n_{context['n']}"}, context
        )

    yield submit
    client.destroy()


if __name__ == "__main__":
    launch()
    threading.Event().wait()
