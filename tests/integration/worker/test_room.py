"""A worker of many types on the real Kafka and the real gateway: its types share one room."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from tests.support.gateways import running_gateway
from tests.support.services import make_topics, producing, read, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.worker import Done, Worker, WorkerSettings
from penstock.worker.in_flight import InFlight

NAMES = [f"t{number}" for number in range(10)]
TASKS = 20


@pytest.fixture(params=["kafka", "http"])
async def worker(request, kafka_servers, prefix, database):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready(name, 1) for name in NAMES])
    async with AsyncExitStack() as stack:
        where = {}
        if request.param == "http":
            pool = await stack.enter_async_context(open_pool(database, "test"))
            for name in NAMES:
                await types.register(pool, types.TaskType(name=name, partitions=1))
            gateway = await stack.enter_async_context(
                running_gateway(kafka=kafka_servers, prefix=prefix, postgres=database, objects="memory:///")
            )
            await wait_until(gateway.is_ready)
            where["worker_gateway"] = gateway.url
        settings = WorkerSettings(kafka=kafka_servers, prefix=prefix, objects="memory:///", **where)
        yield settings


async def release(settings):
    async with producing(settings.kafka) as producer:
        for number, name in enumerate(NAMES):
            for task in range(TASKS):
                fence = Fence(1 + number * TASKS + task, 0, "quick", 0)
                record = ReadyTask(fence, name, Context.encode(None), 60_000)
                await producer.send(f"{settings.prefix}ready.{name}", record.encode())
        await producer.flush()


async def test_the_types_of_a_worker_share_its_pool_and_backlog(worker, monkeypatch):
    """W2: all types of a worker together hold at most its pool while no handler ends, and never
    more than its pool and its backlog. None of them is starved: each task runs."""
    held, ran = [], set()
    add = InFlight.add

    def add_and_count(self, *arguments):
        add(self, *arguments)
        held.append(len(self))

    monkeypatch.setattr(InFlight, "add", add_and_count)
    running = Worker(WorkerSettings(**{**vars(worker), "pool": 5, "backlog": 5}))
    begun, gate = set(), asyncio.Event()

    async def quick(task):
        begun.add(task.type)
        await gate.wait()
        ran.add(task.id)
        return Done()

    for name in NAMES:
        running.stage(f"{name}.quick")(quick)
    await release(worker)
    async with running_service(running.serve):
        await wait_until(lambda: held and max(held) >= 5, what="the worker is full")
        assert max(held) == 5
        gate.set()
        await wait_until(lambda: len(ran) == len(NAMES) * TASKS, what="each task has run")
        await wait_until(lambda: all_reported(worker), what="each result is on Kafka")
    assert max(held) <= 10


async def all_reported(settings):
    records = await read(settings.kafka, f"{settings.prefix}stage-results")
    return len({entry["id"] for record in records for entry in record["results"]}) == len(NAMES) * TASKS
