"""The sweeper: publishes events whose writer died between commit and publication.

Any number of replicas may run it; the lock in its session lets one act. Publishing twice is harmless (the
event's id is the same), not publishing is not, so in doubt it publishes.
"""

from __future__ import annotations

import asyncio
import logging

from aiokafka import AIOKafkaProducer

from penstock.kafka.outbox import publish
from penstock.postgres import outbox
from penstock.postgres.session import Session
from penstock.stages.figures import Figures
from penstock.stages.settings import StagesSettings

log = logging.getLogger(__name__)

# Rows read at a time: each may hold a thousand events.
ROWS_AT_A_TIME = 20


async def sweep(
    settings: StagesSettings, session: Session, producer: AIOKafkaProducer, figures: Figures
) -> None:
    """Sweeps at intervals until cancelled.

    Raises:
        SessionLost: the lock is gone with its session.
        PostgresUnavailable, KafkaUnavailable: what was not struck out is swept by whoever is next.
    """
    owned = False
    while True:
        owned = owned or bool(await session.fetchval("outbox.sweep", "events"))
        if owned:
            figures.swept += await sweep_once(settings, session, producer)
        # Woken by the end of the session too: then `fetchval` raises.
        try:
            await asyncio.wait_for(session.lost.wait(), settings.sweep_every_s)
        except TimeoutError:
            continue


async def sweep_once(settings: StagesSettings, session: Session, producer: AIOKafkaProducer) -> int:
    """Publishes everything left unpublished; returns how many events.

    Raises:
        SessionLost, PostgresUnavailable, KafkaUnavailable: as `sweep`.
    """
    swept = 0
    while True:
        session.ensure()
        rows = await outbox.owed(session.connection, age_s=settings.sweep_age_s, limit=ROWS_AT_A_TIME)
        for row in rows:
            await publish(producer, settings, row.keys, row.records)
            swept += len(row.records)
        await outbox.paid(session.connection, [row.id for row in rows])
        if len(rows) < ROWS_AT_A_TIME:
            break
    if swept:
        log.info("published %d events that a crash had left", swept)
    return swept
