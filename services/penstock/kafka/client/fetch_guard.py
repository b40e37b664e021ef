"""Keeps a consumer from taking records of another log for those that follow its position.

While a process runs, its topic may be deleted and created again, or lose its tail and grow past the
process's position. The client then resets its position by itself, or reads on without notice. The
guard looks at each answer before the client does. An answer is dropped, and the guard breaks, if

- the position is beyond the log's beginning or end;
- the leader epoch of the records read last ends before the position;
- after an error of the partition or of the connection, the topic has another id.

Records of a ready topic are deleted by task-sync when their tasks go to another worker. A reader
that permits this continues with the oldest record that is left.

Nothing is read from a broken partition. Its reader checks its position again (`positions`).
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from penstock.core.position import Position
from penstock.errors import KafkaUnavailable
from penstock.kafka.client import lineage

log = logging.getLogger(__name__)

_FETCH = 1
_OUT_OF_RANGE = OffsetOutOfRangeError.errno
# Base offset, length and leader epoch: the first fields of a batch.
_BATCH = struct.Struct(">qii")
_HEADER = 12
# Changes of the epoch that are kept: commits name records that were read a while ago.
_EPOCHS = 16


class _Log:
    """The known part of the log of one partition.

    Attributes:
        topic_id: of the topic.
        offsets: where an epoch of records that were read begins, ascending.
        epochs: these epochs; None for the records before a position without an epoch.
        verified: whether the topic has had this id since the last error.
    """

    __slots__ = ("epochs", "offsets", "topic_id", "verified")

    def __init__(self, position: Position) -> None:
        self.topic_id = position.topic_id
        self.offsets = [position.offset - 1]
        self.epochs = [position.epoch]
        self.verified = True

    def add(self, base: int, epoch: int) -> None:
        if epoch != self.epochs[-1]:
            self.offsets.append(base)
            self.epochs.append(epoch)
            del self.offsets[:-_EPOCHS], self.epochs[:-_EPOCHS]

    def epoch_of(self, offset: int) -> int | None:
        index = bisect_right(self.offsets, offset) - 1
        return self.epochs[index] if index >= 0 else None


class FetchGuard:
    """Guards one consumer.

    Args:
        consumer: started before the first `start`.
        may_be_deleted: whether records may be deleted before they are read.
    """

    def __init__(self, consumer: AIOKafkaConsumer, *, may_be_deleted: bool = False) -> None:
        self._consumer = consumer
        self._may_be_deleted = may_be_deleted
        self._client: Any = None
        self._logs: dict[TopicPartition, _Log] = {}
        self._broken: dict[TopicPartition, str] = {}

    @property
    def broken(self) -> Mapping[TopicPartition, str]:
        """Partitions whose log is not the one that was read, with what was seen."""
        return self._broken

    def ensure(self) -> None:
        """Ends the reader of a broken partition; the next consumer checks its position.

        Raises:
            KafkaUnavailable: a partition is broken.
        """
        for tp, why in self._broken.items():
            raise KafkaUnavailable(f"{tp.topic}/{tp.partition} is not the log that was read: {why}")

    def start(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Guards partitions from these checked positions on."""
        if self._client is None:
            fetcher = self._consumer._fetcher  # noqa: SLF001 (the client has no hook)
            self._client = fetcher._client  # noqa: SLF001 (see above)
            fetcher._client = _Client(self._client, self)  # noqa: SLF001 (see above)
        for tp, position in positions.items():
            self._logs[TopicPartition(*tp)] = _Log(position)
            self._broken.pop(TopicPartition(*tp), None)

    def forget(self) -> None:
        """Guards no partition until `start`: another reader may have advanced meanwhile."""
        self._logs.clear()
        self._broken.clear()

    def position(self, tp: TopicPartition, offset: int) -> Position:
        """The position at an offset up to which records were read."""
        known = self._logs.get(tp)
        if known is None:
            return Position(offset)
        return Position(offset, known.topic_id, known.epoch_of(offset - 1))

    def doubt(self, request: Any) -> None:
        """The connection failed: the broker may have another log when it is back."""
        for topic, partitions in request.topics:
            for number, *_rest in partitions:
                if (known := self._logs.get(TopicPartition(topic, number))) is not None:
                    known.verified = False

    async def inspect(self, node: int, request: Any, response: Any) -> None:
        """Looks at an answer.

        Raises:
            KafkaError: the client must not use it.
        """
        offsets = {
            TopicPartition(topic, number): offset
            for topic, partitions in request.topics
            for number, offset, *_rest in partitions
        }
        for topic, partitions in response.topics:
            for number, error, _high, *rest in partitions:
                tp = TopicPartition(topic, number)
                if (known := self._logs.get(tp)) is None:
                    continue
                if error == _OUT_OF_RANGE:
                    await self._out_of_range(node, tp, known, offsets[tp])
                elif error:
                    known.verified = False
                elif records := rest[-1]:
                    await self._follow(node, tp, known, offsets[tp], records)
        if any(tp in self._broken for tp in offsets):
            raise KafkaError(f"a log was replaced: {self._broken}")

    async def _out_of_range(self, node: int, tp: TopicPartition, known: _Log, offset: int) -> None:
        if self._may_be_deleted and await self._deleted(node, tp, known, offset):
            # The client continues with the oldest record, whose epoch may be a later one.
            self._logs[tp] = _Log(Position(offset, known.topic_id))
            return
        self._break(tp, f"offset {offset} is out of range")

    async def _deleted(self, node: int, tp: TopicPartition, known: _Log, offset: int) -> bool:
        """Whether this is the log that was read, without the records at and behind the offset."""
        found = (await lineage.describe(self._client, [tp.topic]))[tp]
        if known.topic_id is not None and found.topic_id != known.topic_id:
            return False
        begin = (await self._consumer.beginning_offsets([tp]))[tp]
        last = known.epochs[-1]
        if begin <= offset or last is None:
            return bool(begin > offset)
        end = (await lineage.epoch_ends(self._client, {tp: (node, last)}))[tp]
        return end is not None and end.offset >= offset

    async def _follow(self, node: int, tp: TopicPartition, known: _Log, offset: int, records: bytes) -> None:
        base, _length, epoch = _BATCH.unpack_from(records)
        last = known.epochs[-1]
        if not known.verified:
            found = (await lineage.describe(self._client, [tp.topic]))[tp]
            if known.topic_id is not None and found.topic_id != known.topic_id:
                self._break(tp, f"its topic has id {found.topic_id} instead of {known.topic_id}")
                return
            known.verified = True
        if last is not None and epoch != last:
            end = (await lineage.epoch_ends(self._client, {tp: (node, last)}))[tp]
            if end is None or end.offset < offset:
                at = None if end is None else end.offset
                self._break(tp, f"leader epoch {last} ends at {at}, before offset {offset}")
                return
        at = 0
        while at + _BATCH.size <= len(records):
            base, length, epoch = _BATCH.unpack_from(records, at)
            known.add(base, epoch)
            at += _HEADER + length

    def _break(self, tp: TopicPartition, why: str) -> None:
        if tp not in self._broken:
            self._broken[tp] = why
            log.warning(
                "The log of a partition is not the one that was read",
                extra={
                    "event": "log_replaced",
                    "topic": tp.topic,
                    "partition": tp.partition,
                    "reason": why,
                },
            )


class _Client:
    """A fetcher's client, whose answers the guard sees first."""

    def __init__(self, client: Any, guard: FetchGuard) -> None:
        self._client = client
        self._guard = guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node: int, request: Any, **options: Any) -> Any:
        if request.API_KEY != _FETCH:
            return await self._client.send(node, request, **options)
        try:
            response = await self._client.send(node, request, **options)
        except KafkaError:
            self._guard.doubt(request)
            raise
        await self._guard.inspect(node, request, response)
        return response
