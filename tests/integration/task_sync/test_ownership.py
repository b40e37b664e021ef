"""Replicas of task-sync: task types are assigned to replicas, handed over, and taken over after a
kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from tests.support.services import read, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.postgres import tasks, types
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

TYPES = [f"t{number}" for number in range(6)]
TASK_TYPES = tuple(types.TaskType(name=name, partitions=1) for name in TYPES)
OWNERS = """
    SELECT t.name, l.pid FROM task_type t LEFT JOIN pg_locks l
    ON l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (l.classid::bigint << 32) | l.objid::bigint = hashtextextended('penstock.release.' || t.name, 0)
"""


@pytest.fixture
def settings(where):
    return TaskSyncSettings(**where, recheck_s=3600, window=50_000, window_floor=50_000)


async def owners(pool):
    """Returns the session that owns each type."""
    return {row["name"]: row["pid"] for row in await pool.fetch(OWNERS)}


async def shares(pool):
    """Returns the number of types of each replica, largest first, or None while a type has no
    owner."""
    found = (await owners(pool)).values()
    return None if None in found else sorted(Counter(found).values(), reverse=True)


async def wait_for_shares(pool, *expected):
    async def reached():
        return await shares(pool) == list(expected)

    try:
        await wait_until(reached, what=f"types are assigned as {expected}")
    except TimeoutError as late:
        late.add_note(f"they are spread as {await shares(pool)}")
        raise


async def submit_everywhere(pool, count=1):
    submissions = [Submission(type=name, context=Context.encode(None)) for name in TYPES]
    await tasks.submit(pool, submissions * count)


async def all_released(pool):
    return not await pool.fetchval("SELECT EXISTS (SELECT FROM task WHERE state = 'ready')")


async def released(settings, name):
    return [record["id"] for record in await read(settings.kafka, f"{settings.prefix}ready.{name}")]


@asynccontextmanager
async def process(settings):
    """Starts a replica that can be killed."""
    fields = ("kafka", "prefix", "postgres", "objects", "window", "window_floor")
    environment = {f"PENSTOCK_{name.upper()}": str(getattr(settings, name)) for name in fields}
    replica = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "run", "task-sync", env={**os.environ, **environment}
    )
    try:
        yield replica
    finally:
        if replica.returncode is None:
            replica.kill()
        await replica.wait()


async def test_types_are_assigned_to_joining_and_leaving_replicas(settings, pool):
    """S7: each replica owns its share of the types. A new replica receives types and a stopping one
    hands over all, without waiting for a poll. Each released task has one record."""
    # An hour between polls: only notifications trigger a handover.
    settings = TaskSyncSettings(**{**vars(settings), "own_retry_s": 3600.0})
    async with running_service(create_app(settings)):
        await wait_for_shares(pool, 6)
        submitting = asyncio.create_task(keep_submitting(pool))
        async with running_service(create_app(settings)):
            await wait_for_shares(pool, 3, 3)
            async with running_service(create_app(settings)):
                await wait_for_shares(pool, 2, 2, 2)
            await wait_for_shares(pool, 3, 3)
        await wait_for_shares(pool, 6)
        submitting.cancel()
        await asyncio.wait({submitting})
        await submit_everywhere(pool)
        await wait_until(lambda: all_released(pool))
    expected = {row["id"] for row in await pool.fetch("SELECT id FROM task")}
    found = [task for name in TYPES for task in await released(settings, name)]
    assert len(found) == len(set(found)), "a handover wrote a record twice"
    assert set(found) == expected


async def keep_submitting(pool):
    while True:
        await submit_everywhere(pool)
        await asyncio.sleep(0.1)


@pytest.mark.alone
async def test_a_replica_takes_over_within_seconds_after_a_kill(settings, pool):
    """S7: after kill -9 of a replica another one releases its types within five seconds. Only
    batches that were in flight have duplicate records."""
    async with process(settings) as first:
        await wait_for_shares(pool, 6)
        async with running_service(create_app(settings)):
            await wait_for_shares(pool, 3, 3)
            await submit_everywhere(pool, 50)
            await wait_until(lambda: pool.fetchval("SELECT count(*) > 100 FROM task WHERE state = 'queued'"))
            first.send_signal(signal.SIGKILL)
            killed_s = time.monotonic()
            await submit_everywhere(pool)
            # Tasks whose records are not yet confirmed to be on Kafka.
            in_flight = {
                task for row in await pool.fetch("SELECT task_ids FROM release") for task in row["task_ids"]
            }
            await wait_until(lambda: all_released(pool))
            took_s = time.monotonic() - killed_s
            await wait_for_shares(pool, 6)
    sys.stderr.write(f"\nreleases of all types {took_s:.2f} s after the kill\n")
    assert took_s < 5
    record_counts = Counter([task for name in TYPES for task in await released(settings, name)])
    assert set(record_counts) == {row["id"] for row in await pool.fetch("SELECT id FROM task")}
    assert {task for task, records in record_counts.items() if records > 1} <= in_flight
