"""Fair queueing among concurrency keys: which ready tasks are released next. Pure.

A queue holds the ready tasks of one level under one concurrency key, in the order of release. Only
its first tasks are read. When they are used up and more tasks wait behind them, the selection
stops, and the next one continues. The result is the same as if every queue were read completely.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.release_order import Place


@dataclass(frozen=True, slots=True)
class KeyQueue:
    """The first tasks of one concurrency key at one level.

    Attributes:
        concurrency_key: the key; "" for tasks without one.
        ids: task ids in order.
        room: how many tasks of the key may start.
        weight: how many tasks the key releases in one round.
        more: further tasks wait behind these.
        places: of the tasks in the order of release (`core.release_order.Place`); empty when it
            is the order of ids.
    """

    concurrency_key: str
    ids: Sequence[int]
    room: int
    weight: int = 1
    more: bool = False
    places: Sequence[Place] = ()

    def place(self, index: int) -> Place:
        """The place of its task with this index."""
        return self.places[index] if self.places else (self.ids[index],)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a weighted round robin among the concurrency keys of a level.

    Attributes:
        concurrency_key: the key served last; None before the first.
        quantum: how many more tasks that key may release in this round.
    """

    concurrency_key: str | None = None
    quantum: int = 0

    @property
    def first(self) -> str:
        """The smallest concurrency key that may be served next."""
        if self.concurrency_key is None:
            return ""
        return self.concurrency_key if self.quantum else successor(self.concurrency_key)


def successor(concurrency_key: str) -> str:
    """The smallest possible key behind this one, by code point; keys contain no NUL."""
    return f"{concurrency_key}\x01"


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected tasks.

    Attributes:
        ids: in order of release.
        truncated: the selection stopped because too little of a queue was read.
        cursor: the position of the round robin after it.
    """

    ids: list[int]
    truncated: bool
    cursor: Cursor


def select_in_order(queues: Sequence[KeyQueue], limit: int, cursor: Cursor) -> Selection:
    """Selects the first tasks of all keys that have room."""
    selected: list[int] = []
    rooms = [queue.room for queue in queues]
    heads = [
        (queue.place(0), number, 0) for number, queue in enumerate(queues) if queue.ids and queue.room > 0
    ]
    heapq.heapify(heads)
    while heads and len(selected) < limit:
        place, number, index = heapq.heappop(heads)
        selected.append(place[-1])
        queue = queues[number]
        rooms[number] -= 1
        if rooms[number] <= 0:
            continue
        if index + 1 < len(queue.ids):
            heapq.heappush(heads, (queue.place(index + 1), number, index + 1))
        elif queue.more:
            return Selection(selected, truncated=True, cursor=cursor)
    return Selection(selected, truncated=False, cursor=cursor)


def select_round_robin(
    queues: Sequence[KeyQueue], limit: int, cursor: Cursor, *, one_round: bool = False
) -> Selection:
    """Selects by weighted round robin: in a round, a key with room releases `weight` tasks.

    Args:
        queues: of different keys, in any order.
        limit: most tasks.
        cursor: the position to start from.
        one_round: stop after one round, because further keys follow these.
    """
    selected: list[int] = []
    active = sorted(
        (queue for queue in queues if queue.ids and queue.room > 0), key=lambda queue: queue.concurrency_key
    )
    start = next((index for index, queue in enumerate(active) if queue.concurrency_key >= cursor.first), 0)
    active = active[start:] + active[:start]
    taken = dict.fromkeys((queue.concurrency_key for queue in active), 0)
    while active:
        remaining = []
        for queue in active:
            if len(selected) >= limit:
                return Selection(selected, truncated=False, cursor=cursor)
            key = queue.concurrency_key
            quantum = cursor.quantum if cursor.quantum and cursor.concurrency_key == key else queue.weight
            start = taken[key]
            available = min(len(queue.ids), queue.room)
            count = min(quantum, available - start, limit - len(selected))
            selected += queue.ids[start : start + count]
            taken[key] = start + count
            used_up = start + count == available
            # A key keeps no quantum that it cannot use.
            has_unread = queue.more and available < queue.room
            cursor = Cursor(key, quantum - count if not used_up or has_unread else 0)
            if used_up and has_unread:
                return Selection(selected, truncated=True, cursor=cursor)
            if not used_up:
                remaining.append(queue)
        if one_round:
            break
        active = remaining
    return Selection(selected, truncated=False, cursor=cursor)
