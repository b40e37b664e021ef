"""Topics on the shared broker: with few partitions, and known to clients before the test continues."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.kafka import connection
from penstock.kafka.connection import admin_client
from penstock.kafka.topics import Topic
from penstock.settings import Kafka
from tests.support.waiting import wait_until

# Replaces schemas/topics.toml in integration tests: each partition costs the broker files and time.
FEW_PARTITIONS = Path(__file__).with_name("topics.toml")


async def create_topics(settings: Kafka, topics: Iterable[Topic]) -> None:
    """Creates topics and waits until the broker tells clients about every partition.

    The broker confirms a creation before its metadata has the topic: a client that asks at once may get an unknown topic.
    """
    wanted = list(topics)
    await connection.create_topics(settings, wanted)
    names = [settings.prefix + topic.name for topic in wanted]

    async with admin_client(settings) as client:

        async def all_described() -> bool:
            found = await client.describe_topics(names)
            return all(
                not topic["error_code"]
                and topic["partitions"]
                and all(part["leader"] >= 0 for part in topic["partitions"])
                for topic in found
            )

        await wait_until(all_described, what=f"the broker describes {names}")
