"""A member that is alone in its group sends fewer heartbeats."""

import asyncio
from contextlib import suppress

from tests.support.services import make_topics
from tests.support.waiting import wait_until

from penstock.kafka.client.connection import running
from penstock.kafka.client.consumer import ALONE_S
from penstock.kafka.client.group_consumer import GroupConsumer
from penstock.settings import Kafka


async def read(consumer):
    """Keeps the member in its group."""
    while True:
        await consumer.getmany(timeout_ms=100)


async def test_a_member_sends_fewer_heartbeats_while_it_is_alone(kafka_servers, prefix):
    """S6, W4: no member waits for it. It takes the shorter time when a second one has joined, and
    the longer one when that has left."""
    settings = Kafka.load({}, kafka=kafka_servers, prefix=prefix)
    await make_topics(kafka_servers, prefix)

    async def revoked():
        pass

    def member():
        consumer = GroupConsumer(settings, f"{prefix}group", notice_s=1.0)
        consumer.follow(f"{prefix}submitted", revoked)
        return consumer

    def pause_ms(consumer):
        return consumer._coordinator._heartbeat_interval_ms

    alone_ms = int(min(ALONE_S, settings.session_timeout_s / 3) * 1000)
    async with asyncio.timeout(120), running(member()) as first:
        reading = asyncio.create_task(read(first))
        await wait_until(lambda: pause_ms(first) == alone_ms)
        async with running(member()) as second:
            await wait_until(lambda: second.assignment() and pause_ms(first) == 1000)
            assert pause_ms(second) == 1000
        await wait_until(lambda: pause_ms(first) == alone_ms)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
