"""Records that Kafka refuses, in every service: only what they stand for ends."""

from __future__ import annotations

from contextlib import AsyncExitStack

import orjson
import pytest
from tests.support.callback_targets import make_callback
from tests.support.pipeline import System
from tests.support.services import make_topics, read, running_service
from tests.support.topics import limit
from tests.support.waiting import in_time, wait_until

from penstock.checks.app import Rule, check
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.contracts.validation import conform
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.processing.outbox import redeliver
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.postgres import callback_ends, callbacks, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session
from penstock.settings import Platform
from penstock.stages import app as stages
from penstock.stages.settings import StagesSettings
from penstock.worker import Done, Next, Worker, WorkerSettings

# More than a lowered limit, and less than what a context may have inline.
LARGE = "x" * 3_500


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    return Platform(kafka=kafka_servers, prefix=prefix, postgres=database)


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=2, max_attempts=5, events="all"))
        yield pool


@pytest.fixture
async def system(settings, pool):
    async with AsyncExitStack() as stack:
        yield System(settings.kafka, settings.prefix, settings.postgres, stack, pool)


async def submit(pool, *values):
    given = [Submission(type="t", context=Context.encode(value)) for value in values]
    return [found.id for found in await tasks.submit(pool, given)]


async def work(system):
    """Runs a worker whose handler returns its context."""
    worker = Worker(WorkerSettings(**system.where, objects="memory:///"))

    @worker.stage("t.start")
    async def start(task):
        return Done(task.context)

    await system.stack.enter_async_context(running_service(worker.serve))


async def test_a_refused_ready_record_fails_its_task_alone(settings, pool, system):
    """O1, S7: of 41 tasks released together, Kafka refuses the record of one. It fails with the
    reason; the others succeed, and no service ends."""
    await limit(settings, "ready.t", 2_000)
    ids = await submit(pool, *range(20), LARGE, *range(20))
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    await system.become(succeeded=40, failed=1)
    row = await tasks.get(pool, ids[20])
    assert row["state"] == "failed"
    assert "Kafka refuses its ready record" in row["error"]
    assert (await check(settings)).clean


async def test_a_refused_result_fails_its_attempt_alone(settings, pool, system):
    """W4, O1: Kafka refuses the record with the result of one attempt. It fails for good; the
    results beside it count, on their first attempt, and the worker goes on."""
    await system.start("task-sync", "heartbeats", "stages")
    await limit(settings, "stage-results", 2_000)
    ids = await submit(pool, *range(20), LARGE, *range(20))
    await work(system)
    await system.become(succeeded=40, failed=1)
    row = await tasks.get(pool, ids[20])
    assert (row["state"], row["attempt"]) == ("failed", 0)
    assert "Unwritable" in row["error"]
    assert await pool.fetchval("SELECT max(attempt) FROM task") == 0
    later = await submit(pool, "one more")
    await system.become(succeeded=41, failed=1)
    assert (await tasks.get(pool, later[0]))["state"] == "succeeded"


async def test_a_refused_event_is_parked_and_published_by_repair(settings, pool, system):
    """C1, O2b: an event that Kafka refuses stays in the outbox with the reason, and holds up no
    other. `check` reports it. Once the topic takes it, `--repair` publishes it."""
    await limit(settings, "events", 2_000)
    await system.start("task-sync", "heartbeats")
    await system.stack.enter_async_context(
        running_service(
            stages.create_app(
                StagesSettings(**system.where, postgres=system.database, sweep_age_s=0.2, sweep_every_s=0.2)
            )
        )
    )
    ids = await submit(pool, *range(10), LARGE, *range(10))
    await work(system)
    await system.become(succeeded=21)

    async def parked():
        rows = await pool.fetch("SELECT records, refused FROM outbox")
        return rows if rows and all(row["refused"] for row in rows) else None

    [row] = await wait_until(parked, what="only the refused event is left")
    assert [orjson.loads(record)["task"]["id"] for record in row["records"]] == [ids[10]]

    async def published():
        return {event["task"]["id"] for event in await read(settings.kafka, settings.prefix + "events")}

    assert await published() == set(ids) - {ids[10]}
    report = await check(settings)
    assert report.counts == {Rule.REFUSED: 1}
    await limit(settings, "events", 100_000)
    report = await check(settings, repair=True)
    assert (report.repaired, report.remaining) == ({Rule.REFUSED: 1}, {})
    assert await published() == set(ids)


async def test_a_refused_callback_is_dead_and_delays_no_other(settings, pool):
    """C6, C12, O1: of callbacks that are published in one record, Kafka refuses one. The others are
    on the topic. The refused one is dead with the reason, and has a result and a letter."""
    await limit(settings, "callbacks", 2_000)
    made = [make_callback("http://a.example/hook", number) for number in range(5)]
    large = make_callback("http://a.example/hook", 9, body=LARGE.encode())
    every = [*made[:2], large, *made[2:]]
    async with (
        running(make_producer(settings)) as producer,
        open_session(settings.postgres, "test") as session,
    ):
        await pool.executemany(
            "INSERT INTO callback (id, target, task_id, body, due_at) VALUES ($1, $2, $3, $4, now())",
            [(each.id, each.target.url, each.task_id, each.body) for each in every],
        )
        due = await callbacks.take_due(session, 10, horizon_s=60)
        await callback_ends.bury(session, await redeliver(producer, settings, due))
    written = await in_time(read(settings.kafka, settings.prefix + "callbacks"))
    ids = {one["id"] for each in written for one in (each if isinstance(each, list) else [each])}
    assert ids == {each.id for each in made}
    [dead] = await pool.fetch("SELECT id, error FROM callback WHERE state = 'dead'")
    assert dead["id"] == large.id
    assert "MessageSizeTooLargeError" in dead["error"]
    [result, letter] = [
        orjson.loads(row["records"][0])
        for row in await pool.fetch("SELECT records FROM callback_outbox ORDER BY topic DESC")
    ]
    conform(result, "callback-result")
    conform(letter, "callback-dead")
    assert (result["id"], result["outcome"], result["attempts"]) == (large.id, "dead", 0)
    assert "MessageSizeTooLargeError" in letter["error"]["message"]


async def test_no_attempt_follows_a_refused_result(pool, system):
    """W4: Kafka refuses a result with which the worker goes on. Its attempt fails and the next
    stage does not begin; the worker goes on with the tasks beside it."""
    await system.start("task-sync", "heartbeats", "stages")
    await limit(system.settings(), "stage-results", 2_000)
    worker, began = Worker(WorkerSettings(**system.where, objects="memory:///")), []

    @worker.stage("t.start")
    async def start(task):
        return Next("two", task.context)

    @worker.stage("t.two")
    async def two(task):
        began.append(task.id)
        return Done()

    async with running_service(worker.serve):
        ids = await submit(pool, "a", LARGE, "b")
        await system.become(succeeded=2, failed=1)
    assert sorted(began) == [ids[0], ids[2]]
    assert {record.get("step") for record in await system.records()} <= {0, None}
