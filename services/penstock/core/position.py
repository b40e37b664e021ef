"""Decides where a reader continues, given its stored position and the log that it finds.

An offset alone names no record: a topic may be deleted and created again, or a log may lose its
tail, and then the same offsets belong to other records. A position therefore carries an identity:
the topic's id, and the leader epoch and a checksum of the record before it.

Pure: no I/O, no clock. When in doubt, a record is read again: readers reject a repetition by
offset, idempotency key or fence, but nothing brings back a record that was skipped.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

_TEXT = re.compile(r"([\w-]*)/(\d*)/(\d*)@(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Position:
    """The offset that is read next, with what was known of its log when it was stored.

    Attributes:
        offset: of the next record.
        topic_id: of the topic; None when it is not known.
        epoch: leader epoch of the record before `offset`; None when it is not known.
        checksum: of the record before `offset` (`checksum`); None when it is not known.
    """

    offset: int
    topic_id: str | None = None
    epoch: int | None = None
    checksum: int | None = None

    def identity(self) -> str:
        """The identity as a text, to be stored beside the offset."""
        epoch, crc = ("" if value is None else value for value in (self.epoch, self.checksum))
        return f"{self.topic_id or ''}/{epoch}/{crc}@{self.offset}"

    @classmethod
    def from_stored(cls, offset: int, identity: str | None) -> Position:
        """Reads a stored offset and identity.

        Another client may move the offset and leave the identity. Then epoch and checksum belong to
        another offset and are ignored.
        """
        found = _TEXT.fullmatch(identity or "")
        if found is None:
            return cls(offset)
        topic_id, epoch, crc, at = found.groups()
        if int(at) != offset:
            return cls(offset, topic_id or None)
        return cls(offset, topic_id or None, int(epoch) if epoch else None, int(crc) if crc else None)


def checksum(timestamp_ms: int, key: bytes | None, value: bytes | None) -> int:
    """The checksum of a record, for `Position.checksum`."""
    return zlib.crc32(value or b"", zlib.crc32(key or b"", zlib.crc32(str(timestamp_ms).encode())))


class EpochEnd(NamedTuple):
    """The end of a leader epoch in a log.

    Attributes:
        offset: behind its last record.
        epoch: of the record before `offset`; None when it is not known.
    """

    offset: int
    epoch: int | None = None


_BEGINNING = EpochEnd(0)


@dataclass(frozen=True, slots=True)
class LogState:
    """A partition as the broker describes it.

    Attributes:
        begin: offset of its oldest record.
        end: offset behind its newest record.
        topic_id: of its topic.
        epoch_end: where the position's epoch ends here; None if this log never had that epoch.
            Without an epoch in the position it says nothing.
        epoch_begin: where the position's epoch begins here, which is the end of the epoch before
            it; or the newest one if this log never had it or the position has none.
        same_record: whether the record before the position has its checksum; None if that was not
            compared.
    """

    begin: int
    end: int
    topic_id: str | None = None
    epoch_end: EpochEnd | None = None
    epoch_begin: EpochEnd = _BEGINNING
    same_record: bool | None = None


class StartReason(StrEnum):
    """Why a reader continues where it does. The values are labels of a metric."""

    KEPT = "kept"  # the position is valid
    NEW = "new"  # there is no position
    REPLACED = "replaced"  # the topic was deleted and created again
    CUT = "cut"  # the log lost its tail, and may have used the offsets again
    DELETED = "deleted"  # records were deleted before they were read


@dataclass(frozen=True, slots=True)
class Start:
    """The place where a reader continues.

    Attributes:
        position: with the identity of the log that was found.
        reason: of the choice.
        stored: the offset that was stored; None without one.
        deleted: records that were deleted before they were read.
    """

    position: Position
    reason: StartReason
    stored: int | None = None
    deleted: int = 0

    @property
    def moved(self) -> bool:
        """Whether the stored position was not valid."""
        return self.reason not in {StartReason.KEPT, StartReason.NEW}


def decide(position: Position | None, log: LogState) -> Start:
    """Decides where to continue.

    - A new topic is read from its beginning: none of its records was read.
    - A log that lost its tail is read from where the tail was cut: the records before it are the
      ones that were read.
    - Behind deleted records, it continues with the oldest record that is left.
    """
    if position is None:
        return Start(Position(log.begin, log.topic_id), StartReason.NEW)
    if None not in {position.topic_id, log.topic_id} and position.topic_id != log.topic_id:
        return Start(Position(log.begin, log.topic_id), StartReason.REPLACED, position.offset)
    if (cut := _cut(position, log)) is not None:
        start = min(max(cut.offset, log.begin), log.end)
        # With its epoch, so that another lost tail is seen even if no record was read meanwhile.
        epoch = cut.epoch if log.begin < start == cut.offset else None
        return Start(Position(start, log.topic_id, epoch), StartReason.CUT, position.offset)
    if position.offset < log.begin:
        deleted = log.begin - position.offset
        return Start(Position(log.begin, log.topic_id), StartReason.DELETED, position.offset, deleted)
    kept = Position(position.offset, log.topic_id or position.topic_id, position.epoch, position.checksum)
    return Start(kept, StartReason.KEPT, position.offset)


def _cut(position: Position, log: LogState) -> EpochEnd | None:
    """Returns the place where the log lost the tail that was read; None if it lost nothing."""
    if position.offset == 0:
        return None  # nothing was read
    if position.epoch is not None:
        if log.epoch_end is None:
            return _earlier(log.epoch_begin, position)
        if log.epoch_end.offset < position.offset:
            return log.epoch_end
    if position.offset > log.end or log.same_record is False:
        # A restored copy of the log uses an epoch again: everything in it may be new.
        return _earlier(log.epoch_begin, position)
    return None


def _earlier(end: EpochEnd, position: Position) -> EpochEnd:
    return end if end.offset <= position.offset else EpochEnd(position.offset)


def taken(committed: int, begin: int, end: int | None = None) -> int:
    """The offset up to which a group needs no record of a partition.

    A group without an offset starts at the beginning, and so does one whose offset is beyond the
    end: which records of this log it has read is not known. Deleted records need no reader.

    Args:
        committed: the group's offset; -1 without one.
        begin: offset of the oldest record.
        end: offset behind the newest record, read after `committed`; None if it was not read.
    """
    if end is not None and committed > end:
        return begin
    return max(committed, begin)


def topic_of(identity: str | None) -> str | None:
    """The topic's id in a stored identity."""
    found = _TEXT.fullmatch(identity or "")
    return (found[1] or None) if found else None


__all__ = [
    "EpochEnd",
    "LogState",
    "Position",
    "Start",
    "StartReason",
    "checksum",
    "decide",
    "taken",
    "topic_of",
]
