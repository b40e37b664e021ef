"""The records of a partition between the reader and the lane of ingest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.admission import PartitionLoad
from penstock.core.position import Position
from penstock.ingest.partition import SoughtPartition

TP = TopicPartition("submitted", 3)


class QueueMachine(RuleBasedStateMachine):
    """S7: each record that was read is taken once, in the order of its partition; the load is what
    waits and what is being inserted."""

    @initialize(rows=st.integers(1, 5), size_bytes=st.none() | st.integers(1, 20))
    def start(self, rows: int, size_bytes: int | None) -> None:
        self.rows, self.size_bytes = rows, size_bytes
        self.partition = SoughtPartition(TP, Position(0))
        self.expected: list[Any] = []
        self.taken: list[Any] | None = None

    @rule(sizes=st.lists(st.none() | st.integers(0, 12), max_size=6))
    def add(self, sizes: list[int | None]) -> None:
        records = [SimpleNamespace(value=None if size is None else b"x" * size) for size in sizes]
        self.partition.add(records)
        self.expected += records

    @precondition(lambda self: self.taken is None)
    @rule()
    def take(self) -> None:
        self.taken = self.partition.take(self.rows, self.size_bytes)
        count = len(self.taken)
        assert self.taken == self.expected[:count]
        assert bool(self.taken) == bool(self.expected)
        assert count <= self.rows
        if count > 1 and self.size_bytes is not None:
            assert _size(self.taken) <= self.size_bytes
        del self.expected[:count]

    @precondition(lambda self: self.taken is not None)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        assert self.taken is not None
        held = self.taken[data.draw(st.integers(0, len(self.taken))) :]
        self.partition.end(self.taken, held)
        self.expected[:0] = held
        self.taken = None

    @invariant()
    def loads_are_what_is_in_flight(self) -> None:
        records = [*self.expected, *(self.taken or ())]
        assert self.partition.load == PartitionLoad(len(records), _size(records))
        assert self.partition.waiting == len(self.expected)


def _size(records: list[Any]) -> int:
    return sum(len(record.value or b"") for record in records)


TestQueues = QueueMachine.TestCase
