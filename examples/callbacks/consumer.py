"""Consumes the topic `events` in a consumer group; each event takes effect once.

    python -m examples.callbacks.consumer --kafka 127.0.0.1:9092 --group shop --effects shop.db

Start it several times with one group, and they share the topic's partitions.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import orjson
from aiokafka import AIOKafkaConsumer

from examples.callbacks.effects import Effects


async def consume(kafka: str, prefix: str, group: str, effects: Effects) -> None:
    """Consumes until cancelled."""
    consumer = AIOKafkaConsumer(
        f"{prefix}events",
        bootstrap_servers=kafka,
        group_id=group,
        auto_offset_reset="earliest",
        # Offsets are committed after the effects, not periodically, so that no event is lost.
        enable_auto_commit=False,
    )
    await consumer.start()
    try:
        while True:
            batches = await consumer.getmany(timeout_ms=1_000)
            for records in batches.values():
                for record in records:
                    event = orjson.loads(record.value)
                    first = effects.once(event["id"], event)
                    print("done " if first else "again", event["id"], event["event"], flush=True)
            if batches:
                await consumer.commit()
    finally:
        await consumer.stop()


def main() -> None:
    """Parses the command line and consumes."""
    parser = argparse.ArgumentParser(description="Consumes the topic events.")
    parser.add_argument("--kafka", default="127.0.0.1:9092", help="bootstrap servers")
    parser.add_argument("--prefix", default="penstock.", help="prefix of the deployment's topics")
    parser.add_argument("--group", default="shop", help="consumer group")
    parser.add_argument("--effects", type=Path, default=Path("effects.db"), help="database of the effects")
    given = parser.parse_args()
    with Effects(given.effects) as effects:
        asyncio.run(consume(given.kafka, given.prefix, given.group, effects))


if __name__ == "__main__":
    main()
