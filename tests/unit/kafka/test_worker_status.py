"""The status records of a process, without Kafka."""

import asyncio
import logging

import pytest

from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.kafka.processing import worker_status
from penstock.kafka.processing.worker_status import StatusSender

NEVER_S = 3600.0


class Topic:
    """Takes records, or fails as the errors say, in turn."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.values = []
        self.calls = 0
        self.changed = asyncio.Condition()

    async def write(self, value):
        async with self.changed:
            self.calls += 1
            self.changed.notify_all()
        if self.errors and (error := self.errors.pop(0)):
            raise error
        self.values.append(value)

    async def has_calls(self, number):
        async with self.changed:
            await self.changed.wait_for(lambda: self.calls >= number)


def values(stopped):
    return [b"stopped" if stopped else b"running"]


async def test_a_refusal_is_logged_once_and_ends_nothing(caplog):
    """H5, O10: a worker whose access list is older than the topic works on; so does one in an
    outage, which other writes report."""
    caplog.set_level(logging.WARNING)
    refused = KafkaRefused("no right")
    topic = Topic(KafkaUnavailable("away"), refused, refused, None, refused)
    sender = StatusSender(values, topic.write, 0.0)
    running = asyncio.create_task(sender.run())
    await topic.has_calls(6)
    running.cancel()
    assert [record.event for record in caplog.records] == ["worker_status_refused"] * 2
    assert topic.values[0] == b"running"


async def test_refused_records_are_tried_ever_less_often(monkeypatch):
    """H5: a cluster without the topic is asked once a minute in the end, and not for each record.
    An outage changes nothing, because the next record must follow it soon."""
    refused, away = KafkaRefused("no topic"), KafkaUnavailable("away")
    topic = Topic(None, refused, refused, refused, refused, refused, away, None, away)
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 10:
            raise asyncio.CancelledError

    monkeypatch.setattr(worker_status.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await StatusSender(values, topic.write, 5.0).run()
    assert pauses == [5.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0, 5.0, 5.0]


async def test_the_last_record_says_that_the_process_ends():
    """H5: nothing follows it."""
    topic = Topic()
    sender = StatusSender(values, topic.write, 0.0)
    running = asyncio.create_task(sender.run())
    await topic.has_calls(2)
    await sender.say_stopped()
    await running
    assert topic.values[-1] == b"stopped"
    assert topic.values.count(b"stopped") == 1


async def test_the_end_of_a_process_does_not_wait_for_kafka(monkeypatch):
    """H5: it is listed as lost then."""
    monkeypatch.setattr(worker_status, "STOP_S", 0.0)

    async def never(_value):
        await asyncio.Event().wait()

    await StatusSender(values, never, NEVER_S).say_stopped()
