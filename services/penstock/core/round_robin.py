"""A queue whose keys take turns: a burst of one key delays no item of another. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Items by key; each key is served in the order of arrival.

    Args:
        key_of: an item's key.
    """

    def __init__(self, key_of: Callable[[T], Hashable]) -> None:
        self._key_of = key_of
        # The key whose turn it is comes first; no queue is empty.
        self._queues: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def append(self, item: T) -> None:
        """Adds an item behind the others of its key."""
        key = self._key_of(item)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(item)

    @property
    def first(self) -> T:
        """The item that `popleft` would return.

        Raises:
            StopIteration: no item is left.
        """
        return next(iter(self._queues.values()))[0]

    def popleft(self) -> T:
        """Removes the next item; the turn passes to the next key.

        Raises:
            StopIteration: no item is left.
        """
        key, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        if not queue:
            del self._queues[key]
        elif len(self._queues) > 1:
            self._queues.move_to_end(key)
        return item
