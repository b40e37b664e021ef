"""Decides which partitions of a ready topic get the next records, and which give theirs up.

A worker is a reader of one or several partitions. A reader that runs as many tasks as it can takes
nothing, so records on its partitions wait, even while another worker is idle. Such a reader is
*stuck*: it gets no further records, and its records are withdrawn when another reader has room.

- A reader has taken nothing for `STUCK_S` while it had records, and another reader has none, or
  takes records at least `SLOWER` times as often: it is stuck. Where all are equally slow, no reader
  is stuck, and nothing is withdrawn.
- A record is late on the partition of a reader that takes others: it goes to a reader that has
  room, unless tasks wait for their release, which such a reader gets first.
- An urgent task overtakes less urgent ones that a reader which takes nothing has left for
  `STUCK_S`: they are withdrawn together. Such a reader is *narrow* until it takes a task: it has at
  most one record, since it takes from its partitions in any order.
- A reader without records is full or idle; no offset tells which. A marker, a record without a
  task, tells: an idle worker takes it at once. A reader gets one marker, and no other until it
  takes that.
- A reader whose records were withdrawn gets a marker, too. It gets no tasks until it takes the
  marker.

Pure: no I/O, no clock. When in doubt, nothing is withdrawn: a withdrawn task has a new attempt. A
worker that takes the old record at the same moment would run it, and its result would be refused.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log

from penstock.core.ready_reader import PROVEN_S, Partition, Reader, Unread
from penstock.core.task import Priority

# Seconds after which a reader that takes nothing may be stuck, and after which a record is late on
# a partition of a reader that takes others.
STUCK_S = 1.0
LATE_S = 2.0
# Seconds between two withdrawals for urgent tasks. Each may meet a task that was just taken.
OVERTAKE_S = 5.0
# A reader is stuck beside another that takes records this many times as often.
SLOWER = 4
# Seconds after which a reader that did not take its marker counts as full.
PROBE_S = 0.3
# Seconds for which it is believed which worker reads which partition.
KEEP_READERS_S = 10.0
# The least part of the quickest reader's records that a reader gets.
LEAST_WEIGHT = 0.01
# The records of a narrow reader that has one: it gets more only where all others have as many.
_FULL = 1_000_000
# A large batch is divided into about this many pieces.
PIECES = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps for tasks that wait behind a busy worker.

    Attributes:
        withdraw: partitions whose records go to other workers.
        probe: partitions that get a marker.
    """

    withdraw: Sequence[int] = ()
    probe: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.withdraw or self.probe)


