"""A worker goes on with its tasks, with all services, on the real Kafka and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import orjson
import pytest
from tests.support.pipeline import System, submit
from tests.support.services import read, running_service
from tests.support.topics import limit
from tests.support.waiting import in_time, wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.early_start import EarlyStart
from penstock.heartbeats import claims, lost_follows
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.topics import service_group
from penstock.postgres import advance, documents, tasks, types
from penstock.postgres.queries import query
from penstock.stages import handlers
from penstock.stages.app import create_app
from penstock.stages.settings import StagesSettings
from penstock.worker import Done, Fail, Next, Worker, WorkerSettings

TASK_TYPES = (types.TaskType(name="t", partitions=1), types.TaskType(name="limited", max_in_flight=5))


@pytest.fixture
async def system(where, pool):
    async with AsyncExitStack() as stack:
        system = System(where["kafka"], where["prefix"], where["postgres"], stack, pool)
        await system.start("heartbeats", "stages", "task-sync")
        yield system


async def start_worker(system, two_s=0.0):
    worker = Worker(WorkerSettings(**system.where, objects="memory:///"))
    for name in ("t", "limited"):

        @worker.stage(f"{name}.start")
        async def start(task):
            return Next("two", {**task.context, "start": task.id})

        @worker.stage(f"{name}.two")
        async def two(_task):
            await asyncio.sleep(two_s)
            return Next("three")

        @worker.stage(f"{name}.three")
        async def three(task):
            return Done({**task.context, "attempt": task.attempt})

    await system.stack.enter_async_context(running_service(worker.serve))


async def run(system, type_name, count):
    """Runs tasks; returns the steps of their ready records."""
    found = await tasks.submit(
        system.pool, [Submission(type=type_name, context=Context.encode({"n": n})) for n in range(count)]
    )
    ids = [each.id for each in found]
    ended = "SELECT count(*) = $2 FROM task WHERE id = ANY ($1) AND state = 'succeeded'"
    await wait_until(lambda: system.pool.fetchval(ended, ids, count), what="the tasks have succeeded")
    rows = await system.pool.fetch(
        "SELECT task_id, step, stage, outcome FROM attempt WHERE task_id = ANY ($1) ORDER BY task_id, step",
        ids,
    )
    each = [(0, "start", "next"), (1, "two", "next"), (2, "three", "done")]
    assert [tuple(row) for row in rows] == [(id_, *step) for id_ in ids for step in each]
    return sorted(record["step"] for record in await ready_records(system, type_name, ids))


async def ready_records(system, type_name, ids):
    """The ready records of tasks."""
    records = await read(system.where["kafka"], f"{system.where['prefix']}ready.{type_name}")
    return [record for record in records if record.get("id") in ids]


async def history(system, task):
    """The attempts of a task: step, stage and outcome."""
    rows = await system.pool.fetch(
        "SELECT step, stage, outcome FROM attempt WHERE task_id = $1 ORDER BY step, attempt", task
    )
    return [tuple(row) for row in rows]


async def test_a_task_of_short_stages_has_one_ready_record(system):
    """W4, S3: the worker goes on from stage to stage; the history has each of them."""
    await start_worker(system)
    assert await run(system, "t", 30) == [0] * 30


async def test_people_see_the_count_of_attempts(system):
    """W4, O5: a worker chose the number of an attempt. Its handler, its events and the document of
    its task count from 0."""
    await start_worker(system)
    await run(system, "t", 2)
    for row in await system.pool.fetch("SELECT id FROM task"):
        found = documents.detail(await tasks.get(system.pool, row["id"]))
        assert (found["attempt"], orjson.loads(orjson.dumps(found["result"]))["attempt"]) == (0, 0)
        assert [each["attempt"] for each in found["attempts"]] == [0, 0, 0]
        assert [each["log"] for each in found["attempts"]] == [
            f"/tasks/{row['id']}/logs/{n}/0" for n in range(3)
        ]
    events = await wait_until(lambda: read(system.where["kafka"], f"{system.where['prefix']}events"))
    assert {event["task"]["attempt"] for event in events} == {0}


async def test_each_stage_of_a_type_with_limits_is_released(system):
    """S8: each stage of such a task passes its limits."""
    await start_worker(system)
    assert await run(system, "limited", 5) == [0] * 5 + [1] * 5 + [2] * 5


async def test_a_long_chain_passes_task_sync(system):
    """S3: a second after the ready record was taken, the task takes its turn with the others."""
    await start_worker(system, two_s=1.2)
    assert await run(system, "t", 3) == [0] * 3 + [2] * 3


async def test_the_record_of_a_type_with_limits_permits_nothing(system):
    """S8: task-sync, not the worker, decides when the next stage of such a task begins."""
    await start_worker(system)
    [limited] = await submit(system.pool, type_name="limited", context=Context.encode({}))
    [free] = await submit(system.pool, context=Context.encode({}))
    ended = "SELECT count(*) = 2 FROM task WHERE state = 'succeeded'"
    await wait_until(lambda: system.pool.fetchval(ended), what="both have succeeded")
    assert [record.get("goes_on") for record in await ready_records(system, "limited", [limited])] == [
        None
    ] * 3
    assert [record.get("goes_on") for record in await ready_records(system, "t", [free])] == [True]


async def test_a_recovered_task_passes_task_sync(system):
    """S3, S8: a task that is recovered in a later stage counts for limits that its type may get.
    From then on each stage passes task-sync."""
    worker, failed = Worker(WorkerSettings(**system.where, objects="memory:///")), set()

    @worker.stage("t.start")
    async def start(_task):
        return Next("two")

    @worker.stage("t.two")
    async def two(task):
        if task.id in failed:
            return Next("three")
        failed.add(task.id)
        return Fail("once", permanent=True)

    @worker.stage("t.three")
    async def three(_task):
        return Done()

    async with running_service(worker.serve):
        [task] = await submit(system.pool)
        await system.become(failed=1)
        assert [row["id"] for row in await system.pool.fetch(query("operations.recover"), [task])] == [task]
        await system.become(succeeded=1)
    records = await ready_records(system, "t", [task])
    assert sorted((record["step"], record.get("goes_on")) for record in records if record["step"]) == [
        (1, None),
        (2, None),
    ]
    assert [record.get("goes_on") for record in records if not record["step"]] == [True]
    expected = [(0, "start", "next"), (1, "two", "fail"), (1, "two", "next"), (2, "three", "done")]
    assert await history(system, task) == expected


async def test_stages_away_for_longer_than_claims_wait(where, pool, monkeypatch):
    """W4, H5, O1: claims and results wait for the commit of the result before, for a while. When
    the stage processor is away for longer, the tasks end when it is back, and nothing is charged.
    """
    monkeypatch.setattr(claims, "WAITS_S", 0.5)
    monkeypatch.setattr(handlers, "TRIES", 2)
    monkeypatch.setattr(lost_follows, "SEARCH_S", 0.2)
    async with AsyncExitStack() as stack:
        system = System(where["kafka"], where["prefix"], where["postgres"], stack, pool)
        await system.start("heartbeats", "task-sync")
        worker, finish, ran = (
            Worker(WorkerSettings(**system.where, objects="memory:///")),
            asyncio.Event(),
            [],
        )

        @worker.stage("t.start")
        async def start(task):
            return Next("two", task.context)

        @worker.stage("t.two")
        async def two(task):
            ran.append(task.id)
            if task.context == "long":
                await finish.wait()
            return Next("three", task.context)

        @worker.stage("t.three")
        async def three(task):
            return Done(task.context)

        await stack.enter_async_context(running_service(worker.serve))
        short = await submit(pool, 5, context=Context.encode("short"))
        long = await submit(pool, 3, context=Context.encode("long"))
        await wait_until(lambda: len(ran) == 8, what="the second stages run")
        reported = {*((task, step) for task in short for step in range(3)), *((task, 0) for task in long)}

        async def all_reported():
            records = await read(system.where["kafka"], f"{system.where['prefix']}stage-results")
            return {
                (each["id"], each["step"]) for record in records for each in record["results"]
            } == reported

        await wait_until(all_reported, what="the results are on Kafka")
        topic = f"{system.where['prefix']}heartbeats"

        async def claimed():
            records = await read(system.where["kafka"], topic)
            return {task[0] for record in records for task in record["tasks"] if task[1] == 1} >= set(long)

        await wait_until(claimed, what="the long attempts are claimed")

        async def given_up():
            async with admin_client(system.settings()) as admin:
                offsets = await admin.list_consumer_group_offsets(
                    service_group(system.where["prefix"], "heartbeats")
                )
            committed = sum(meta.offset for meta in offsets.values() if meta.offset > 0)
            return committed >= len(await read(system.where["kafka"], topic))

        await wait_until(given_up, what="the claims wait no more")
        await system.start("stages")
        await system.become(succeeded=5, running=3)
        finish.set()
        await system.become(succeeded=8)
    assert Counter(ran) == dict.fromkeys(short + long, 1)
    assert await pool.fetchval("SELECT sum(losses + failures) FROM task") == 0
    for task in short + long:
        assert await history(system, task) == [(0, "start", "next"), (1, "two", "next"), (2, "three", "done")]


async def test_an_attempt_is_stopped_when_its_worker_is_cut_off(where, pool, monkeypatch):
    """W6, H10: Kafka takes no claim of the attempt with which the worker went on, for most of a
    lease. The worker stops it, and no record brings it back: its lease does, at the platform."""
    monkeypatch.setattr(lost_follows, "SEARCH_S", 0.2)
    await pool.execute("UPDATE task_type SET lease_ms = 2000, retry_base_ms = 0 WHERE name = 't'")
    async with AsyncExitStack() as stack:
        system = System(where["kafka"], where["prefix"], where["postgres"], stack, pool)
        await system.start("heartbeats", "stages", "task-sync")
        worker, began, stopped = (
            Worker(WorkerSettings(**system.where, objects="memory:///")),
            [],
            asyncio.Event(),
        )
        # The first stage needs no claim.
        worker._early_start = EarlyStart(after_assignment_s=0.0, old_s=60.0)

        @worker.stage("t.start")
        async def start(_task):
            return Next("two")

        @worker.stage("t.two")
        async def two(task):
            began.append(task.attempt)
            if task.attempt:
                return Done("again")
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        await stack.enter_async_context(running_service(worker.serve))
        await limit(system.settings(), "heartbeats", 1)
        [task] = await submit(pool)
        await in_time(stopped.wait())
        assert began == [0]
        await limit(system.settings(), "heartbeats", 1_000_000)
        await system.become(succeeded=1)
    assert began == [0, 1]
    expected = [(0, "start", "next"), (1, "two", "expired"), (1, "two", "done")]
    assert await history(system, task) == expected


async def test_a_cancellation_stops_the_stage_with_which_the_worker_went_on(where, pool):
    """H3: a task is cancelled in the row of its first stage, while its worker runs the second one.
    The gateway dies before it publishes that. The sweeper's revocation stops the handler, without a
    heartbeat processor."""
    async with AsyncExitStack() as stack:
        system = System(where["kafka"], where["prefix"], where["postgres"], stack, pool)
        await system.start("task-sync")
        worker = Worker(WorkerSettings(**system.where, objects="memory:///"))
        began, stopped = asyncio.Event(), asyncio.Event()

        @worker.stage("t.start")
        async def start(_task):
            return Next("two")

        @worker.stage("t.two")
        async def two(_task):
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        await stack.enter_async_context(running_service(worker.serve))
        [task] = await submit(pool)
        await in_time(began.wait())
        cancelled, _unpublished = await advance.cancel(pool, [task])
        assert cancelled == [task]
        sweeping = StagesSettings(**where, sweep_age_s=1.0, sweep_every_s=0.3)
        await stack.enter_async_context(running_service(create_app(sweeping)))
        await in_time(stopped.wait())
    assert await system.states() == {"cancelled": 1}
