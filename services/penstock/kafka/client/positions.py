"""Checks stored positions against their topics before they are used, for every reader.

The broker is asked for each topic's id, for the bounds of each partition and for the end of the
position's leader epoch. The record before the position is compared if its checksum is stored, since
a log that was restored from a copy uses an epoch again. `core.position` decides.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from penstock.core.position import EpochEnd, LogState, Position, Start, StartReason, checksum, decide
from penstock.kafka.client import lineage
from penstock.kafka.client.connection import translated

log = logging.getLogger(__name__)

# Seconds for reading the record before a position; the caller retries.
ANSWER_S = 10.0

# Positions that this process has moved, by full topic name and reason, since it started.
moved: Counter[tuple[str, StartReason]] = Counter()
# Records that were deleted before this process read them, by full topic name.
deleted: Counter[str] = Counter()


def moved_by_topic(prefix: str, topics: Iterable[str]) -> dict[tuple[str, str], int]:
    """The positions that this process has moved, by topic without prefix and reason."""
    reasons = (StartReason.REPLACED, StartReason.CUT, StartReason.DELETED)
    return {(topic, reason.value): moved[prefix + topic, reason] for topic in topics for reason in reasons}


def deleted_by_topic(prefix: str, topics: Iterable[str]) -> dict[str, int]:
    """The records that were deleted before this process read them, by topic without prefix."""
    return {topic: deleted[prefix + topic] for topic in topics}


@dataclass(frozen=True, slots=True)
class Commit:
    """The committed offset of a group in the log that is there now.

    Attributes:
        offset: of the next record; -1 if the group has committed none in this log.
        topic_id: of the topic; None when the broker does not tell it.
    """

    offset: int
    topic_id: str | None


async def check(
    consumer: AIOKafkaConsumer, positions: Mapping[TopicPartition, Position | None]
) -> dict[TopicPartition, Start]:
    """Decides where the reader of each partition continues. Changes and logs nothing.

    Args:
        consumer: started, without group and topics; nothing else uses its assignment meanwhile.
        positions: stored positions; None for a partition without one.

    Raises:
        KafkaUnavailable: no broker answered, or a topic does not exist.
    """
    if not positions:
        return {}
    client = consumer.client
    with translated():
        logs = await lineage.describe(client, sorted({tp.topic for tp in positions}))
        begins = await consumer.beginning_offsets(list(positions))
        ends = await consumer.end_offsets(list(positions))
        found = {}
        epoch_ends = await _epoch_ends(client, logs, positions)
        epoch_begins = await _epoch_begins(client, logs, positions, epoch_ends)
        for tp, position in positions.items():
            state = LogState(
                begins[tp],
                ends[tp],
                logs[tp].topic_id,
                epoch_ends.get(tp),
                epoch_begins.get(tp) or EpochEnd(begins[tp]),
            )
            start = decide(position, state)
            if start.reason is StartReason.KEPT and not await _same_record(
                consumer, tp, start.position, state
            ):
                start = decide(position, dataclasses.replace(state, same_record=False))
            found[tp] = start
    return found


async def commits_of_logs(
    consumer: AIOKafkaConsumer, committed: Mapping[TopicPartition, OffsetAndMetadata]
) -> dict[TopicPartition, Commit]:
    """Returns the offsets that a group has committed in the logs that are there now.

    An offset that the group committed in another log says nothing about this one, also when this
    log has grown past it. It counts as none.

    Args:
        consumer: as for `check`. Commits have no checksum, so its assignment stays as it is.
        committed: of each partition, with the identity as its metadata; absent without a commit.

    Raises:
        KafkaUnavailable: no broker answered, or a topic does not exist.
    """
    stored = {tp: Position.from_stored(found.offset, found.metadata) for tp, found in committed.items()}
    starts = await check(consumer, stored)
    other_log = (StartReason.REPLACED, StartReason.CUT)
    return {
        tp: Commit(
            -1 if start.reason in other_log else stored[tp].offset,
            start.position.topic_id,
        )
        for tp, start in starts.items()
    }


def report(starts: Mapping[TopicPartition, Start]) -> None:
    """Logs and counts the positions that were not valid."""
    for tp, start in starts.items():
        if not start.moved:
            continue
        moved[tp.topic, start.reason] += 1
        deleted[tp.topic] += start.deleted
        log.warning(
            "A stored position does not fit its topic; reading from another offset",
            extra={
                "event": "position_moved",
                "topic": tp.topic,
                "partition": tp.partition,
                "reason": start.reason.value,
                "stored": start.stored,
                "offset": start.position.offset,
                "deleted": start.deleted,
            },
        )


Logs = Mapping[TopicPartition, lineage.Log]
Positions = Mapping[TopicPartition, Position | None]


def _comparable(logs: Logs, positions: Positions) -> dict[TopicPartition, Position]:
    """The positions that may be of the same topic: another topic's epochs say nothing."""
    return {
        tp: position
        for tp, position in positions.items()
        if position is not None and position.topic_id in {None, logs[tp].topic_id}
    }


async def _epoch_ends(
    client: object, logs: Logs, positions: Positions
) -> dict[TopicPartition, EpochEnd | None]:
    asked = {
        tp: (logs[tp].leader, position.epoch)
        for tp, position in _comparable(logs, positions).items()
        if position.epoch is not None
    }
    return await lineage.epoch_ends(client, asked)


async def _epoch_begins(
    client: object, logs: Logs, positions: Positions, ends: Mapping[TopicPartition, EpochEnd | None]
) -> dict[TopicPartition, EpochEnd | None]:
    """Asks where each position's epoch begins, or the newest epoch if the log lacks it."""
    asked = {}
    for tp, position in _comparable(logs, positions).items():
        known = position.epoch is not None and ends.get(tp) is not None
        epoch = position.epoch if known and position.epoch is not None else logs[tp].leader_epoch
        # An epoch begins where the one before it ends.
        if epoch > 0:
            asked[tp] = (logs[tp].leader, epoch - 1)
    return await lineage.epoch_ends(client, asked)


async def _same_record(
    consumer: AIOKafkaConsumer, tp: TopicPartition, position: Position, state: LogState
) -> bool:
    """Whether the record before the position is the one that was read; True if unknown."""
    if position.checksum is None or not state.begin < position.offset <= state.end:
        return True
    consumer.assign([tp])
    try:
        consumer.seek(tp, position.offset - 1)
        async with asyncio.timeout(ANSWER_S):
            record = await consumer.getone(tp)
    except TimeoutError:
        # A transaction that was aborted since, or is open again: not what was read.
        return False
    finally:
        consumer.unsubscribe()
    return bool(
        record.offset == position.offset - 1
        and checksum(record.timestamp, record.key, record.value) == position.checksum
    )
