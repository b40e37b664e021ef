"""Reads the revocations of leases."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiokafka import TopicPartition

from penstock.concurrency.retry import LASTING_ATTEMPT_S, WORKER_BACKOFF, retry_until_available
from penstock.contracts.revocation import Revocation
from penstock.core.position import Position
from penstock.errors import InvalidRecord
from penstock.kafka.client import positions
from penstock.kafka.client.connection import make_consumer, running, translated
from penstock.kafka.client.consumer import Consumer
from penstock.kafka.topology.topics import REVOKED
from penstock.settings import Kafka

log = logging.getLogger(__name__)

# How long one fetch waits for records. After it, the guard is asked whether the log is the same.
FETCH_MS = 1_000


async def listen(settings: Kafka, revoked: Callable[[Revocation], None]) -> None:
    """Passes on every revocation that is written from now on, until cancelled.

    After an outage of the broker it continues where it was, so it misses no revocation. A position
    in another log than the one that was read is moved as that of any reader (`core.position`).
    """
    partition = TopicPartition(settings.prefix + REVOKED.name, 0)
    position: Position | None = None

    async def read() -> None:
        nonlocal position
        async with running(make_consumer(settings, None)) as consumer:
            position = await _start(consumer, partition, position)
            consumer.assign([partition])
            consumer.guard.start({partition: position})
            consumer.seek(partition, position.offset)
            while True:
                with translated():
                    fetched = await consumer.getmany(timeout_ms=FETCH_MS)
                consumer.guard.ensure()
                for record in fetched.get(partition, ()):
                    position = consumer.guard.position(partition, record.offset + 1)
                    _pass_on(record, revoked)

    await retry_until_available(
        read, waiting_for="revocations", backoff=WORKER_BACKOFF, restarts_after_s=LASTING_ATTEMPT_S
    )


async def _start(consumer: Consumer, partition: TopicPartition, position: Position | None) -> Position:
    """The end of the log at first, and then the checked position."""
    starts = await positions.check(consumer, {partition: position})
    start = starts[partition]
    if position is not None:
        positions.report(starts)
        return start.position
    with translated():
        ends = await consumer.end_offsets([partition])
    return Position(ends[partition], start.position.topic_id)


def _pass_on(record: object, revoked: Callable[[Revocation], None]) -> None:
    value: bytes | None = record.value  # type: ignore[attr-defined] # aiokafka has no types
    try:
        revoked(Revocation.decode(value or b""))
    except InvalidRecord as invalid:
        # Only the platform writes to this topic, so the record is no revocation.
        log.error(  # noqa: TRY400 (the error is a field)
            "A record of the revocations topic cannot be read; skipping it",
            extra={
                "event": "revocation_skipped",
                "topic": record.topic,  # type: ignore[attr-defined] # see above
                "offset": record.offset,  # type: ignore[attr-defined] # see above
                "error": str(invalid),
            },
        )
