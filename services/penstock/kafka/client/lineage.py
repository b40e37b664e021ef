"""Asks the broker which topic and which log stand behind a name: requests that aiokafka lacks.

A topic's id (KIP-516) changes when the topic is deleted and created again. A leader epoch (KIP-320)
ends at one offset of a log, so an epoch that ends before an offset tells that the log was cut.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import LeaderNotAvailableError, UnknownTopicOrPartitionError, for_code
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

from penstock.core.position import EpochEnd
from penstock.kafka.client.protocol import RequestOf, struct

_NO_EPOCH = -1


class _Uuid(AbstractType[bytes]):  # type: ignore[misc]  # aiokafka is untyped
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


_METADATA = struct(
    3,
    12,
    Schema(
        (
            "topics",
            CompactArray(("topic_id", _Uuid), ("name", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    ),
    flexible=True,
)

_EPOCH_END = struct(
    23,
    3,
    Schema(
        ("replica_id", Int32),
        (
            "topics",
            Array(
                ("topic", String("utf-8")),
                (
                    "partitions",
                    Array(("partition", Int32), ("current_leader_epoch", Int32), ("leader_epoch", Int32)),
                ),
            ),
        ),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            Array(
                ("topic", String("utf-8")),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader_epoch", Int32),
                        ("end_offset", Int64),
                    ),
                ),
            ),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Log:
    """The log of one partition, as its cluster describes it.

    Attributes:
        topic_id: KIP-516.
        leader: node id of its leader.
        leader_epoch: the epoch in which records are appended now.
    """

    topic_id: str
    leader: int
    leader_epoch: int


async def describe(client: AIOKafkaClient, topics: Collection[str]) -> dict[TopicPartition, Log]:
    """The logs of all partitions of topics.

    Raises:
        KafkaError: no broker answered, a topic does not exist, or a partition has no leader now.
    """
    if not topics:
        return {}
    node = client.get_random_node()
    if node is None:
        raise LeaderNotAvailableError("no broker is known")
    answer: Any = await client.send(
        node,
        RequestOf(_METADATA, [(bytes(16), name, {}) for name in topics], False, False, {}),  # noqa: FBT003 (fields of the wire)
    )
    logs: dict[TopicPartition, Log] = {}
    for error, name, topic_id, _internal, partitions, _operations, _tags in answer.topics:
        _raise_for(error, name)
        for failed, number, leader, epoch, *_rest in partitions:
            _raise_for(failed, f"{name}/{number}")
            text = base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()
            logs[TopicPartition(name, number)] = Log(text, leader, epoch)
    return logs


async def epoch_ends(
    client: AIOKafkaClient, epochs: Mapping[TopicPartition, tuple[int, int]]
) -> dict[TopicPartition, EpochEnd | None]:
    """Asks where an epoch ends in each log; None when the log does not know the epoch yet.

    An epoch that the log has lost ends where the next one begins.

    Args:
        client: of the library.
        epochs: node id of the leader, and epoch, by partition.

    Raises:
        KafkaError: a leader did not answer, or is the leader no more.
    """
    by_node: defaultdict[int, dict[TopicPartition, int]] = defaultdict(dict)
    for tp, (node, epoch) in epochs.items():
        by_node[node][tp] = epoch
    ends: dict[TopicPartition, EpochEnd | None] = {}
    for node, asked in by_node.items():
        topics: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for tp, epoch in asked.items():
            topics[tp.topic].append((tp.partition, _NO_EPOCH, epoch))
        answer: Any = await client.send(node, RequestOf(_EPOCH_END, -1, list(topics.items())))
        for topic, partitions in answer.topics:
            for error, number, epoch, end in partitions:
                _raise_for(error, f"{topic}/{number}")
                known = EpochEnd(end, epoch if epoch >= 0 else None) if end >= 0 else None
                ends[TopicPartition(topic, number)] = known
    return ends


def _raise_for(code: int, what: str) -> None:
    if code:
        error: Any = for_code(code)
        raise error(what)


__all__ = ["Log", "UnknownTopicOrPartitionError", "describe", "epoch_ends"]
