"""taskiq on Redis streams: each stage sends the next one.

`RedisStreamBroker` is the broker that taskiq-redis advises for tasks that must not be lost: a
message is acknowledged after its task. The worker process runs up to 100 tasks at once, its
default. `idle_timeout` is 30 s instead of ten minutes: messages of a dead worker come back after
it, so that the run shows whether they do. The lock of that has a time-out, as its documentation
advises, and the stream has a maximum length.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from taskiq_redis import RedisStreamBroker

from benchmarks.peers import job
from benchmarks.peers.taskiq_stages import stages

broker = RedisStreamBroker(
    f"unix://{os.environ[job.REDIS]}",
    idle_timeout=30_000,
    unacknowledged_lock_timeout=10,
    consumer_id="0",
    maxlen=1_000_000,
)
one = stages(broker)


async def prepare() -> None:
    """Needs nothing: the broker creates its stream."""


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Sends a message per task."""
    await broker.startup()

    async def submit(context: dict[str, Any]) -> None:
        await one.kiq(context)

    yield submit
    await broker.shutdown()
