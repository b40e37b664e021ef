"""Listening for leases that the platform takes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiokafka import TopicPartition

from penstock.contracts.revocation import Revocation
from penstock.core.retry import RetryPolicy
from penstock.errors import InvalidRecord, Unavailable
from penstock.kafka.connection import make_consumer, running, translated
from penstock.kafka.topics import REVOKED
from penstock.settings import Kafka

log = logging.getLogger(__name__)

WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.2, factor=2, max_s=5.0, jitter=0)


async def listen(settings: Kafka, revoked: Callable[[Revocation], None]) -> None:
    """Tells of every revocation written from now on, until cancelled.

    While the broker is away nothing is heard, and what was written meanwhile is read afterwards.
    """
    partition = TopicPartition(settings.prefix + REVOKED.name, 0)
    position: int | None = None
    tries = 0
    while True:
        try:
            async with running(make_consumer(settings, None)) as consumer:
                consumer.assign([partition])
                with translated():
                    if position is None:
                        position = (await consumer.end_offsets([partition]))[partition]
                    consumer.seek(partition, position)
                    tries = 0
                    while True:
                        record = await consumer.getone()
                        position = record.offset + 1
                        try:
                            revoked(Revocation.decode(record.value or b""))
                        except InvalidRecord as invalid:
                            # Only the platform writes here, so this is a foreign record: it takes nothing back.
                            log.error("skipped %s@%d: %s", partition.topic, record.offset, invalid)  # noqa: TRY400
        except Unavailable as error:
            tries += 1
            log.warning("listening for revocations again soon: %s", error)
            await asyncio.sleep(WHILE_AWAY.delay_s(tries, 0.0))
