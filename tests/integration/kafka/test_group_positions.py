"""The check of a group's positions over a link that gives no answer."""

import asyncio

import pytest
from aiokafka.consumer.group_coordinator import GroupCoordinator
from tests.support.services import make_topics, write

from penstock.errors import KafkaUnavailable
from penstock.kafka.client import group_consumer
from penstock.kafka.client.connection import running
from penstock.kafka.client.group_consumer import GroupConsumer
from penstock.settings import Kafka


@pytest.fixture
async def consumer(kafka_servers, prefix):
    """A member of a group."""
    settings = Kafka.load({}, kafka=kafka_servers, prefix=prefix)
    await make_topics(kafka_servers, prefix)
    await write(kafka_servers, f"{prefix}submitted", {"type": "t"})
    consumer = GroupConsumer(settings, f"{prefix}group")

    async def revoked():
        pass

    consumer.follow(f"{prefix}submitted", revoked)
    return consumer


@pytest.fixture
def asked(monkeypatch):
    """Set once the coordinator was asked for positions; it never answers."""
    asked = asyncio.Event()

    async def never(_coordinator, _partitions):
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(GroupCoordinator, "fetch_committed_offsets", never)
    return asked


async def test_a_check_without_an_answer_keeps_the_session_of_the_group(consumer, asked, monkeypatch):
    """W4: a member sends heartbeats while it checks its positions, and can stop meanwhile."""
    beating = asyncio.Event()
    start = GroupCoordinator._start_heartbeat_task

    def start_beating(coordinator):
        start(coordinator)
        beating.set()

    monkeypatch.setattr(GroupCoordinator, "_start_heartbeat_task", start_beating)
    async with asyncio.timeout(120), running(consumer):
        await asked.wait()
        await beating.wait()
        assert await consumer.getmany(timeout_ms=0) == {}


async def test_a_check_without_an_answer_ends_the_reader(consumer, asked, monkeypatch):
    """W4: a member whose check takes too long begins again with new connections."""
    monkeypatch.setattr(group_consumer, "CHECK_S", 0.1)
    async with asyncio.timeout(120), running(consumer):
        await asked.wait()
        with pytest.raises(KafkaUnavailable, match="could not be checked"):
            await consumer.getmany(timeout_ms=30_000)
