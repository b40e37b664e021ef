"""A reader continues as in a model of logs that are cut, deleted and created again."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.position import (
    EpochEnd,
    LogState,
    Position,
    StartReason,
    checksum,
    decide,
    taken,
    topic_of,
)


@dataclass
class Log:
    """A log with one leader epoch a restart. Each record is a number that is never used again."""

    topic: int = 0
    begin: int = 0
    records: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    epoch: int = 0
    written: int = 0

    @property
    def end(self) -> int:
        return len(self.records)

    def append(self, count: int) -> None:
        for _ in range(count):
            self.records.append(self.written)
            self.epochs.append(self.epoch)
            self.written += 1

    def cut(self, count: int) -> None:
        end = max(self.begin, self.end - count)
        del self.records[end:], self.epochs[end:]
        self.epoch += 2

    def delete(self, count: int) -> None:
        self.begin = min(self.end, self.begin + count)

    def recreate(self) -> None:
        self.topic += 1
        self.begin, self.epoch = 0, 0
        self.records, self.epochs = [], []

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        """As a broker answers: the beginning of the next epoch, and the epoch before it."""
        if epoch > self.epoch:
            return None
        at = next((at for at, found in enumerate(self.epochs) if found > epoch), self.end)
        return EpochEnd(at, self.epochs[at - 1] if at else None)

    def position(self, offset: int) -> Position:
        last = offset - 1
        known = offset > 0
        return Position(
            offset,
            str(self.topic),
            self.epochs[last] if known else None,
            checksum(0, None, str(self.records[last]).encode()) if known else None,
        )

    def state(self, position: Position) -> LogState:
        known = position.epoch is not None and self.epoch_end(position.epoch) is not None
        epoch = position.epoch if known and position.epoch is not None else self.epoch
        same = None
        # The reader compares what it has stored, and nothing else.
        compared = position.checksum is not None and position.topic_id == str(self.topic)
        if compared and self.begin < position.offset <= self.end:
            same = self.position(position.offset).checksum == position.checksum
        return LogState(
            self.begin,
            self.end,
            str(self.topic),
            None if position.epoch is None else self.epoch_end(position.epoch),
            self.epoch_end(epoch - 1) or EpochEnd(0),
            same,
        )


STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "read", "cut", "delete", "recreate"]), st.integers(1, 12)),
    max_size=40,
)


@given(STEPS)
# Two cuts, and nothing was read between them.
@example([("append", 10), ("read", 10), ("cut", 5), ("read", 1), ("cut", 3), ("append", 10)])
def test_every_record_that_is_left_is_read_and_none_twice(steps: list[tuple[str, int]]) -> None:
    """Over any sequence of faults, the reader gets each record that still exists, once, and counts
    exactly those that were deleted before it read them."""
    log = Log()
    stored = Position(0, "0")
    read: list[int] = []
    for what, count in [*steps, ("append", 1), ("read", 1_000)]:
        if what == "append":
            log.append(count)
        elif what == "cut":
            log.cut(count)
        elif what == "delete":
            log.delete(count)
        elif what == "recreate":
            log.recreate()
        else:
            start = decide(stored, log.state(stored))
            begin = start.position.offset
            assert log.begin <= begin <= log.end
            if start.reason is StartReason.DELETED:
                assert start.deleted == log.begin - stored.offset
            upto = min(begin + count, log.end)
            read += log.records[begin:upto]
            stored = log.position(upto) if upto > begin else start.position
    assert len(read) == len(set(read)), "a record was read twice"
    assert set(log.records[log.begin :]) <= set(read)


@given(
    st.integers(0, 2**40),
    st.none() | st.text("abcXYZ019_-", min_size=1, max_size=22),
    st.none() | st.integers(0, 2**31 - 1),
    st.none() | st.integers(0, 2**32 - 1),
)
def test_an_identity_is_read_as_it_was_written(
    offset: int, topic: str | None, epoch: int | None, crc: int | None
) -> None:
    """A stored position is the one that was stored; beside another offset only its topic counts."""
    position = Position(offset, topic, epoch, crc)
    assert Position.from_stored(offset, position.identity()) == position
    assert Position.from_stored(offset + 1, position.identity()) == Position(offset + 1, topic)
    assert topic_of(position.identity()) == topic


@given(st.text(max_size=40))
def test_a_foreign_identity_is_ignored(text: str) -> None:
    """Other clients commit metadata of their own: the offset counts alone."""
    assert Position.from_stored(7, text).offset == 7
    assert Position.from_stored(7, None) == Position(7)


def test_a_position_without_identity_is_kept_within_the_bounds() -> None:
    """A position that another client stored is valid while it is within the log."""
    log = LogState(3, 10, "a", None, EpochEnd(6))
    assert decide(Position(5), log).reason is StartReason.KEPT
    assert decide(Position(5), log).position == Position(5, "a")
    assert decide(Position(11), log).position.offset == 6
    assert decide(Position(2), log).deleted == 1
    assert decide(None, log).position.offset == 3


def test_an_epoch_that_the_log_never_had_is_a_lost_tail() -> None:
    """A log restored from a copy is older than the position: its newest epoch is read."""
    start = decide(Position(5, "a", 9), LogState(0, 10, "a", None, EpochEnd(4)))
    assert (start.reason, start.position.offset) == (StartReason.CUT, 4)


@given(st.integers(-1, 50), st.integers(0, 30), st.integers(0, 30))
def test_what_a_group_needs_is_within_the_log(committed: int, begin: int, records: int) -> None:
    """The lag of a group is never negative, and never more than the log has."""
    end = begin + records
    assert begin <= taken(committed, begin, end) <= end
