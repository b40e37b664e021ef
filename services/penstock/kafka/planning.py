"""What of the topics differs from their declaration, and putting it right.

Nothing is ever deleted, and no partition is added where that would break an order or an owner (`Topic.fixed`): such
differences are named and left. In doubt nothing is changed: a topic that cannot be described is an error.
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
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Int8, Int16, Int32, Schema, String

from penstock.errors import KafkaUnavailable
from penstock.kafka.connection import admin_client, create_topics, translated
from penstock.kafka.declared import ITS_OWN, Figures, figures
from penstock.kafka.topics import PLATFORM, READY, Topic, ready
from penstock.settings import Kafka

MISSING = "missing"
PARTITIONS = "partitions"
REPLICATION = "replication"

# Brokers learn of changes one after the other.
SETTLE_S = 15.0

_SET = 0


@dataclass(frozen=True, slots=True)
class Found:
    """How a topic is on the cluster; `replication` is that of its partition with the fewest copies."""

    partitions: int
    replication: int
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as declared.

    Attributes:
        topic: in full.
        what: MISSING, PARTITIONS, REPLICATION, or a config by Kafka's own name.
        now: as it is; None when the topic is missing.
        declared: as it is to be.
        refused: why `apply` leaves it; None when it does not.
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


def differences(name: str, topic: Topic, wanted: Figures, found: Found | None) -> list[Difference]:
    """What of one topic is not as declared."""
    if found is None:
        return [Difference(name, MISSING, None, f"{wanted.partitions} partitions")]
    unlike = []
    if found.partitions != wanted.partitions:
        refused = None
        if wanted.partitions < found.partitions:
            refused = "Kafka never takes partitions away"
        elif topic.fixed:
            refused = f"it must not get more partitions while it is in use: {topic.fixed}"
        unlike.append(Difference(name, PARTITIONS, str(found.partitions), str(wanted.partitions), refused))
    if wanted.replication not in (ITS_OWN, found.replication):
        refused = (
            "copies are moved between brokers by kafka-reassign-partitions, or by the cluster's operator"
        )
        unlike.append(Difference(name, REPLICATION, str(found.replication), str(wanted.replication), refused))
    unlike += [
        Difference(name, key, found.configs.get(key), value)
        for key, value in sorted(wanted.configs.items())
        if found.configs.get(key) != value
    ]
    return unlike


async def plan(settings: Kafka) -> list[Difference]:
    """Lays the declaration beside the cluster.

    Raises:
        KafkaUnavailable: no broker answered, or not to everything.
        KafkaRefused: this user may not look at the topics.
    """
    async with admin_client(settings) as client:
        with translated():
            existing = set(await client.list_topics())
            begin = f"{settings.prefix}{READY}."
            topics = {settings.prefix + topic.name: topic for topic in PLATFORM}
            # How many partitions these have is their types' business.
            topics |= {
                name: ready(name.removeprefix(begin), 0) for name in existing if name.startswith(begin)
            }
            known = await _look(client, [name for name in topics if name in existing])
    unlike = []
    for name, topic in sorted(topics.items()):
        wanted, found = figures(settings, topic), known.get(name)
        if found is not None and name.startswith(begin):
            wanted = Figures(found.partitions, wanted.replication, wanted.configs)
        unlike += differences(name, topic, wanted, found)
    return unlike


async def apply(settings: Kafka, unlike: Sequence[Difference]) -> list[Difference]:
    """Puts right what is not refused, and looks again; harmless when it is right already.

    Returns what still differs, all of it refused.

    Raises:
        KafkaUnavailable: not everything is right now; apply again.
        KafkaRefused: this user may not change the topics.
    """
    todo = [one for one in unlike if one.refused is None]
    await create_topics(settings, PLATFORM)
    more = {one.topic: int(one.declared) for one in todo if one.what == PARTITIONS}
    configs: dict[str, dict[str, str]] = {}
    for one in todo:
        if one.what not in (MISSING, PARTITIONS):
            configs.setdefault(one.topic, {})[one.what] = one.declared
    async with admin_client(settings) as client:
        with translated():
            if more:
                await client.create_partitions({name: NewPartitions(count) for name, count in more.items()})
            if configs:
                _raise_for(await client._send_to_controller(_AlterSome(configs)))  # noqa: SLF001 (it has no method for this request)
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        left = await plan(settings)
        if all(one.refused for one in left):
            return left
        if time.monotonic() > deadline_s:
            names = ", ".join(sorted({one.topic for one in left if one.refused is None}))
            raise KafkaUnavailable(
                f"not as declared {SETTLE_S:.0f} s after it was applied: {names}; apply again"
            )
        await asyncio.sleep(0.1)


async def _look(client: AIOKafkaAdminClient, names: Iterable[str]) -> dict[str, Found]:
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
        found[name] = Found(len(partitions), copies, configs[name])
    return found


def _raise_for(answer: Any) -> None:
    for code, message, _kind, name in answer.resources:
        _check(code, name, message)


def _check(code: int, name: str, message: str | None) -> None:
    if code:
        raise for_code(code)(f"{name}: {message or 'no reason given'}")


class _AlterSomeResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
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
    )


class _AlterSomeStruct(RequestStruct):  # type: ignore[misc]  # as above
    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = _AlterSomeResponse
    SCHEMA = Schema(
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
    )


class _AlterSome(Request[_AlterSomeStruct]):  # type: ignore[misc]  # as above
    """IncrementalAlterConfigs: the client library has only the old request, which resets all that it does not name."""

    API_KEY = 44

    def __init__(self, configs: Mapping[str, Mapping[str, str]]) -> None:
        self._configs = configs

    def build(self, request_struct_class: type[_AlterSomeStruct]) -> _AlterSomeStruct:
        resources = [
            (int(ConfigResourceType.TOPIC), name, [(key, _SET, value) for key, value in configs.items()])
            for name, configs in self._configs.items()
        ]
        return request_struct_class(resources, False)  # noqa: FBT003 (by position, as the protocol has it)
