"""Celery on Redis: a chain of three tasks.

Settings, as Celery's guides on optimizing and on Redis advise for many short tasks that must not be
lost:

- `acks_late` with `reject_on_worker_lost`: a message is acknowledged after its task. Early
  acknowledgement, the default, loses what a dead worker had taken.
- `worker_prefetch_multiplier` 64: many short tasks.
- `ignore_result` and no result backend: a chain does not need one.
- The worker runs without gossip, mingle and heartbeat, which only events of other workers need. Two
  child processes, one for each core, is the default here.
- `visibility_timeout` 30 s instead of an hour: messages of a dead worker come back after it, so
  that the run shows whether they do.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from celery import Celery, chain

from benchmarks.peers import job

app = Celery("peers", broker=f"redis+socket://{os.environ[job.REDIS]}")
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 30, "unacked_restore_throttle": 1},
)


@app.task
def one(context: dict[str, Any]) -> dict[str, Any]:
    """The first stage."""
    job.started(context)
    job.work()
    return context


@app.task
def two(context: dict[str, Any]) -> dict[str, Any]:
    """The second stage."""
    job.work()
    return context


@app.task
def three(context: dict[str, Any]) -> dict[str, Any]:
    """The last stage."""
    job.work()
    job.ended(context)
    return context


async def prepare() -> None:
    """Needs nothing."""


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Sends a chain per task. The call blocks: Celery's client is synchronous."""

    async def submit(context: dict[str, Any]) -> None:
        chain(one.s(context), two.s(), three.s()).apply_async()

    yield submit
