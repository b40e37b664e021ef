"""A worker on the real Kafka while the object store does not answer."""

import asyncio

from tests.support.services import make_topics, producing, read, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.objects import ObjectStore
from penstock.worker import Done, Worker, WorkerSettings

LARGE, QUICK = range(1, 7), range(11, 21)


async def release(settings, type_name, numbers):
    async with producing(settings.kafka) as producer:
        for number in numbers:
            record = ReadyTask(Fence(number, 0, "s", 0), type_name, Context.encode(None), 60_000)
            await producer.send(f"{settings.prefix}ready.{type_name}", record.encode())
        await producer.flush()


async def test_results_that_wait_for_the_store_hold_up_no_other_type(kafka_servers, prefix, monkeypatch):
    """S11, W2: while the store does not answer, a worker whose handlers have ended with large
    results runs the tasks of its other type. Each handler runs once, and each task succeeds in its
    first attempt once the store answers."""
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready(name, 1) for name in ("large", "quick")])
    settings = WorkerSettings(kafka=kafka_servers, prefix=prefix, objects="memory:///", pool=2)
    answers, ran = asyncio.Event(), []
    check_in = ObjectStore.check_in

    async def check_in_when_back(self, context, namespace):
        while not answers.is_set():  # noqa: ASYNC110 (the event is set in another loop)
            await asyncio.sleep(0.01)
        return await check_in(self, context, namespace)

    monkeypatch.setattr(ObjectStore, "check_in", check_in_when_back)
    worker = Worker(settings)

    @worker.stage("large.s")
    async def large(task):
        ran.append(task.id)
        return Done("x" * 6_000)

    @worker.stage("quick.s")
    async def quick(task):
        ran.append(task.id)
        return Done()

    async def outcomes():
        records = await read(settings.kafka, f"{settings.prefix}stage-results")
        return {
            (entry["id"], entry["attempt"]): entry["outcome"]
            for record in records
            for entry in record["results"]
        }

    async def all_have_ended(numbers):
        return (await outcomes()).keys() >= {(number, 0) for number in numbers}

    await release(settings, "large", LARGE)
    async with running_service(worker.serve):
        # As many as fill the pool.
        await wait_until(lambda: len(ran) >= 2, what="large results wait for the store")
        await release(settings, "quick", QUICK)
        await wait_until(lambda: all_have_ended(QUICK), what="the other type runs")
        assert not (await outcomes()).keys() & {(number, 0) for number in LARGE}
        answers.set()
        await wait_until(lambda: all_have_ended(LARGE), what="the large results are reported")
    assert sorted(ran) == [*LARGE, *QUICK]
    assert await outcomes() == {(number, 0): "done" for number in [*LARGE, *QUICK]}
