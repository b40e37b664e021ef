"""A cluster of three brokers keeps every acknowledged task when a broker is killed under load.

PENSTOCK_LOAD=1 runs the long form: it sends more tasks, and kills and restarts each broker in turn.
"""

import asyncio
import os
import shutil
from contextlib import AsyncExitStack

import orjson
import pytest
from aiokafka.errors import KafkaError
from tests.support.memory_folder import make_folder
from tests.support.pipeline import System
from tests.support.services import read, restarted_when_ended
from tests.support.waiting import wait_until

from penstock.checks.app import check
from penstock.core.restart import RestartPolicy
from penstock.errors import PenstockError
from penstock.heartbeats import app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topic_plan import plan
from penstock.kafka.topology.topics import EVENTS, PLATFORM, SUBMITTED
from penstock.local.cluster import name_of, three_brokers
from penstock.local.supervisor import Supervisor
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka, Platform
from penstock.stages import app as stages
from penstock.stages.settings import StagesSettings
from penstock.task_sync import app as task_sync
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Done, Next, Worker, WorkerSettings

pytestmark = pytest.mark.declared_topics

LONG = bool(os.environ.get("PENSTOCK_LOAD"))
TASKS = 10_000 if LONG else 400
KILLED_BROKERS = (2, 3, 1) if LONG else (2,)
BATCH_SIZE = 50


@pytest.fixture
def supervisor():
    folder = make_folder()
    # In the short form the supervisor does not restart the killed broker.
    policy = None if LONG else RestartPolicy(first_s=3600, longest_s=3600)
    process_supervisor = Supervisor(lambda _name, _line: None, run_dir=folder / "run", policy=policy)
    yield process_supervisor, folder
    process_supervisor.close()
    shutil.rmtree(folder)


def worker_of(connection_settings):
    worker = Worker(WorkerSettings(**connection_settings, objects="memory:///"))

    @worker.stage("t.start")
    async def start(_task):
        return Next("end")

    @worker.stage("t.end")
    async def end(_task):
        return Done()

    return worker.serve


async def produce(settings, acknowledged):
    """Submits tasks in batches until all are acknowledged.

    Each task has an idempotency key, so that a repeated submission is harmless.
    """
    topic = settings.prefix + SUBMITTED.name
    remaining = list(range(TASKS))
    while remaining:
        try:
            async with running(make_producer(settings)) as producer:
                while remaining:
                    batch = remaining[:BATCH_SIZE]
                    records = [
                        orjson.dumps({"type": "t", "context": n, "idempotency_key": f"k-{n}"}) for n in batch
                    ]
                    sent = [await producer.send(topic, record) for record in records]
                    await asyncio.gather(*sent)
                    acknowledged.update(batch)
                    del remaining[: len(batch)]
        except (KafkaError, PenstockError) as error:
            print("produced again after", repr(error))


@pytest.mark.long
@pytest.mark.alone
async def test_a_broker_killed_under_load_loses_nothing(supervisor, database, postgres_server):
    """O5, T5: with three replicas, two of them in sync, every acknowledged submission becomes a
    task. Every task ends and has its event."""
    process_supervisor, folder = supervisor
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(three_brokers(process_supervisor, folder))
        (folder / "topics.toml").write_text("[defaults]\nreplication = 3\nmin_insync_replicas = 2\n")
        connection_settings = {"kafka": cluster.servers, "prefix": "c."}
        settings = Kafka.load({}, **connection_settings, topics_file=str(folder / "topics.toml"))
        await create_topics(settings, PLATFORM)

        async def as_declared():
            return await plan(settings) == []

        await wait_until(as_declared, what="every topic has three copies")
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=2))
        service_settings = {**connection_settings, "postgres": database}
        # Each service gets the declaration; without it the ready topic has the broker's defaults.
        topic_settings = {"topics_file": settings.topics_file}
        for make in (
            lambda: task_sync.create_app(
                TaskSyncSettings(**service_settings, **topic_settings, objects="memory:///")
            ),
            lambda: heartbeats.create_app(HeartbeatsSettings(**service_settings, **topic_settings)),
            lambda: stages.create_app(StagesSettings(**service_settings, **topic_settings)),
            lambda: worker_of(connection_settings),
        ):
            await stack.enter_async_context(restarted_when_ended(make))
        system = System(cluster.servers, "c.", database, stack, pool)

        acknowledged = set()
        producing = asyncio.ensure_future(produce(settings, acknowledged))

        async def progressed(share):
            done = (await system.states()).get("succeeded", 0)
            return done > TASKS * share

        for number, broker in enumerate(KILLED_BROKERS):
            await wait_until(lambda share=number / 4: progressed(share), timeout=300, what="some tasks end")
            assert (await system.states()).get("succeeded", 0) < TASKS, "the broker was killed after the load"
            cluster.brokers[broker].kill()
            await wait_until_dead(process_supervisor, broker)
            if LONG:
                await cluster.brokers[broker].wait_ready()
        await producing
        assert len(acknowledged) == TASKS
        await wait_until(lambda: ended(system), timeout=600, what="every task has succeeded")
        rows = await pool.fetch("SELECT idempotency_key FROM task")
        assert {row["idempotency_key"] for row in rows} == {f"k-{n}" for n in acknowledged}

        async def succeeded_ids():
            return {
                entry["task"]["id"]
                for entry in await event_entries(cluster.servers)
                if entry["event"] == "task.succeeded"
            }

        ids = {row["id"] for row in await pool.fetch("SELECT id FROM task")}

        async def all_reported():
            return await succeeded_ids() >= ids

        await wait_until(all_reported, every=1, what="every end is on events")
        assert (await check(Platform.load({}, **service_settings))).clean


async def wait_until_dead(process_supervisor, broker):
    await wait_until(lambda: process_supervisor.exits(name_of(broker)) > 0, what="the broker is dead")


async def ended(system):
    return await system.states() == {"succeeded": TASKS}


async def event_entries(kafka):
    """Returns the entries of the events topic; a record holds one or a list."""
    found = []
    for value in await read(kafka, f"c.{EVENTS.name}"):
        found += value if isinstance(value, list) else [value]
    return found
