"""Lists rejected records, and submits rejected submissions again.

Submissions are submitted again when their type is registered, or their flow uploaded. A type or
definition that was stored shortly before the database went back is lost, while submissions of it
are on Kafka. Ingest rejects them with the whole record, and this replays them. A submission without
an idempotency key gets one from its position, so a second replay makes no second task or flow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from heapq import nlargest
from typing import Any

import orjson

from penstock.contracts.rejected import Rejection, decode_rejection
from penstock.errors import InvalidRecord
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.records import records_of
from penstock.kafka.processing.outbox import send_all
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import (
    FLOWS_SUBMITTED,
    FLOWS_SUBMITTED_REJECTED,
    PLATFORM,
    SUBMITTED,
    SUBMITTED_REJECTED,
    Topic,
)
from penstock.settings import Kafka

# Keys and values of records.
Records = Collection[tuple[bytes | None, bytes]]


@dataclass(frozen=True, slots=True)
class Submissions:
    """One kind of submission.

    Attributes:
        topic: of the submissions.
        rejected_topic: of those that were rejected.
        field: has the name of what may be unknown.
        pointers: of the faults that say that it is.
    """

    topic: Topic
    rejected_topic: Topic
    field: str
    pointers: frozenset[str]


TASKS = Submissions(SUBMITTED, SUBMITTED_REJECTED, "type", frozenset({"/type"}))
FLOWS = Submissions(FLOWS_SUBMITTED, FLOWS_SUBMITTED_REJECTED, "flow", frozenset({"/flow", "/version"}))


# Names of the topics whose rejected records are on a topic of their own.
REJECTING = {
    topic.name.removesuffix(".rejected"): topic for topic in PLATFORM if topic.name.endswith(".rejected")
}


async def _read(settings: Kafka, topic: Topic) -> AsyncIterator[tuple[Any, Rejection]]:
    full_name = settings.prefix + topic.name
    async for record in records_of(settings, full_name, partitions_of(settings, topic)):
        # Others were written by another program.
        with suppress(InvalidRecord):
            yield record, decode_rejection(record.value or b"")


async def rejections(
    settings: Kafka, name: str, *, since: datetime | None = None, limit: int | None = None
) -> list[Rejection]:
    """Rejected records of a topic, the latest first.

    Args:
        settings: where, and the prefix.
        name: of the topic, without the prefix; a key of `REJECTING`.
        since: rejected then or later.
        limit: most rejections; None is all.

    Raises:
        KafkaUnavailable: no broker answered.
        KafkaRefused: this user may not read the topic.
    """
    found: dict[tuple[int, int], Rejection] = {}
    async for _record, rejection in _read(settings, REJECTING[name]):
        if since is None or rejection.rejected_at >= since:
            # A crash may have written a rejection twice.
            found[rejection.partition, rejection.offset] = rejection
            if limit is not None and len(found) > 2 * limit:
                found = {(kept.partition, kept.offset): kept for kept in _latest(found, limit)}
    return _latest(found, len(found) if limit is None else limit)


def _latest(found: dict[tuple[int, int], Rejection], limit: int) -> list[Rejection]:
    return nlargest(
        limit,
        found.values(),
        key=lambda rejection: (rejection.rejected_at, rejection.partition, rejection.offset),
    )


async def rejected_of(settings: Kafka, kind: Submissions, names: Collection[str]) -> Records:
    """Submissions rejected because what they name was unknown, to submit again.

    Args:
        settings: where, and the prefix.
        kind: of the submissions.
        names: only submissions of these types or flows.

    Raises:
        KafkaUnavailable: no broker answered.
        KafkaRefused: this user may not read the topic.
    """
    found: dict[tuple[str, int, int], tuple[bytes | None, bytes]] = {}
    async for record, rejection in _read(settings, kind.rejected_topic):
        value = _again(rejection, kind, names)
        if value is not None:
            # A crash of ingest may have written a rejection twice.
            found[rejection.topic, rejection.partition, rejection.offset] = (record.key, value)
    return list(found.values())


def _again(rejection: Rejection, kind: Submissions, names: Collection[str]) -> bytes | None:
    """The submission with an idempotency key; None when it was rejected for another reason."""
    if rejection.pointer not in kind.pointers:
        return None
    try:
        submission = orjson.loads(rejection.original)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(submission, dict) or submission.get(kind.field) not in names:
        return None
    position = f"{rejection.topic}/{rejection.partition}/{rejection.offset}"
    return orjson.dumps({"idempotency_key": f"replay-{position}", **submission})


async def submit_again(settings: Kafka, kind: Submissions, records: Records) -> None:
    """Writes submissions to their topic; returns once Kafka has them all.

    Raises:
        KafkaUnavailable: Kafka may lack some; submit all of them again.
    """
    async with running(make_producer(settings)) as producer:
        await send_all(producer, settings.prefix + kind.topic.name, records)
