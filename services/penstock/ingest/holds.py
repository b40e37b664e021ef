"""The partitions whose next record waits, and for what. No I/O but the log."""

from __future__ import annotations

import logging

from penstock.errors import LockConflict, ObjectsUnavailable

log = logging.getLogger(__name__)


class Holds:
    """Held partitions of a topic.

    Args:
        topic: its full name.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._reasons: dict[int, ObjectsUnavailable | LockConflict] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def __contains__(self, number: int) -> bool:
        return number in self._reasons

    def hold(self, number: int, offset: int, reason: ObjectsUnavailable | LockConflict) -> None:
        """Holds a partition at the record of an offset, and says so once for each reason."""
        if str(self._reasons.get(number)) != str(reason):
            log.warning(
                "A partition waits at its next record",
                extra={
                    "event": "partition_held",
                    "topic": self._topic,
                    "partition": number,
                    "offset": offset,
                    "error": reason,
                },
            )
        self._reasons[number] = reason

    def end(self, number: int) -> None:
        """A partition is held no longer."""
        self._reasons.pop(number, None)

    def is_locked(self, number: int) -> bool:
        """Whether a partition waits for a lock of another transaction."""
        return isinstance(self._reasons.get(number), LockConflict)
