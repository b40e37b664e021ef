"""Debts on their way to Kafka: many that come one by one, at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import orjson
import pytest
from tests.callback_targets import owed

from penstock.contracts.event import Owed
from penstock.contracts.revocation import Revocation
from penstock.kafka.connection import create_topics, make_consumer, make_producer, running
from penstock.kafka.outbox import Publisher
from penstock.kafka.topics import CALLBACKS, EVENTS, PLATFORM, REVOKED
from penstock.settings import Kafka

DEBTS = 2000


async def _records(settings: Kafka, topic: str, enough: int) -> list[bytes]:
    """Values of a topic, in order, once there are so many callbacks, events or revoked attempts in them."""
    found: list[bytes] = []
    async with running(make_consumer(settings, None, settings.prefix + topic)) as consumer:
        while sum(_weight(topic, value) for value in found) < enough:
            record = await asyncio.wait_for(consumer.getone(), 30)
            found.append(record.value)
    return found


def _weight(topic: str, value: bytes) -> int:
    read = orjson.loads(value)
    if topic == REVOKED.name:
        return len(read["tasks"])
    return len(read) if topic == CALLBACKS.name and isinstance(read, list) else 1


async def test_many_small_debts_at_once_are_paid_together(
    kafka_servers: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C1: two thousand transactions of an event, a callback and a revocation each, all for one partition: none is left to the
    sweeper, all are struck out, the events stay in the order in which they were owed."""
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, PLATFORM)
    struck_out: list[int] = []

    async def paid(ids: Sequence[int]) -> None:
        struck_out.extend(ids)

    async with running(make_producer(settings)) as producer:
        publisher = Publisher(producer, settings, paid)
        running_publisher = asyncio.create_task(publisher.run())
        with caplog.at_level(logging.WARNING):
            for number in range(1, DEBTS + 1):
                publisher.owe(
                    Owed(
                        outbox_id=number,
                        keys=[b"7"],
                        events=[b'{"number":%d}' % number],
                        callbacks=[owed("http://a.example/hook", number)],
                        revocation=Revocation("cancelled" if number % 2 else "over", [(number, 1, 0)]),
                    )
                )
                if not number % 50:
                    # They come one after the other, while others are on their way.
                    await asyncio.sleep(0)
            assert publisher.under_way
            await publisher.drain()
        assert not publisher.under_way
        running_publisher.cancel()
        # The broker has only just made the topics, which its client may say.
        assert not [record for record in caplog.records if record.name.startswith("penstock")]
        assert sorted(struck_out) == list(range(1, DEBTS + 1))
    events = await _records(settings, EVENTS.name, DEBTS)
    assert [orjson.loads(value)["number"] for value in events] == list(range(1, DEBTS + 1))
    revoked = [orjson.loads(value) for value in await _records(settings, REVOKED.name, DEBTS)]
    assert {(record["why"], task[0]) for record in revoked for task in record["tasks"]} == {
        ("cancelled" if number % 2 else "over", number) for number in range(1, DEBTS + 1)
    }
    # Together: not a record each.
    assert len(revoked) < DEBTS / 10
    assert len(await _records(settings, CALLBACKS.name, DEBTS)) < DEBTS / 10
