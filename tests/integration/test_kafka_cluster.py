"""Three brokers, of which one is killed under load: nothing that was acknowledged is lost.

PENSTOCK_LOAD=1 runs the long form: more tasks, each broker killed in turn, and one of them kept away for a while.
"""

import asyncio
import os
import shutil
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiokafka.errors import KafkaError
from tests.running import read
from tests.system import System
from tests.waiting import wait_until

from penstock.checks.app import check
from penstock.core.restart import RestartPolicy
from penstock.errors import PenstockError
from penstock.heartbeats import app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka.connection import create_topics, make_producer, running
from penstock.kafka.planning import plan
from penstock.kafka.topics import EVENTS, PLATFORM, SUBMITTED
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

LONG = bool(os.environ.get("PENSTOCK_LOAD"))
TASKS = 10_000 if LONG else 400
VICTIMS = (2, 3, 1) if LONG else (2,)
ABOUT_AT_ONCE = 50


@pytest.fixture
def supervisor():
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    # In the short form the dead broker stays dead.
    policy = None if LONG else RestartPolicy(first_s=3600, longest_s=3600)
    made = Supervisor(lambda _name, _line: None, run_dir=folder / "run", policy=policy)
    yield made, folder
    made.close()
    shutil.rmtree(folder)


@asynccontextmanager
async def kept_running(make):
    """A service that is started again when it ends, as its supervisor would."""
    stopping = asyncio.Event()
    restarts = 0

    async def keep():
        nonlocal restarts
        while not stopping.is_set():
            try:
                await make()(stopping, lambda: None)
            except PenstockError:
                restarts += 1
                assert restarts < 50

    task = asyncio.ensure_future(keep())
    try:
        yield
    finally:
        stopping.set()
        await task


def worker_of(where):
    worker = Worker(WorkerSettings(**where, objects="memory:///"))

    @worker.stage("t.start")
    async def start(_task):
        return Next("end")

    @worker.stage("t.end")
    async def end(_task):
        return Done()

    return worker.serve


async def produce(settings, acknowledged):
    """Submits until all tasks are acknowledged, a few at a time; each with a key, so that sending one again is harmless."""
    topic = settings.prefix + SUBMITTED.name
    left = list(range(TASKS))
    while left:
        try:
            async with running(make_producer(settings)) as producer:
                while left:
                    some = left[:ABOUT_AT_ONCE]
                    records = [
                        orjson.dumps({"type": "t", "context": n, "idempotency_key": f"k-{n}"}) for n in some
                    ]
                    sent = [await producer.send(topic, record) for record in records]
                    await asyncio.gather(*sent)
                    acknowledged.update(some)
                    del left[: len(some)]
        except (KafkaError, PenstockError) as error:
            print("produced again after", repr(error))


@pytest.mark.slow
async def test_a_broker_killed_under_load_loses_nothing(supervisor, database, postgres_server):
    """D5, T5: replication 3, two in sync: every acknowledged submission becomes a task, every task ends and is told on events."""
    keeper, folder = supervisor
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(three_brokers(keeper, folder))
        (folder / "topics.toml").write_text("[defaults]\nreplication = 3\nmin_insync_replicas = 2\n")
        where = {"kafka": cluster.servers, "prefix": "c."}
        settings = Kafka.load({}, **where, topics_file=str(folder / "topics.toml"))
        await create_topics(settings, PLATFORM)

        async def as_declared():
            return await plan(settings) == []

        await wait_until(as_declared, what="every topic has three copies")
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=2))
        both = {**where, "postgres": database}
        # Declared for all, or the ready topic would have the broker's own defaults.
        declared = {"topics_file": settings.topics_file}
        for make in (
            lambda: task_sync.create_app(TaskSyncSettings(**both, **declared, objects="memory:///")),
            lambda: heartbeats.create_app(HeartbeatsSettings(**both, **declared)),
            lambda: stages.create_app(StagesSettings(**both, **declared)),
            lambda: worker_of(where),
        ):
            await stack.enter_async_context(kept_running(make))
        system = System(cluster.servers, "c.", database, stack, pool)

        acknowledged = set()
        producing = asyncio.ensure_future(produce(settings, acknowledged))

        async def moving(share):
            done = (await system.states()).get("succeeded", 0)
            return done > TASKS * share

        for number, victim in enumerate(VICTIMS):
            await wait_until(lambda share=number / 4: moving(share), timeout=300, what="tasks end")
            assert (await system.states()).get("succeeded", 0) < TASKS, "it was killed after the load"
            cluster.kill(victim)
            await dead(keeper, victim)
            if LONG:
                await cluster.brokers[victim].wait_ready()
        await producing
        assert len(acknowledged) == TASKS
        await wait_until(lambda: ended(system), timeout=600, what="every task has succeeded")
        rows = await pool.fetch("SELECT idempotency_key FROM task")
        assert {row["idempotency_key"] for row in rows} == {f"k-{n}" for n in acknowledged}

        async def told():
            return {
                one["task"]["id"]
                for one in await entries(cluster.servers)
                if one["event"] == "task.succeeded"
            }

        ids = {row["id"] for row in await pool.fetch("SELECT id FROM task")}

        async def all_told():
            return await told() >= ids

        await wait_until(all_told, timeout=120, every=1, what="every end is on events")
        assert (await check(Platform.load({}, **both))).clean


async def dead(keeper, victim):
    await wait_until(lambda: keeper.exits(name_of(victim)) > 0, what="the broker is dead")


async def ended(system):
    return await system.states() == {"succeeded": TASKS}


async def entries(kafka):
    """What is told on events, record by record or many in one."""
    found = []
    for value in await read(kafka, f"c.{EVENTS.name}"):
        found += value if isinstance(value, list) else [value]
    return found
