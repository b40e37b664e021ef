"""Ready topics that are missing or broken, on real servers: only their types wait."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiokafka.admin import NewTopic
from tests.support.pipeline import submit
from tests.support.services import read_records, running_service
from tests.support.waiting import wait_until

from penstock.contracts.ready import ReadyTask
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology import topic_plan
from penstock.postgres import types
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = ()

PARTITIONS = 4
# More than a type may be delayed by another's fault, on a busy machine.
WITHIN_S = 10.0


@pytest.fixture
def settings(where):
    # No worker takes records, so the window must have room for all.
    return TaskSyncSettings(**where, window_floor=1_000)


@pytest.fixture
async def admin(settings):
    async with admin_client(settings) as admin:
        yield admin


async def released(pool, ids):
    states = await pool.fetch("SELECT state FROM task WHERE id = ANY ($1)", ids)
    return {row["state"] for row in states} == {"queued"}


async def released_in_time(pool, type_name, seconds):
    """Submits a task about ten times a second; each is released within `WITHIN_S`."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        ids = await submit(pool, 1, type_name)
        await wait_until(lambda ids=ids: released(pool, ids), timeout=WITHIN_S)
        await asyncio.sleep(0.1)  # the pace of the submissions


async def partitions_of(admin, name):
    [found] = await admin.describe_topics([name])
    return len(found["partitions"])


@pytest.mark.parametrize("partitions", [None, 1])
async def test_a_topic_that_is_deleted_delays_only_its_own_type(settings, pool, admin, partitions):
    """S1, O1: the ready topic of an owned type is deleted, and perhaps created again with fewer
    partitions. Another type is released meanwhile, and then this one, too; task-sync goes on."""
    for name in ("healthy", "deleted"):
        await types.register(pool, types.TaskType(name=name, partitions=PARTITIONS))
    topic = settings.prefix + "ready.deleted"
    async with running_service(create_app(settings)):
        first = [*await submit(pool, 20, "deleted"), *await submit(pool, 20, "healthy")]
        await wait_until(lambda: released(pool, first))
        await admin.delete_topics([topic])
        if partitions is not None:
            await admin.create_topics([NewTopic(topic, partitions, 1)])
        later = await submit(pool, 20, "deleted")
        await released_in_time(pool, "healthy", 8)
        later += await submit(pool, 20, "deleted")
        await released_in_time(pool, "healthy", 2)
        await wait_until(lambda: released(pool, later))
        assert await partitions_of(admin, topic) == PARTITIONS


async def test_a_topic_that_refuses_all_records_fails_no_task(settings, pool, admin):
    """S1, O1: an operator makes a ready topic compacted, so that it refuses every record. Its tasks
    wait, another type is released, and all goes on when the setting is put right."""
    for name in ("healthy", "compacted"):
        await types.register(pool, types.TaskType(name=name, partitions=PARTITIONS))
    topic = settings.prefix + "ready.compacted"

    async def clean_up(policy):
        await topic_plan._alter(admin, {topic: {"cleanup.policy": policy}})

        async def applied():
            return (await topic_plan._describe(admin, [topic]))[topic].configs["cleanup.policy"] == policy

        await wait_until(applied)

    async with running_service(create_app(settings)):
        await wait_until(lambda: exists(admin, topic))
        await clean_up("compact")
        ids = await submit(pool, 20, "compacted")
        await released_in_time(pool, "healthy", 3)
        await clean_up("delete")
        await wait_until(lambda: written(settings, topic, ids))
    assert await released(pool, ids)


async def exists(admin, topic):
    return topic in await admin.list_topics()


async def written(settings, topic, ids):
    records = await read_records(settings.kafka, topic)
    return {ReadyTask.decode(record.value, "compacted").fence.id for record in records} == set(ids)
