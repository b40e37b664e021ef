"""The outbox publisher combines many small transactions into few records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import orjson
import pytest
from tests.support.callback_targets import make_callback
from tests.support.waiting import in_time

from penstock.contracts.event import OutboxEntry
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.kafka.client.connection import make_consumer, make_producer, running
from penstock.kafka.processing.outbox import Publisher
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import CALLBACKS, EVENTS, PLATFORM, REVOKED
from penstock.settings import Kafka

TRANSACTIONS = 2000


async def _records(settings: Kafka, topic: str, enough: int) -> list[bytes]:
    """Reads the topic's values in order until they hold `enough` callbacks, events or revoked
    attempts."""
    found: list[bytes] = []
    async with running(make_consumer(settings, None, settings.prefix + topic)) as consumer:
        while sum(_weight(topic, value) for value in found) < enough:
            record = await in_time(consumer.getone())
            found.append(record.value)
    return found


def _weight(topic: str, value: bytes) -> int:
    read = orjson.loads(value)
    if topic == REVOKED.name:
        return len(read["tasks"])
    return len(read) if topic == CALLBACKS.name and isinstance(read, list) else 1


async def test_many_small_transactions_are_published_together(
    kafka_servers: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C1: the publisher sends 2,000 transactions of one partition in few records. It leaves none to
    the sweeper, deletes all rows, and keeps the order of the events."""
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, PLATFORM)
    deleted: list[int] = []

    async def delete_published(ids: Sequence[int]) -> None:
        deleted.extend(ids)

    async with running(make_producer(settings)) as producer:
        publisher = Publisher(producer, settings, delete_published)
        running_publisher = asyncio.create_task(publisher.run())
        with caplog.at_level(logging.WARNING):
            for number in range(1, TRANSACTIONS + 1):
                publisher.enqueue(
                    OutboxEntry(
                        outbox_id=number,
                        record_keys=[b"7"],
                        events=[b'{"number":%d}' % number],
                        callbacks=[make_callback("http://a.example/hook", number)],
                        revocation=Revocation(
                            "cancelled" if number % 2 else "over", [AttemptId(number, 1, 0)]
                        ),
                    )
                )
                if not number % 50:
                    # The publisher runs while further transactions are enqueued.
                    await asyncio.sleep(0)
            assert publisher.in_flight
            await publisher.drain()
        assert not publisher.in_flight
        running_publisher.cancel()
        # Other loggers may report that the topics are new.
        assert not [record for record in caplog.records if record.name.startswith("penstock")]
        assert sorted(deleted) == list(range(1, TRANSACTIONS + 1))
    events = await _records(settings, EVENTS.name, TRANSACTIONS)
    assert [orjson.loads(value)["number"] for value in events] == list(range(1, TRANSACTIONS + 1))
    revoked = [orjson.loads(value) for value in await _records(settings, REVOKED.name, TRANSACTIONS)]
    assert {(record["why"], task[0]) for record in revoked for task in record["tasks"]} == {
        ("cancelled" if number % 2 else "over", number) for number in range(1, TRANSACTIONS + 1)
    }
    # The publisher combined the entries of many transactions in one record.
    assert len(revoked) < TRANSACTIONS / 10
    assert len(await _records(settings, CALLBACKS.name, TRANSACTIONS)) < TRANSACTIONS / 10
