"""The health of Kafka: a broker answers."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaProducer

from penstock.concurrency.retry import STARTUP_BACKOFF, retry_until_available
from penstock.errors import KafkaUnavailable
from penstock.kafka.client.connection import admin_client, translated
from penstock.settings import Kafka

PROBE_S = 3.0
# Brokers that are silent come before those that answer: each may take ten seconds.
PING_S = 30.0


async def probe(producer: AIOKafkaProducer, servers: str) -> None:
    """Asks any broker for its topics.

    Args:
        producer: started.
        servers: for the message.

    Raises:
        KafkaUnavailable: none answers within `PROBE_S`.
    """
    try:
        with translated():
            async with asyncio.timeout(PROBE_S):
                await producer.client.fetch_all_metadata()
    except TimeoutError as error:
        raise KafkaUnavailable(f"no broker at {servers} answers within {PROBE_S:g} s") from error


async def ping(settings: Kafka) -> None:
    """Checks that a broker takes a new connection.

    Raises:
        KafkaUnavailable: none does within `PING_S`.
    """
    try:
        async with asyncio.timeout(PING_S), admin_client(settings):
            pass
    except TimeoutError as error:
        raise KafkaUnavailable(
            f"no broker at {settings.kafka} takes a connection within {PING_S:g} s"
        ) from error


async def wait_kafka(settings: Kafka, *, timeout_s: float) -> None:
    """Waits until a broker answers.

    Raises:
        KafkaUnavailable: none did within `timeout_s` seconds.
    """

    async def probe() -> None:
        async with admin_client(settings) as client:
            await client.list_topics()

    try:
        await retry_until_available(
            probe, waiting_for="start of Kafka", backoff=STARTUP_BACKOFF, within_s=timeout_s
        )
    except KafkaUnavailable as error:
        raise KafkaUnavailable(
            f"no Kafka broker answers at {settings.kafka} after {timeout_s:.0f} s"
        ) from error
