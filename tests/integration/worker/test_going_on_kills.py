"""Kills of a worker that goes on with a task, on the real Kafka and PostgreSQL.

The worker is a process, which kills itself at a given place. Another worker takes over.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack

import orjson
import pytest
from tests.support import going_on_probe
from tests.support.pipeline import System, submit
from tests.support.services import running_service
from tests.support.waiting import in_time, wait_until

from penstock.checks import in_transit
from penstock.checks.app import check
from penstock.contracts.context import Context
from penstock.heartbeats import lost_follows
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.group_members import describe, remove
from penstock.kafka.topology.topics import workers_group
from penstock.postgres import types
from penstock.settings import Platform
from penstock.stages import handlers
from penstock.worker import Worker, WorkerSettings

TASK_TYPES = (types.TaskType(name="t", partitions=1, lease_ms=2_000, retry_base_ms=0, retry_jitter=0),)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    """Lost attempts are found within a second, and a check waits as long for what is in transit."""
    monkeypatch.setattr(lost_follows, "SEARCH_S", 0.3)
    # A result that follows a stale one is stale, too, before the lease of the lost attempt ends.
    monkeypatch.setattr(handlers, "TRIES", 1)
    monkeypatch.setattr(in_transit, "SETTLE_S", 1.0)
    monkeypatch.setattr(in_transit, "SEARCH_EVERY_S", 0.2)


@pytest.fixture
async def system(where, pool):
    async with AsyncExitStack() as stack:
        system = System(where["kafka"], where["prefix"], where["postgres"], stack, pool)
        await system.start("heartbeats", "stages", "task-sync")
        yield system


async def run_killed(system, place):
    """Runs one task on a worker process until it kills itself; returns the task.

    Its member is removed from the group, as the end of its session does.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.going_on_probe", place, "two"),
        env={
            **os.environ,
            "PENSTOCK_KAFKA": system.where["kafka"],
            "PENSTOCK_PREFIX": system.where["prefix"],
            "PENSTOCK_OBJECTS": "memory:///",
        },
    )
    try:
        [task] = await submit(system.pool, context=Context.encode([]))
        assert await in_time(process.wait()) == -9
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    group = workers_group(system.where["prefix"], "t")
    async with admin_client(system.settings()) as admin:
        members = await wait_until(lambda: describe(admin, group), what="the killed member is in its group")
    for member in members:
        await remove(system.settings(), group, member.client)
    return task


@pytest.mark.parametrize(
    ("place", "stage", "runs", "expires"),
    [
        # The second worker's second stage and its runs by stage, and whether an attempt expires.
        ("before the result", "two", {"start": 1, "two": 1, "three": 1}, False),
        ("after the result", "two", {"start": 1, "two": 2, "three": 2}, True),
        ("after the result", "other", {"start": 1, "other": 1, "two": 1, "three": 2}, True),
        ("in the next handler", "two", None, True),
        ("after the claim", "two", {"two": 1, "three": 1}, True),
        ("after the last result", "two", None, False),
    ],
)
async def test_each_stage_takes_effect_once(system, where, place, stage, runs, expires):
    """W1, W4, H10: kill -9 between two instructions of a worker that goes on. The task ends, each
    of its stages once, with the output of the stage before as it is stored, and one attempt expires
    at most. Where the killed worker had not committed its offset, another runs its stage again
    and goes on with another output or to another stage: that has no effect."""
    task = await run_killed(system, place)
    worker = Worker(WorkerSettings(**system.where, objects="memory:///"))
    began = going_on_probe.make_worker(worker, "second", stage)
    async with running_service(worker.serve):
        await system.become(succeeded=1)
        if runs is not None:
            await wait_until(lambda: began == runs, what=f"the second worker ran {runs}")
        else:
            # Its record is behind that of the first task, whose offset may be committed or not.
            await submit(system.pool, context=Context.encode([]))
            await system.become(succeeded=2)
        report = await check(Platform(**where))
    assert report.clean, report
    rows = await system.pool.fetch(
        "SELECT step, stage, outcome, input FROM attempt WHERE task_id = $1 ORDER BY step, attempt", task
    )
    effective = [row for row in rows if row["outcome"] != "expired"]
    assert [(row["step"], row["stage"], row["outcome"]) for row in effective] == [
        (0, "start", "next"),
        (1, "two", "next"),
        (2, "three", "done"),
    ]
    first = "second" if place == "before the result" else "first"
    rest = "first" if place == "after the last result" else "second"
    output = [f"start by {first}", f"two by {rest}", f"three by {rest}"]
    assert orjson.loads(await system.pool.fetchval("SELECT result FROM task WHERE id = $1", task)) == output
    assert [orjson.loads(row["input"]) for row in effective[:2]] == [output[:0], output[:1]]
    assert (
        orjson.loads(await system.pool.fetchval("SELECT context FROM task WHERE id = $1", task)) == output[:2]
    )
    assert [row["step"] for row in rows if row["outcome"] == "expired"] == [1] * expires
