"""Publishing what a transaction owes: events and callbacks, after commit and at least once.

A crash between commit and publication leaves the outbox row and the callback's `due_at`, from which the
sweepers publish again. Consumers tell repeats by the event's id, the callbacks service by the attempt number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from aiokafka import AIOKafkaProducer

from penstock.contracts.event import Callback
from penstock.kafka.connection import translated
from penstock.kafka.topics import CALLBACKS, EVENTS
from penstock.settings import Kafka


async def send_all(
    producer: AIOKafkaProducer, topic: str, records: Iterable[tuple[bytes | None, bytes]]
) -> None:
    """Writes (key, value) records to a topic and returns once Kafka has them all.

    Raises:
        KafkaUnavailable: some may not be there; send all of them again.
    """
    with translated():
        # `send` only queues, and waits when the queue is full: one wait for the whole batch follows.
        pending = [await producer.send(topic, value, key=key) for key, value in records]
        if pending:
            await asyncio.gather(*pending)


async def publish(
    producer: AIOKafkaProducer,
    settings: Kafka,
    keys: Sequence[bytes],
    events: Sequence[bytes],
    callbacks: Sequence[Callback] = (),
) -> None:
    """Writes events (keyed by task) and callbacks (keyed by target) to their topics.

    Raises:
        KafkaUnavailable: publish all of them again.
    """
    await send_all(producer, settings.prefix + EVENTS.name, zip(keys, events, strict=True))
    await send_all(
        producer, settings.prefix + CALLBACKS.name, ((c.target.encode(), c.encode()) for c in callbacks)
    )
