"""Topics on the shared broker: with few partitions, and known to clients before the test
continues."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.kafka import connection, topic_plan
from penstock.kafka.connection import admin_client
from penstock.kafka.topic_config import BY_BROKER, STAMP
from penstock.kafka.topics import Topic
from penstock.settings import Kafka
from tests.support.waiting import wait_until

# Replaces schemas/topics.toml in integration tests: each partition costs the broker files and time.
FEW_PARTITIONS = Path(__file__).with_name("topics.toml")


async def create_topics(settings: Kafka, topics: Iterable[Topic]) -> None:
    """Creates topics and waits until the broker tells clients about every partition.

    The broker confirms a creation before its metadata has the topic: a client that asks at once
    may get an unknown topic.
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


async def use_writers_stamps(settings: Kafka, names: Iterable[str]) -> None:
    """Lets the writers of topics stamp their records and waits until the broker does.

    Args:
        settings: where.
        names: of existing topics, in full.
    """
    old = set(names)
    stamps = [topic_plan.Difference(name, STAMP, BY_BROKER, "CreateTime") for name in old]
    await topic_plan.stamp(settings, stamps)

    async def all_differ() -> bool:
        return old <= {found.topic for found in await topic_plan.plan(settings) if found.what == STAMP}

    await wait_until(all_differ, what="the topics have the stamps of their writers")
