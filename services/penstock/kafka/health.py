"""The health of Kafka: a broker answers."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaProducer

from penstock.errors import KafkaUnavailable
from penstock.kafka.connection import translated

PROBE_S = 3.0


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
            await asyncio.wait_for(producer.client.fetch_all_metadata(), PROBE_S)
    except TimeoutError as error:
        raise KafkaUnavailable(f"no broker at {servers} answers within {PROBE_S:g} s") from error
