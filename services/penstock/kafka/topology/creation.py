"""Creates topics as they are declared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError, TopicAuthorizationFailedError

from penstock.errors import KafkaUnavailable
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.topic_config import CLUSTER_DEFAULT, config_of
from penstock.kafka.topology.topics import Topic
from penstock.settings import Kafka

# Until a topic that was created must have leaders, and how often the brokers are asked.
DESCRIBED_WITHIN_S = 30.0
DESCRIBED_POLL_S = 0.02


async def create_topics(settings: Kafka, topics: Iterable[Topic], *, replication: int | None = None) -> None:
    """Creates those of `topics` that do not exist, as declared; leaves the others unchanged.

    Args:
        settings: where, the prefix put before each name, and the declaration.
        topics: by their bare names.
        replication: copies of each partition instead of those declared.

    Raises:
        KafkaUnavailable: no broker answered, or the cluster cannot make one as declared.
        KafkaRefused: this user may not create one.
        SettingsError: the declaration makes no sense.
    """
    wanted = {settings.prefix + topic.name: config_of(settings, topic) for topic in topics}
    async with admin_client(settings) as client:
        existing = set(await client.list_topics())
        missing = [
            NewTopic(
                name=name,
                num_partitions=each.partitions,
                replication_factor=(copies := replication or each.replication),
                # The client accepts -1 only with an assignment of replicas, the broker only without
                # one.
                replica_assignments={} if copies == CLUSTER_DEFAULT else None,
                topic_configs=dict(each.configs),
            )
            for name, each in wanted.items()
            if name not in existing
        ]
        if not missing:
            return
        response = await client.create_topics(missing)
        for name, code, *message in response.topic_errors:
            if code == TopicAuthorizationFailedError.errno:
                raise TopicAuthorizationFailedError(name)
            if code not in (0, TopicAlreadyExistsError.errno):
                why = message[0] if message and message[0] else f"error code {code}"
                raise KafkaUnavailable(f"Kafka would not create topic {name}: {why}")
        await _until_described(client, [topic.name for topic in missing])


async def _until_described(client: AIOKafkaAdminClient, names: Sequence[str]) -> None:
    """Waits until the brokers name a leader of each partition.

    The controller confirms a creation before the brokers know it: a client that asks at once may
    get an unknown topic.
    """
    deadline_s = time.monotonic() + DESCRIBED_WITHIN_S
    while True:
        topics = await client.describe_topics(list(names))
        missing = [
            topic["topic"]
            for topic in topics
            if topic["error_code"] != TopicAuthorizationFailedError.errno
            and not (topic["partitions"] and all(part["leader"] >= 0 for part in topic["partitions"]))
        ]
        if not missing:
            return
        if time.monotonic() > deadline_s:
            raise KafkaUnavailable(
                f"Kafka has created {', '.join(missing)}, but no broker leads all partitions"
            )
        await asyncio.sleep(DESCRIBED_POLL_S)
