"""The queues between the reader and the lanes of ingest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.admission import PartitionLoad
from penstock.ingest.partition_queues import PartitionQueues

NUMBER = 3


class QueueMachine(RuleBasedStateMachine):
    """S7: each record that was read is taken once, in the order of its partition, or dropped to be
    read again; the load is what waits and what is being inserted."""

    @initialize(rows=st.integers(1, 5), size_bytes=st.none() | st.integers(1, 20))
    def start(self, rows: int, size_bytes: int | None) -> None:
        self.rows, self.size_bytes = rows, size_bytes
        self.queues = PartitionQueues(rows, size_bytes)
        self.expected: list[Any] = []
        self.taken: list[Any] | None = None
        self.drops = 0
        self.read = 0

    @rule(sizes=st.lists(st.none() | st.integers(0, 12), max_size=6))
    def add(self, sizes: list[int | None]) -> None:
        records = [SimpleNamespace(value=None if size is None else b"x" * size) for size in sizes]
        self.queues.add(NUMBER, records)
        self.expected += records

    @precondition(lambda self: self.taken is None)
    @rule(most=st.integers(1, 6))
    def take(self, most: int) -> None:
        self.drops = self.queues.drops(NUMBER)
        self.taken = self.queues.take(NUMBER, most)
        count = len(self.taken)
        assert self.taken == self.expected[:count]
        assert bool(self.taken) == bool(self.expected)
        assert count <= min(most, self.rows)
        if count > 1 and self.size_bytes is not None:
            assert _size(self.taken) <= self.size_bytes
        del self.expected[:count]

    @precondition(lambda self: self.taken is not None)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        assert self.taken is not None
        self.queues.end(NUMBER, self.taken)
        held = self.taken[data.draw(st.integers(0, len(self.taken))) :]
        self.queues.put_back(NUMBER, held, self.drops)
        if self.drops == self.queues.drops(NUMBER):
            self.expected[:0] = held
        self.taken = None

    @rule()
    def drop(self) -> None:
        self.queues.drop(NUMBER)
        self.expected.clear()

    @invariant()
    def loads_are_what_is_in_flight(self) -> None:
        records = [*self.expected, *(self.taken or ())]
        assert self.queues.load(NUMBER) == PartitionLoad(len(records), _size(records))
        assert self.queues.rows == len(records)
        assert self.queues.waiting(NUMBER) == len(self.expected)


def _size(records: list[Any]) -> int:
    return sum(len(record.value or b"") for record in records)


TestQueues = QueueMachine.TestCase
