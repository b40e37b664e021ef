"""A fetch of an idle consumer waits long at the broker, and holds nothing up."""

import asyncio

from tests.support.services import make_topics, write
from tests.support.waiting import wait_until

from penstock.kafka.client.connection import running
from penstock.kafka.client.group_consumer import GroupConsumer
from penstock.settings import Kafka

# Longer than the test: nothing may wait for the end of such a fetch.
REST_S = 300.0


async def read(consumer, found):
    """Collects the partitions and offsets of all records."""
    while True:
        for tp, records in (await consumer.getmany(timeout_ms=100)).items():
            found.update((tp, record.offset) for record in records)


async def test_a_new_assignment_does_not_wait_for_a_fetch_of_the_one_before(kafka_servers, prefix):
    """S6, W4: the idle member of a group checks and reads its new partitions at once when another
    member joins. Alone it sends a heartbeat a third of its session; beside another, more."""
    settings = Kafka.load({}, kafka=kafka_servers, prefix=prefix)
    await make_topics(kafka_servers, prefix)
    found, topic = set(), f"{prefix}submitted"
    # Empty until the check of the first member has ended, and again from the rebalance on.
    rests = []

    async def revoked():
        rests.clear()

    def member():
        consumer = GroupConsumer(
            settings,
            f"{prefix}group",
            notice_s=1.0,
            rests=rests,
            request_timeout_ms=int(REST_S * 2000),
        )
        consumer.follow(topic, revoked)
        return consumer

    async with asyncio.timeout(120), running(member()) as first, asyncio.TaskGroup() as group:
        readers = [group.create_task(read(first, found))]
        await wait_until(lambda: first._checked)
        rests.append((0.0, REST_S))
        fetcher = first._fetcher
        await wait_until(lambda: fetcher._in_flight and fetcher._fetch_max_wait_ms == REST_S * 1000)
        alone, pause = first.assignment(), first._coordinator._heartbeat_interval_ms
        async with running(member()) as second:
            readers.append(group.create_task(read(second, found)))
            await wait_until(lambda: first._checked and second._checked)
            assert first.assignment() < alone
            pauses = {consumer._coordinator._heartbeat_interval_ms for consumer in (first, second)}
            assert (pause, pauses) == (int(settings.session_timeout_s / 3 * 1000), {1000})
            tp = min(first.assignment())
            await write(kafka_servers, topic, {"type": "t"}, partition=tp.partition)
            await wait_until(lambda: found == {(tp, 0)})
            for reader in readers:
                reader.cancel()
