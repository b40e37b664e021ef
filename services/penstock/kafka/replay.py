"""Submits rejected submissions again, when their type is registered.

A type that was registered shortly before the database went back is lost, while submissions of it
are on Kafka. Ingest rejects them with the whole record, and this replays them. A submission without
an idempotency key gets one from its position, so a second replay makes no second task.
"""

from __future__ import annotations

from collections.abc import Collection

import orjson

from penstock.contracts.rejected import Rejection, decode_rejection
from penstock.errors import InvalidRecord
from penstock.kafka.connection import make_producer, running
from penstock.kafka.outbox import send_all
from penstock.kafka.records import records_of
from penstock.kafka.topic_config import partitions_of
from penstock.kafka.topics import SUBMITTED, SUBMITTED_REJECTED
from penstock.settings import Kafka


async def rejected_of_types(settings: Kafka, types: Collection[str]) -> list[tuple[bytes | None, bytes]]:
    """Submissions rejected because their type was unknown, as (key, value) to submit again.

    Args:
        settings: where, and the prefix.
        types: only submissions of these types.

    Raises:
        KafkaUnavailable: no broker answered.
        KafkaRefused: this user may not read the topic.
    """
    found: dict[tuple[str, int, int], tuple[bytes | None, bytes]] = {}
    topic = settings.prefix + SUBMITTED_REJECTED.name
    async for record in records_of(settings, topic, partitions_of(settings, SUBMITTED_REJECTED)):
        try:
            rejection = decode_rejection(record.value or b"")
        except InvalidRecord:
            continue  # written by another program
        value = _again(rejection, types)
        if value is not None:
            # A crash of ingest may have written a rejection twice.
            found[rejection.topic, rejection.partition, rejection.offset] = (record.key, value)
    return list(found.values())


def _again(rejection: Rejection, types: Collection[str]) -> bytes | None:
    """The submission with an idempotency key; None when it was rejected for another reason."""
    if rejection.pointer != "/type":
        return None
    try:
        submission = orjson.loads(rejection.original)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(submission, dict) or submission.get("type") not in types:
        return None
    position = f"{rejection.topic}/{rejection.partition}/{rejection.offset}"
    return orjson.dumps({"idempotency_key": f"replay-{position}", **submission})


async def submit_again(settings: Kafka, records: Collection[tuple[bytes | None, bytes]]) -> None:
    """Writes submissions to the topic `submitted`; returns once Kafka has them all.

    Raises:
        KafkaUnavailable: Kafka may lack some; submit all of them again.
    """
    async with running(make_producer(settings)) as producer:
        await send_all(producer, settings.prefix + SUBMITTED.name, records)
