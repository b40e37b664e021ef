"""Readers of the newest lines: each chunk once, however slowly its reader takes it."""

from __future__ import annotations

from penstock.core.log_chunk import Chunk, RunId
from penstock.gateway.log_tail import TailReader, _Partition


def chunk(number: int) -> Chunk:
    return Chunk(RunId(1, 0, 0, "a"), "w", number, [(0, 20, "stdout", f"{number}")])


def add(partition: _Partition, offset: int) -> None:
    """As the consumer does, while readers are suspended."""
    partition.add(offset, 100, [chunk(offset)])
    partition.position = offset + 1


def test_records_that_arrive_while_chunks_are_taken_are_not_skipped() -> None:
    """L2: a client that reads slowly gets the lines that were read meanwhile."""
    partition = _Partition(0, 0)
    reader = TailReader(partition, 0)
    add(partition, 0)
    taking = reader.take()
    found = [next(taking).first]
    add(partition, 1)
    found += [each.first for each in taking]
    assert reader.offset == 1
    found += [each.first for each in reader.take()]
    assert found == [0, 1]
    assert reader.offset == 2


def test_a_reader_begins_in_the_middle() -> None:
    partition = _Partition(0, 0)
    for offset in range(5):
        add(partition, offset)
    reader = TailReader(partition, 3)
    assert [each.first for each in reader.take()] == [3, 4]
    assert not [*reader.take()]