class ReadyPartitions:
    """The partitions of one ready topic.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._partitions = {number: Partition() for number in range(count)}
        self._readers: dict[int, str] = {}
        self._readers_s = -inf
        self._taken_s = -inf
        self._overtaken_s = -inf
        self._next = 0

    @property
    def written(self) -> int:
        """The sum of the ends of all partitions."""
        return sum(each.end for each in self._partitions.values())

    @property
    def taken(self) -> int:
        """The sum of the offsets up to which workers need no record."""
        return sum(each.taken for each in self._partitions.values())

    @property
    def lag(self) -> int:
        """Records of tasks that no worker has taken; a marker delays no task and is left out."""
        return sum(max(0, each.tasks) for each in self._partitions.values())

    def __getitem__(self, number: int) -> Partition:
        return self._partitions[number]

    def start(self, ends: Mapping[int, int], now_s: float) -> None:
        """The topic is new to this process: all in it is as if it had been written now, MEDIUM."""
        for number, end in ends.items():
            self._partitions[number] = Partition(
                end, 0, deque([Unread(end, now_s, least=Priority.MEDIUM)] if end else [])
            )
        self._taken_s = -inf

    def correct(self, ends: Mapping[int, int]) -> None:
        """Sets the ends, as the broker knows them."""
        for number, end in ends.items():
            each = self._partitions[number]
            each.end = end
            while each.unread and each.unread[-1].end > end:
                each.unread.pop()

    def add(self, number: int, records: int, now_s: float, priorities: Collection[Priority] = ()) -> None:
        """Records were written; a negative number when the broker refused some of them.

        Args:
            number: of the partition.
            records: how many.
            now_s: now.
            priorities: those of their tasks; empty for markers and refused records.
        """
        each = self._partitions[number]
        if records > 0:
            each.add(records, now_s, priorities)
        elif records < 0:
            self.correct({number: each.end + records})

    def add_marker(self, number: int, offset: int, now_s: float, *, withdrawn: bool, behind: int = 0) -> None:
        """A marker was written.

        Args:
            number: of the partition.
            offset: of the marker.
            now_s: now.
            behind: records that were written after it, by now.
            withdrawn: its records were withdrawn before; else it is to find out whether the reader
                has room.
        """
        each = self._partitions[number]
        self.correct({number: offset})
        each.add(1, now_s)
        each.marker, each.marker_s, each.withdrawn = each.end, now_s, withdrawn
        if behind > 0:
            # Their priorities went with their offsets.
            each.add(behind, now_s, [Priority.MEDIUM])

    def find_marker(self, number: int, end: int, now_s: float) -> None:
        """The only unread record is a marker, of another process."""
        each = self._partitions[number]
        self.correct({number: end})
        each.marker, each.marker_s, each.withdrawn = end, now_s, True

    def withdraw(self, number: int, offset: int) -> None:
        """The records before an offset are deleted."""
        each = self._partitions[number]
        each.taken = max(each.taken, offset)
        each.end = max(each.end, offset)
        while each.unread and each.unread[0].end <= offset:
            each.unread.popleft()
        if each.marker is not None and each.marker <= offset:
            each.marker, each.withdrawn = None, False

    def take(self, taken: Mapping[int, int], now_s: float) -> bool:
        """Up to these offsets workers need no record; returns whether any has changed."""
        passed_s = now_s - self._taken_s if self._taken_s > -inf else 0.0
        self._taken_s = now_s
        changed, took = False, set()
        for number, offset in taken.items():
            if (each := self._partitions.get(number)) is not None:
                tasks = each.tasks
                changed = each.take(offset, now_s, passed_s) or changed
                if each.tasks < tasks:
                    took.add(self._name(number))
        for number, each in self._partitions.items():
            each.narrow = each.narrow and self._name(number) not in took
        return changed

    def _name(self, number: int) -> str:
        """The reader of a partition; where it is not known, each is one of its own."""
        return self._readers.get(number, str(number))

    def narrow_room(self) -> int | None:
        """How many records may be added while every reader is narrow; None otherwise."""
        if not all(each.narrow for each in self._partitions.values()):
            return None
        busy = {self._name(number) for number, each in self._partitions.items() if each.tasks > 0}
        return len({*map(self._name, self._partitions)} - busy)

    def set_readers(self, readers: Mapping[int, str], now_s: float) -> None:
        """The reader of each partition; empty while the group has none, or is in a rebalance."""
        self._readers, self._readers_s = dict(readers), now_s

    @property
    def has_readers(self) -> bool:
        """Whether the group had readers at the last look."""
        return bool(self._readers)

    def late_at_s(self) -> float:
        """When the oldest record of a task will be late."""
        waiting = (
            each.unread[0].written_s for each in self._partitions.values() if each.unread and each.tasks > 0
        )
        return min(waiting, default=inf) + STUCK_S

    def needs_readers(self, now_s: float) -> bool:
        """Whether to look which worker reads which partition.

        Not while every partition has waiting tasks of the same priority and none moves: no worker
        is idle.
        """
        age_s = now_s - self._readers_s
        least = max(each.least_urgent() for each in self._partitions.values())
        if age_s >= KEEP_READERS_S / 2 and any(each.marker is not None for each in self._partitions.values()):
            return True
        return (
            age_s >= STUCK_S
            and self.late_at_s() <= now_s
            and any(
                each.tasks <= 0
                or each.most_urgent < least
                or (each.moves and now_s - each.moves[-1] < STUCK_S)
                for each in self._partitions.values()
            )
        )

    def plan(self, now_s: float, *, more_ready: bool, first_ready: Priority | None = None) -> Plan:
        """Plans the steps for tasks that wait behind a busy worker.

        Args:
            now_s: now, right after `take`.
            more_ready: tasks wait for their release, so an idle worker gets some in any case.
            first_ready: priority of the first of them; None while there is room to release it.
        """
        if overtaken := self._overtaken(now_s, first_ready):
            self._overtaken_s = now_s
            return Plan(withdraw=overtaken)
        if not self._knows_readers(now_s):
            return Plan()
        readers = self._by_reader(now_s)
        stuck = [reader for reader in readers if self._is_stuck(reader, readers, now_s)]
        late = [
            reader
            for reader in readers
            if reader not in stuck and reader.tasks > 0 and now_s - reader.oldest_s >= LATE_S
        ]
        waiting = stuck if more_ready else [*stuck, *late]
        if not waiting:
            return Plan()
        room = any(reader.proven(now_s) for reader in readers)
        paces = [reader.pace_s(now_s) for reader in readers if reader not in stuck]
        moving = [
            reader
            for reader in stuck
            if any(reader.frozen_s(now_s) >= max(STUCK_S, SLOWER * pace_s) for pace_s in paces)
        ]
        chosen = waiting if room else moving
        if chosen:
            partitions = [item for reader in chosen for item in reader.partitions.items()]
            return Plan(withdraw=tuple(number for number, each in partitions if each.tasks > 0))
        idle = [reader for reader in readers if not reader.lag and not reader.has_marker]
        return Plan(probe=tuple(min(reader.partitions) for reader in idle))

    def _overtaken(self, now_s: float, first_ready: Priority | None) -> tuple[int, ...]:
        """Partitions of readers that take nothing, with tasks that a more urgent one overtakes."""
        # A task that another transaction locks stays, and would be overtaken again at once.
        if now_s - self._overtaken_s < OVERTAKE_S:
            return ()
        # In a rebalance. A worker takes from one of its partitions at a time, and the others would
        # seem to be those of a slow one.
        moved_s = max((each.moves[-1] for each in self._partitions.values() if each.moves), default=-inf)
        if not self._knows_readers(now_s) and now_s - moved_s < STUCK_S:
            return ()
        slow = [reader for reader in self._by_reader(now_s) if reader.frozen_s(now_s) >= STUCK_S]
        urgent = [reader.overtakes(now_s - STUCK_S) for reader in slow]
        first = min((found for found in (*urgent, first_ready) if found is not None), default=None)
        if first is None:
            return ()
        partitions = [item for reader in slow for item in reader.partitions.items()]
        overtaken = tuple(n for n, each in partitions if each.tasks > 0 and each.least_urgent() > first)
        if overtaken:
            for _number, each in partitions:
                each.narrow = True
        return overtaken

    def _is_stuck(self, reader: Reader, readers: Sequence[Reader], now_s: float) -> bool:
        frozen_s = reader.frozen_s(now_s)
        if frozen_s < STUCK_S:
            return False
        return any(
            not other.lag or frozen_s >= SLOWER * other.pace_s(now_s)
            for other in readers
            if other is not reader
        )

    def _knows_readers(self, now_s: float) -> bool:
        return now_s - self._readers_s < KEEP_READERS_S and self._readers.keys() == self._partitions.keys()

    def _by_reader(self, now_s: float) -> list[Reader]:
        """The readers. Where they are not known, each partition is one of its own."""
        if not self._knows_readers(now_s):
            return [Reader({number: each}) for number, each in self._partitions.items()]
        numbers: dict[str, dict[int, Partition]] = {}
        for number, name in self._readers.items():
            numbers.setdefault(name, {})[number] = self._partitions[number]
        return [Reader(partitions) for partitions in numbers.values()]

    def share(self, count: int, now_s: float, bundle: int = 1) -> list[int]:
        """The partition of each of the next `count` tasks, in their order.

        Readers are filled evenly: each task goes where it would wait least, by the records there
        and by the rate at which they are taken. Without rates the number of records decides.

        Args:
            count: tasks.
            now_s: now.
            bundle: tasks that may run one after the other without a delay that counts.
        """
        readers = self._usable(now_s)
        weights = _weights(readers)
        total = len(self._partitions)
        piece = max(1, bundle, count // PIECES)
        loads = [_FULL if reader.narrow and reader.tasks > 0 else reader.lag for reader in readers]
        added = dict.fromkeys(self._partitions, 0)

        def turn(number: int) -> int:
            return (number - self._next) % total

        heap = [
            ((loads[index] + piece) / weights[index], min(map(turn, reader.partitions)), index)
            for index, reader in enumerate(readers)
        ]
        heapq.heapify(heap)
        chosen: list[int] = []
        while len(chosen) < count:
            _level, order, index = heap[0]
            partitions = readers[index].partitions
            number = min(partitions, key=lambda n: (partitions[n].lag + added[n], turn(n)))
            narrow = readers[index].narrow
            records = 1 if narrow else min(piece, count - len(chosen))
            chosen += [number] * records
            added[number] += records
            loads[index] += _FULL if narrow else records
            heapq.heapreplace(heap, ((loads[index] + piece) / weights[index], order + total, index))
        if chosen:
            self._next = (chosen[-1] + 1) % total
        return chosen

    def _usable(self, now_s: float) -> list[Reader]:
        """The readers that get tasks: all, if none of them seems to have room."""
        readers = self._by_reader(now_s)
        known = self._knows_readers(now_s)
        moving = [reader for reader in readers if not (known and self._is_stuck(reader, readers, now_s))]
        free = [reader for reader in moving if not reader.has_marker]
        if not any(reader.proven_s > now_s - PROVEN_S for reader in free):
            # A marker that was just written says nothing yet.
            free += [
                reader
                for reader in moving
                if reader.has_marker and not reader.withdrawn and reader.marker_s > now_s - PROBE_S
            ]
        return free if any(reader.frozen_s(now_s) < STUCK_S for reader in free) else readers


def _weights(readers: Sequence[Reader]) -> list[float]:
    """How many records each reader takes beside the others, in coarse steps: rates are noisy."""
    known = [reader.rate for reader in readers if reader.rate]
    if not known:
        return [1.0] * len(readers)
    # A reader that takes all there are is at least as quick as any whose rate is known.
    rates = [max(*known, reader.least) if reader.rate is None else reader.rate for reader in readers]
    best = max(rates)
    # A slow reader gets some: otherwise its rate would never be measured again.
    return [SLOWER ** round(log(max(rate / best, LEAST_WEIGHT), SLOWER)) for rate in rates]
