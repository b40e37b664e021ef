"""The sweeper: publishes events that their writer has not published.

The writer died between commit and publication, or leaves them to the sweeper.

It also revokes the attempts that these events cancelled.

Any number of replicas may run it: one of them holds the lock, by its session, and sweeps. An event
that is published twice has the same id, so when in doubt, the sweeper publishes. Events that Kafka
refuses stay in the outbox with the reason: `penstock check` reports them, and its repair publishes
them.

While Kafka is unavailable the sweeper keeps its lock, and tries again in its next round.
"""

from __future__ import annotations

import logging

from aiokafka import AIOKafkaProducer

from penstock.contracts.event import cancelled_attempts
from penstock.contracts.revocation import Revocation
from penstock.errors import RecordsRefused
from penstock.kafka.processing.outbox import publish, revoke
from penstock.metrics.rounds import sweep_in_one_replica
from penstock.postgres import outbox
from penstock.postgres.session import Session
from penstock.stages.metrics import Metrics
from penstock.stages.settings import StagesSettings

log = logging.getLogger(__name__)

# Its name in metrics.
LOOP = "outbox_sweeper"
# Rows that are read at a time: each may hold a thousand events.
ROWS_PER_BATCH = 20


async def sweep(
    settings: StagesSettings, session: Session, producer: AIOKafkaProducer, metrics: Metrics
) -> None:
    """Sweeps at intervals until cancelled.

    Raises:
        SessionLost: the lock is gone with its session.
    """

    async def sweep_and_count() -> None:
        metrics.swept += await sweep_once(settings, session, producer)

    await sweep_in_one_replica(session, "events", sweep_and_count, loop=LOOP, every_s=settings.sweep_every_s)


async def sweep_once(settings: StagesSettings, session: Session, producer: AIOKafkaProducer) -> int:
    """Publishes all events that are left unpublished; returns how many.

    Raises:
        SessionLost: as `sweep`.
        PostgresUnavailable, KafkaUnavailable: the rows that are left stay in the outbox.
    """
    swept = 0
    while True:
        async with session.connection() as connection:
            rows = await outbox.unpublished(connection, age_s=settings.sweep_age_s, limit=ROWS_PER_BATCH)
        published = []
        for row in rows:
            await revoke(producer, settings, Revocation("cancelled", cancelled_attempts(row.records)))
            try:
                await publish(producer, settings, row.keys, row.records)
            except RecordsRefused as error:
                # Without the mark, the sweeper would publish the row first in every round.
                async with session.connection() as connection:
                    await outbox.park(connection, row, error)
                swept += len(row.records) - len(error.records)
                continue
            published.append(row.id)
            swept += len(row.records)
        async with session.connection() as connection:
            await outbox.delete_published(connection, published)
        if len(rows) < ROWS_PER_BATCH:
            break
    if swept:
        log.info(
            "Events that their writer had not published are published",
            extra={"event": "events_swept", "events": swept},
        )
    return swept
