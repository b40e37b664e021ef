"""Compares the topics with their declaration, and applies the differences.

It deletes nothing, and adds no partition where that would break an order or an owner
(`Topic.fixed`): such differences are only reported. When in doubt, it changes nothing: a topic that
cannot be described is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.admin.new_partitions import NewPartitions
from aiokafka.errors import for_code
from aiokafka.protocol.types import Array, Boolean, Int8, Int16, Int32, Schema, String

from penstock.errors import KafkaUnavailable
from penstock.kafka.client.connection import admin_client, translated
from penstock.kafka.client.protocol import RequestOf, struct
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topic_config import CLUSTER_DEFAULT, TopicConfig, config_of
from penstock.kafka.topology.topics import PLATFORM, READY, Topic, ready
from penstock.settings import Kafka

MISSING = "missing"
PARTITIONS = "partitions"
REPLICATION = "replication"

# Brokers learn of a change one after the other.
SETTLE_S = 15.0

_SET = 0
# IncrementalAlterConfigs; the client's own AlterConfigs resets every config that it omits.
_ALTER_CONFIGS = struct(
    44,
    0,
    Schema(
        (
            "resources",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                (
                    "configs",
                    Array(("name", String("utf-8")), ("operation", Int8), ("value", String("utf-8"))),
                ),
            ),
        ),
        ("validate_only", Boolean),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "resources",
            Array(
                ("error_code", Int16),
                ("error_message", String("utf-8")),
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
            ),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class ActualTopic:
    """A topic on the cluster; `replication` is that of its partition with the fewest copies."""

    partitions: int
    replication: int
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a topic and its declaration.

    Attributes:
        topic: in full.
        what: MISSING, PARTITIONS, REPLICATION, or a config by Kafka's name.
        now: the actual value; None when the topic is missing.
        declared: the declared value.
        refused: why `apply` does not change it; None when it does.
    """

    topic: str
    what: str
    now: str | None
    declared: str
    refused: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "topic": self.topic,
            "what": self.what,
            "now": self.now,
            "declared": self.declared,
            "refused": self.refused,
        }


def differences(name: str, topic: Topic, wanted: TopicConfig, found: ActualTopic | None) -> list[Difference]:
    """The differences of one topic."""
    if found is None:
        return [Difference(name, MISSING, None, f"{wanted.partitions} partitions")]
    differing = []
    if found.partitions != wanted.partitions:
        refused = None
        if wanted.partitions < found.partitions:
            refused = "Kafka cannot remove partitions"
        elif topic.fixed:
            refused = f"it must not get more partitions while it is in use: {topic.fixed}"
        differing.append(Difference(name, PARTITIONS, str(found.partitions), str(wanted.partitions), refused))
    if wanted.replication not in (CLUSTER_DEFAULT, found.replication):
        refused = "copies are moved by kafka-reassign-partitions, or by the cluster's operator"
        differing.append(
            Difference(name, REPLICATION, str(found.replication), str(wanted.replication), refused)
        )
    differing += [
        Difference(name, key, found.configs.get(key), value)
        for key, value in sorted(wanted.configs.items())
        if found.configs.get(key) != value
    ]
    return differing


async def plan(settings: Kafka) -> list[Difference]:
    """The differences of all topics.

    Raises:
        KafkaUnavailable: no broker answered, or not all requests were answered.
        KafkaRefused: this user may not describe the topics.
    """
    async with admin_client(settings) as client:
        with translated():
            existing = set(await client.list_topics())
            begin = f"{settings.prefix}{READY}."
            topics = {settings.prefix + topic.name: topic for topic in PLATFORM}
            # Their task types set their numbers of partitions.
            topics |= {
                name: ready(name.removeprefix(begin), 0) for name in existing if name.startswith(begin)
            }
            known = await _describe(client, [name for name in topics if name in existing])
    differing = []
    for name, topic in sorted(topics.items()):
        wanted, found = config_of(settings, topic), known.get(name)
        if found is not None and name.startswith(begin):
            wanted = TopicConfig(found.partitions, wanted.replication, wanted.configs)
        differing += differences(name, topic, wanted, found)
    return differing


async def apply(settings: Kafka, differing: Sequence[Difference]) -> list[Difference]:
    """Applies the differences that are not refused, and waits until the brokers know them.

    Returns the differences that are left, which are refused.

    Raises:
        KafkaUnavailable: some are not applied; apply again.
        KafkaRefused: this user may not change the topics.
    """
    applicable = [difference for difference in differing if difference.refused is None]
    await create_topics(settings, PLATFORM)
    partitions = {each.topic: int(each.declared) for each in applicable if each.what == PARTITIONS}
    configs: dict[str, dict[str, str]] = {}
    for difference in applicable:
        if difference.what not in (MISSING, PARTITIONS):
            configs.setdefault(difference.topic, {})[difference.what] = difference.declared
    async with admin_client(settings) as client:
        with translated():
            if partitions:
                await client.create_partitions(
                    {name: NewPartitions(count) for name, count in partitions.items()}
                )
            if configs:
                await _alter(client, configs)
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        left = await plan(settings)
        if all(difference.refused for difference in left):
            return left
        if time.monotonic() > deadline_s:
            names = ", ".join(sorted({difference.topic for difference in left if difference.refused is None}))
            raise KafkaUnavailable(
                f"not as declared {SETTLE_S:.0f} s after it was applied: {names}; apply again"
            )
        await asyncio.sleep(0.1)


async def create(settings: Kafka, *, replication: int | None = None) -> list[str]:
    """Creates missing topics, and returns their names in full.

    Args:
        settings: where, and the declaration.
        replication: copies of each partition instead of those declared.

    Raises:
        KafkaUnavailable: some are missing; run it again.
        KafkaRefused: this user may not create or describe the topics.
    """
    missing = [difference.topic for difference in await plan(settings) if difference.what == MISSING]
    await create_topics(settings, PLATFORM, replication=replication)
    return missing


async def _alter(client: AIOKafkaAdminClient, configs: Mapping[str, Mapping[str, str]]) -> None:
    resources = [
        (int(ConfigResourceType.TOPIC), name, [(key, _SET, value) for key, value in of_topic.items()])
        for name, of_topic in configs.items()
    ]
    request = RequestOf(_ALTER_CONFIGS, resources, False)  # noqa: FBT003 (by position, as in the protocol)
    answer = await client._send_to_controller(request)  # noqa: SLF001 (it has no method for this request)
    for code, message, _kind, name in answer.resources:
        _check(code, name, message)


async def _describe(client: AIOKafkaAdminClient, names: Iterable[str]) -> dict[str, ActualTopic]:
    names = list(names)
    if not names:
        return {}
    answers = await client.describe_configs(
        [ConfigResource(ConfigResourceType.TOPIC, name, configs=None) for name in names]
    )
    configs: dict[str, dict[str, str]] = {}
    for answer in answers:
        for code, message, _kind, name, entries in answer.resources:
            _check(code, name, message)
            configs[name] = {entry[0]: entry[1] for entry in entries}
    found = {}
    for described in await client.describe_topics(names):
        name, partitions = described["topic"], described["partitions"]
        _check(described["error_code"], name, None)
        copies = min(len(partition["replicas"]) for partition in partitions)
        found[name] = ActualTopic(len(partitions), copies, configs[name])
    return found


def _check(code: int, name: str, message: str | None) -> None:
    if code:
        raise for_code(code)(f"{name}: {message or 'no reason given'}")
