"""Topics of tests: with few partitions, stamped by their writers, or in need of all replicas."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology import topic_plan
from penstock.kafka.topology.topic_config import STAMP
from penstock.settings import Kafka
from tests.support.waiting import wait_until

# Replaces schemas/topics.toml in integration tests: each partition costs the broker files and time.
FEW_PARTITIONS = Path(__file__).with_name("topics.toml")


async def use_writers_stamps(settings: Kafka, names: Iterable[str]) -> None:
    """Lets the writers of topics stamp their records and waits until the broker does.

    Args:
        settings: where.
        names: of existing topics, in full.
    """
    old = set(names)
    async with admin_client(settings) as client:
        await topic_plan._alter(client, {name: {STAMP: "CreateTime"} for name in old})

    async def all_differ() -> bool:
        return old <= {found.topic for found in await topic_plan.plan(settings) if found.what == STAMP}

    await wait_until(all_differ, what="the topics have the stamps of their writers")


async def require_replicas(settings: Kafka, names: Iterable[str], replicas: int) -> None:
    """Lets topics take records only while so many replicas are in sync.

    Args:
        settings: where.
        names: of existing topics, in full; each has as many replicas.
        replicas: that a write needs.
    """
    async with admin_client(settings) as client:
        await topic_plan._alter(client, {name: {"min.insync.replicas": str(replicas)} for name in names})


async def limit(settings: Kafka, topic: str, size_bytes: int) -> None:
    """Sets the largest batch of a topic, as an operator may, and waits until the broker applies it.

    Args:
        settings: where.
        topic: its name without the prefix.
        size_bytes: of the largest batch.
    """
    name = settings.prefix + topic
    async with admin_client(settings) as client:
        await topic_plan._alter(client, {name: {"max.message.bytes": str(size_bytes)}})

        async def applied() -> bool:
            described = await topic_plan._describe(client, [name])
            return described[name].configs["max.message.bytes"] == str(size_bytes)

        await wait_until(applied, what=f"{name} takes {size_bytes} bytes")
