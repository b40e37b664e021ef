"""The revocations that a worker reads."""

import asyncio
import shutil
from contextlib import suppress

import pytest
from aiokafka.client import AIOKafkaClient
from tests.support.gateways import running_gateway
from tests.support.memory_folder import make_folder
from tests.support.services import make_topics, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.revocation import Revocation
from penstock.contracts.submission import Submission
from penstock.core.attempt import AttemptId
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import REVOKED, ready
from penstock.local.broker import EmbeddedKafka
from penstock.local.supervisor import Supervisor
from penstock.postgres import release, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session
from penstock.worker import Done, Worker, WorkerSettings
from penstock.worker.revocations import listen

FETCH = 1


@pytest.fixture
async def settings(kafka_servers, prefix):
    await make_topics(kafka_servers, prefix)
    return WorkerSettings(kafka=kafka_servers, prefix=prefix)


async def revoke(settings, *tasks):
    await write(
        settings.kafka,
        settings.prefix + REVOKED.name,
        *(Revocation("expired", [AttemptId(task, 0, 0)]).encode() for task in tasks),
    )


async def test_no_revocation_of_a_replaced_topic_is_missed(settings, monkeypatch):
    """H3: the topic is deleted and created again, and has grown past the worker's position when the
    worker reads again. The worker reads it from its beginning."""
    send, may_fetch, failed = AIOKafkaClient.send, asyncio.Event(), asyncio.Event()
    may_fetch.set()

    async def gated(client, node, request, **options):
        if request.API_KEY != FETCH:
            return await send(client, node, request, **options)
        await may_fetch.wait()
        response = await send(client, node, request, **options)
        if any(error for _topic, partitions in response.topics for _number, error, *_rest in partitions):
            failed.set()
            may_fetch.clear()
        return response

    monkeypatch.setattr(AIOKafkaClient, "send", gated)
    received = []
    listening = asyncio.create_task(
        listen(settings, lambda revocation: received.extend(each.task_id for each in revocation.tasks))
    )
    try:
        numbers = iter(range(1, 1_000))

        async def receives():
            await revoke(settings, next(numbers))
            return received

        await wait_until(receives, what="the worker receives revocations")
        async with admin_client(settings) as admin:
            await admin.delete_topics([settings.prefix + REVOKED.name])
        await failed.wait()
        await create_topics(settings, [REVOKED])
        missed = list(range(1_001, 1_001 + next(numbers) + 20))
        await revoke(settings, *missed)
        failed.clear()
        may_fetch.set()

        async def receives_all():
            # Another error of the new topic, whose leader may not be known yet.
            may_fetch.set()
            return set(missed) <= set(received)

        await wait_until(receives_all, what="the worker receives all")
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening


@pytest.fixture
async def broker():
    folder = make_folder()
    supervisor = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    try:
        kafka = EmbeddedKafka(supervisor, folder / "kafka")
        await kafka.start(timeout_s=300.0)
        yield kafka
    finally:
        supervisor.close()
        shutil.rmtree(folder)


async def test_a_cancel_made_while_kafka_was_away_reaches_the_handler(broker, database, tmp_path):
    """H3: a task is cancelled while Kafka is away, by a gateway that has not reached Kafka yet. Its
    handler is cancelled when Kafka is back, without a heartbeat processor or a sweeper."""
    where = {"kafka": broker.servers, "prefix": "p."}
    await create_topics(await make_topics(*where.values()), [ready("t", 1)])
    began, cancelled, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    worker = Worker(WorkerSettings(**where, objects="memory:///"))

    @worker.stage("t.start")
    async def start(_task):
        began.set()
        try:
            await may_end.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Done()

    async with open_pool(database, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=1))
        [submitted] = await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))])
        async with open_session(database, "test") as session:
            [task] = (await release.release(session, types.TaskType(name="t"), 1, [])).batch.tasks
        async with running_service(worker.serve):
            await write(where["kafka"], "p.ready.t", task.encode())
            await wait_until(began.is_set, what="the handler runs")
            try:
                await broker.stop()
                async with running_gateway(
                    **where, postgres=database, objects=f"file://{tmp_path}"
                ) as gateway:
                    answer = await gateway.post(f"/tasks/{submitted.id}/cancel")
                    assert answer.status == 200, answer.body
                    await broker.start(timeout_s=300.0)
                    await wait_until(cancelled.is_set, what="the handler is cancelled")
            finally:
                # Otherwise a failed test would wait until the worker has drained.
                may_end.set()
