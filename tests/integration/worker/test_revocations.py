"""The revocations that a worker reads."""

import asyncio
from contextlib import suppress

import pytest
from aiokafka.client import AIOKafkaClient
from tests.support.services import make_topics, write
from tests.support.waiting import wait_until

from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.kafka.connection import admin_client, create_topics
from penstock.kafka.topics import REVOKED
from penstock.worker import WorkerSettings
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
    heard = []
    listening = asyncio.create_task(
        listen(settings, lambda revocation: heard.extend(each.task_id for each in revocation.tasks))
    )
    try:
        numbers = iter(range(1, 1_000))

        async def hears():
            await revoke(settings, next(numbers))
            return heard

        await wait_until(hears, what="the worker hears revocations")
        async with admin_client(settings) as admin:
            await admin.delete_topics([settings.prefix + REVOKED.name])
        await failed.wait()
        await create_topics(settings, [REVOKED])
        missed = list(range(1_001, 1_001 + next(numbers) + 20))
        await revoke(settings, *missed)
        failed.clear()
        may_fetch.set()

        async def hears_all():
            # Another error of the new topic, whose leader may not be known yet.
            may_fetch.set()
            return set(missed) <= set(heard)

        await wait_until(hears_all, what="the worker hears all", timeout=60)
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening
