"""State faults of Kafka: topics recreated, tails cut, offsets expired, records deleted.

A tail is cut only on a broker of its own, which is stopped meanwhile.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.structs import OffsetAndMetadata

from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import Topic
from penstock.settings import Kafka
from tests.support.waiting import wait_until

_HEAD = struct.Struct(">qi")


async def recreate_topic(settings: Kafka, topic: Topic) -> None:
    """Deletes a topic with its records and creates it again under the same name."""
    name = settings.prefix + topic.name
    async with admin_client(settings) as admin:
        await admin.delete_topics([name])

        async def gone() -> bool:
            return name not in await admin.list_topics()

        await wait_until(gone, what=f"{name} is deleted")
    await create_topics(settings, [topic])


async def delete_records(settings: Kafka, topic: str, before: Mapping[int, int]) -> None:
    """Deletes the records of partitions before an offset; -1 deletes all."""
    async with admin_client(settings) as admin:
        await admin.delete_records(
            {
                TopicPartition(settings.prefix + topic, number): RecordsToDelete(before_offset=offset)
                for number, offset in before.items()
            }
        )


async def commit_offsets(
    settings: Kafka, group: str, offsets: Mapping[TopicPartition, OffsetAndMetadata]
) -> None:
    """Commits offsets for a group without members: Kafka keeps those of a topic that was deleted
    for a while, and members commit them after that, too."""
    # Not one of ours, which would commit the identity of the log that is there now.
    consumer = AIOKafkaConsumer(bootstrap_servers=settings.kafka, group_id=group, enable_auto_commit=False)
    consumer.assign(list(offsets))
    try:
        await consumer.start()
        await consumer.commit(dict(offsets))
    finally:
        await consumer.stop()


async def expire_group_offsets(settings: Kafka, group: str) -> None:
    """Removes all offsets of a group without members, as offsets.retention does."""
    async with admin_client(settings) as admin:

        async def gone() -> bool:
            # Refused while the group has members.
            await admin._send_request(DeleteGroupsRequest([group]), await admin.find_coordinator(group))
            offsets: dict[TopicPartition, OffsetAndMetadata] = await admin.list_consumer_group_offsets(group)
            return not offsets

        await wait_until(gone, what=f"the offsets of {group} are gone")


def cut_tail(data: Path, partition: TopicPartition, end: int) -> int:
    """Cuts the log of a partition of a stopped broker at an offset; returns how many batches it
    cut.

    Args:
        data: the folder of the broker's logs.
        partition: its topic by its full name.
        end: the records from this offset on are lost. A batch that has it is cut as a whole.
    """
    folder = data / f"{partition.topic}-{partition.partition}"
    cut = 0
    for segment in sorted(folder.glob("*.log")):
        content = segment.read_bytes()
        position = 0
        while position + _HEAD.size <= len(content):
            base, length = _HEAD.unpack_from(content, position)
            if not length or base + _last_delta(content, position) >= end:
                break
            position += _HEAD.size + length
        if position < len(content):
            cut += 1
            segment.write_bytes(content[:position])
            for suffix in (".index", ".timeindex", ".txnindex"):
                segment.with_suffix(suffix).unlink(missing_ok=True)
    for snapshot in folder.glob("*.snapshot"):
        if int(snapshot.stem) > end:
            snapshot.unlink()
    # A checkpoint behind the end would make the broker truncate, and a clean shutdown skip, the
    # recovery of the log.
    (data / ".kafka_cleanshutdown").unlink(missing_ok=True)
    _cut_checkpoints(data, partition, end)
    return cut


def _last_delta(content: bytes, position: int) -> int:
    [delta] = struct.unpack_from(">i", content, position + 23)
    return int(delta)


def _cut_checkpoints(data: Path, partition: TopicPartition, end: int) -> None:
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        file = data / name
        if not file.exists():
            continue
        version, count, *lines = file.read_text().splitlines()
        changed = []
        for line in lines:
            topic, number, offset = line.split(" ")
            if (topic, number) == (partition.topic, str(partition.partition)):
                offset = str(min(int(offset), end))
            changed.append(f"{topic} {number} {offset}")
        file.write_text("\n".join([version, count, *changed]) + "\n")
    file = data / f"{partition.topic}-{partition.partition}" / "leader-epoch-checkpoint"
    if file.exists():
        version, _count, *lines = file.read_text().splitlines()
        kept = [line for line in lines if int(line.split(" ")[1]) <= end]
        file.write_text("\n".join([version, str(len(kept)), *kept]) + "\n")


def copy_data(data: Path, to: Path) -> None:
    """Copies the data of a stopped broker, for `restore_data`."""
    shutil.copytree(data, to)


def restore_data(data: Path, copy: Path) -> None:
    """Puts the data of a stopped broker back to a copy, as a restored backup does."""
    shutil.rmtree(data)
    shutil.copytree(copy, data)
