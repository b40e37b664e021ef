"""An access list forbids the topic or the group of one type: no other type waits."""

from __future__ import annotations

import pytest
from tests.support.access_lists import denied
from tests.support.scraping import scrape
from tests.support.services import read_records, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.submission import Submission
from penstock.kafka.topology.acls import AccessRule
from penstock.kafka.topology.rights import GROUP, LITERAL, TOPIC
from penstock.local.ports import choose_port
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Done, Worker, WorkerSettings

pytestmark = pytest.mark.declared_topics

# More than a type may be delayed by another's fault, on a busy machine.
WITHIN_S = 10.0


@pytest.fixture
async def pool(database):
    async with open_pool(database, "test") as pool:
        for name in ("healthy", "forbidden"):
            await types.register(pool, types.TaskType(name=name, partitions=2))
        yield pool


async def submit(pool, type_name, count=1):
    submission = Submission(type=type_name, context=Context.encode(None))
    return [found.id for found in await tasks.submit(pool, [submission] * count)]


async def written(secure_kafka, acl_prefix, type_name):
    records = await read_records(secure_kafka.plain, f"{acl_prefix}ready.{type_name}")
    return {ReadyTask.decode(record.value, type_name).fence.id for record in records}


@pytest.mark.parametrize(
    ("kind", "name", "operations", "opened", "reason"),
    [
        (TOPIC, "ready.forbidden", ("Write",), True, "topic_refused"),
        (TOPIC, "ready.forbidden", ("Read", "Write", "Create", "Describe"), True, "topic_refused"),
        (TOPIC, "ready.forbidden", ("Create",), False, "topic_refused"),
        (GROUP, "workers.forbidden", ("Describe",), True, "lag_unknown"),
    ],
)
async def test_a_forbidden_type_holds_no_other(
    secure_kafka, acl_prefix, database, pool, kind, name, operations, opened, reason
):
    """S1, O1, O5: an operator denies task-sync an operation on the topic or the group of one type,
    before that is first released or later. Task-sync goes on, releases the other type and says
    which one it holds and why. When the operation is permitted again, all tasks are released."""
    port = choose_port(0)
    settings = TaskSyncSettings(
        **secure_kafka.service("task-sync"),
        prefix=acl_prefix,
        postgres=database,
        objects="memory:///",
        metrics_port=port,
        recheck_s=1.0,
    )
    forbidden = []

    async def released():
        return await written(secure_kafka, acl_prefix, "forbidden") >= set(forbidden)

    async def is_held():
        return (await scrape(port)).get(("penstock_type_held", reason, "forbidden")) == 1

    async def healthy_is_released():
        [task_id] = await submit(pool, "healthy")

        async def has_record():
            return task_id in await written(secure_kafka, acl_prefix, "healthy")

        await wait_until(has_record, timeout=WITHIN_S)

    rule = AccessRule("task-sync", kind, acl_prefix + name, LITERAL, operations)
    async with running_service(create_app(settings)) as service:
        if opened:
            forbidden += await submit(pool, "forbidden")
            await wait_until(released)
        async with denied(secure_kafka.plain, rule):
            forbidden += await submit(pool, "forbidden", 3)
            await wait_until(is_held, timeout=60)
            for _ in range(20):
                await healthy_is_released()
                # Also while the topic is opened again, which may succeed before a write fails.
                assert await is_held()
            assert not service.done()
        await wait_until(released)

        async def goes_on():
            found = await scrape(port)
            return not any(value for labels, value in found.items() if labels[0] == "penstock_type_held")

        await wait_until(goes_on)


async def test_a_worker_runs_its_other_types(secure_kafka, acl_prefix, database, pool, caplog):
    """W1, O5: an operator denies a worker the records of one of its types, while it runs. It goes
    on with the other type, and runs the tasks of both when the operation is permitted again."""
    executed = set()
    worker = Worker(WorkerSettings(**secure_kafka.service("worker"), prefix=acl_prefix, objects="memory:///"))

    @worker.stage("healthy.start")
    @worker.stage("forbidden.start")
    async def start(task):
        executed.add(task.id)
        return Done()

    settings = TaskSyncSettings(
        **secure_kafka.service("task-sync"), prefix=acl_prefix, postgres=database, objects="memory:///"
    )
    rule = AccessRule("worker", TOPIC, f"{acl_prefix}ready.forbidden", LITERAL, ("Read",))
    async with running_service(create_app(settings)), running_service(worker.serve) as serving:
        ids = {*await submit(pool, "healthy"), *await submit(pool, "forbidden")}
        await wait_until(lambda: executed >= ids, timeout=60)
        async with denied(secure_kafka.plain, rule):

            async def is_refused():
                # A fetch that has begun before still returns records.
                await submit(pool, "forbidden")
                return any(getattr(record, "event", "") == "type_refused" for record in caplog.records)

            await wait_until(is_refused, every=0.5)
            forbidden = set(await submit(pool, "forbidden", 3))
            for _ in range(20):
                ids = set(await submit(pool, "healthy"))
                await wait_until(lambda ids=ids: executed >= ids, timeout=WITHIN_S)
            assert not serving.done()
            assert not executed & forbidden
        await wait_until(lambda: executed >= forbidden, timeout=60)
