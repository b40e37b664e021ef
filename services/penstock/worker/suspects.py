"""The suspects of a handler pool: those that have not begun, and the turns of those that run."""

from __future__ import annotations

from collections.abc import Callable, Collection

from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId
from penstock.core.suspects import SuspectQueue


class Suspects:
    """The attempts of suspects, in the order of a `SuspectQueue`."""

    def __init__(self) -> None:
        self._queue: SuspectQueue[AttemptId] = SuspectQueue()
        # Those that have not begun.
        self._waiting: dict[AttemptId, ReadyTask] = {}
        self.end_turn = self._queue.end_turn

    def __len__(self) -> int:
        """How many wait for a turn; may be asked from any thread."""
        return len(self._queue)

    @property
    def announced(self) -> int:
        """How many have a turn, and have not begun: the platform does not know it yet."""
        return len(self._waiting) - len(self._queue)

    @property
    def blocks_others(self) -> bool:
        """Whether no other attempt may begin."""
        return self._queue.blocks_others

    def add(self, ready: ReadyTask) -> None:
        """Adds a suspect."""
        assert ready.isolation is not None
        self._waiting[ready.attempt_id] = ready
        self._queue.add(ready.attempt_id, ready.isolation)

    def take(self, running: int, may_begin: Callable[[ReadyTask], bool]) -> ReadyTask | None:
        """Gives a turn to the next suspect, if it may begin; see `SuspectQueue.take`."""
        attempt_id = self._queue.take(running, lambda each: may_begin(self._waiting[each]))
        return None if attempt_id is None else self._waiting[attempt_id]

    def begin(self, attempt_id: AttemptId) -> ReadyTask | None:
        """Removes and returns a suspect that begins; None if it was dropped meanwhile."""
        return self._waiting.pop(attempt_id, None)

    def drop(self, attempt_ids: Collection[AttemptId]) -> list[ReadyTask]:
        """Removes suspects, and ends their turns; returns those that had not begun."""
        self._queue.drop(attempt_ids)
        return [ready for each in attempt_ids if (ready := self._waiting.pop(each, None)) is not None]

    def take_all(self) -> list[ReadyTask]:
        """Removes and returns all that have not begun."""
        return self.drop(list(self._waiting))

    def take_behind_alone(self) -> list[ReadyTask]:
        """Removes and returns those that wait behind one that runs alone."""
        return self.drop(self._queue.behind_alone())
