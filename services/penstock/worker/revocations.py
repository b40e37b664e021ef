"""Reads the revocations of leases."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiokafka import TopicPartition

from penstock.concurrency.retry import LASTING_ATTEMPT_S, WORKER_BACKOFF, retry_until_available
from penstock.contracts.revocation import Revocation
from penstock.errors import InvalidRecord
from penstock.kafka.connection import make_consumer, running, translated
from penstock.kafka.topics import REVOKED
from penstock.settings import Kafka

log = logging.getLogger(__name__)


async def listen(settings: Kafka, revoked: Callable[[Revocation], None]) -> None:
    """Passes on every revocation that is written from now on, until cancelled.

    After an outage of the broker it continues at the next offset, so it misses no revocation.
    """
    partition = TopicPartition(settings.prefix + REVOKED.name, 0)
    position: int | None = None

    async def read() -> None:
        nonlocal position
        async with running(make_consumer(settings, None)) as consumer:
            consumer.assign([partition])
            with translated():
                if position is None:
                    position = (await consumer.end_offsets([partition]))[partition]
                consumer.seek(partition, position)
                while True:
                    record = await consumer.getone()
                    position = record.offset + 1
                    try:
                        revoked(Revocation.decode(record.value or b""))
                    except InvalidRecord as invalid:
                        # Only the platform writes to this topic, so the record is no revocation.
                        log.error(  # noqa: TRY400 (the error is a field)
                            "A record of the revocations topic cannot be read; skipping it",
                            extra={
                                "event": "revocation_skipped",
                                "topic": partition.topic,
                                "offset": record.offset,
                                "error": str(invalid),
                            },
                        )

    await retry_until_available(
        read, waiting_for="revocations", backoff=WORKER_BACKOFF, restarts_after_s=LASTING_ATTEMPT_S
    )
