"""Waiting time of HIGHEST tasks behind 100,000 LOWEST ones, with every handler busy."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from statistics import median

import pytest
from tests.support.pipeline import System
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.task import Priority
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.task_sync import app
from penstock.task_sync.release import ReleaseLoop
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Done, Worker, WorkerSettings

QUEUED, URGENT = 100_000, 20
# 200 tasks per second; the worker's backlog is five seconds of work.
HANDLERS, HANDLER_S = 20, 0.1


@pytest.mark.long
@pytest.mark.alone
async def test_a_highest_task_starts_within_two_drains_of_the_window(
    kafka_servers, prefix, database, monkeypatch
):
    """S3: behind 100,000 LOWEST tasks in PostgreSQL, on Kafka and in a saturated worker, HIGHEST
    tasks start within twice the window's drain time at p99."""
    await make_topics(kafka_servers, prefix)
    connection_settings = {"kafka": kafka_servers, "prefix": prefix, "objects": "memory:///"}
    release_loops = []
    init = ReleaseLoop.__init__

    def record_loop(self, *arguments):
        release_loops.append(self)
        init(self, *arguments)

    monkeypatch.setattr(ReleaseLoop, "__init__", record_loop)
    started_at_s, done = {}, 0
    worker = Worker(WorkerSettings(**connection_settings, pool=HANDLERS, backlog=1_000))

    @worker.stage("t.start")
    async def start(task):
        nonlocal done
        started_at_s[task.id] = time.monotonic()
        await asyncio.sleep(HANDLER_S)
        done += 1
        return Done()

    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=2))
        system = System(kafka_servers, prefix, database, stack, pool)
        await pool.execute(
            "INSERT INTO task (type, state, stage, priority, content_type, context)"
            " SELECT 't', 'ready', 'start', $2, 'json', 'null' FROM generate_series(1, $1::int)",
            QUEUED,
            int(Priority.LOWEST),
        )
        await system.start("heartbeats", "stages")
        settings = TaskSyncSettings(**connection_settings, postgres=database)
        await stack.enter_async_context(running_service(app.create_app(settings)))
        await stack.enter_async_context(running_service(worker.serve))
        [topic] = await wait_until(release_loops[0].topics.ready_topics)
        # Wait until the worker's backlog is full and the window has adapted.
        await wait_until(lambda: done > 1_000)
        waited_s, drains_s = [], []
        for _ in range(URGENT):
            before, began_s, lag = done, time.monotonic(), topic.window.size
            urgent = Submission(type="t", context=Context.encode(None), priority=Priority.HIGHEST)
            [found] = await tasks.submit(pool, [urgent])
            await wait_until(lambda found=found: found.id in started_at_s, every=0.002)
            waited_s.append(started_at_s[found.id] - began_s)
            drains_s.append(lag * (time.monotonic() - began_s) / max(1, done - before))
        assert await pool.fetchval("SELECT count(*) > $1 FROM task WHERE state = 'ready'", QUEUED // 2)
    p99_s = sorted(waited_s)[int(0.99 * (len(waited_s) - 1))]
    drain_s = median(drains_s)
    sys.stderr.write(
        f"\nbehind {QUEUED:,} LOWEST, {HANDLERS / HANDLER_S:g}/s: HIGHEST start after {median(waited_s):.2f} s at the median, "
        f"{p99_s:.2f} s at p99; the window drains in {drain_s:.2f} s\n"
    )
    assert p99_s <= 2 * drain_s
