"""Decides which records a worker runs before it claims them, and how many it takes.

Most handlers of fast stages end within milliseconds. A claim and a commit before each of them cost
more than the handler. So a worker runs a few new records first, and claims those that last.

Pure: no I/O, no clock. When in doubt the worker claims first: a handler that kills its process is
counted only if its attempt was claimed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Seconds, and records, between two commits of what is settled.
COMMIT_EVERY_S = 0.1
COMMIT_RECORDS = 100
# Attempts that ended within this time suggest how many will end within the next.
HORIZON_S = 0.25


@dataclass(frozen=True, slots=True)
class EarlyStart:
    """The times and numbers by which a worker claims what it takes.

    Attributes:
        claim_after_s: after so many seconds, an attempt that still runs is claimed.
        claim_waiting_after_s: the same for an attempt that waits for a handler. As a rule, it is
            handed back before. A claim says that a handler has begun, so the attempt is charged if
            its worker is lost. Without a claim its partition would not be committed for long.
        many_records: from so many records of one poll on, one claim for all of them costs little.
        old_s: a record of this age may have run before, on a worker that it killed. Or task-sync
            may be about to withdraw it: it withdraws records that were not taken for
            `ready_partitions.STUCK_S`.
        after_assignment_s: a record that is read so soon after an assignment of partitions may
            have run before, too.
        horizon_s: see `HORIZON_S`.
    """

    claim_after_s: float = 0.1
    claim_waiting_after_s: float = 0.75
    many_records: int = 100
    old_s: float = 0.75
    after_assignment_s: float = 10.0
    horizon_s: float = HORIZON_S

    def claims_first(self, *, records: int, oldest_s: float, assigned_s: float, suspects: bool) -> bool:
        """Whether a worker claims the records of a poll, and commits, before their handlers begin.

        Args:
            records: of the poll.
            oldest_s: age of the oldest record.
            assigned_s: seconds since partitions were assigned.
            suspects: whether one of the tasks is a suspect (`core.suspects`).
        """
        return (
            suspects
            or records >= self.many_records
            or oldest_s >= self.old_s
            or assigned_s < self.after_assignment_s
        )


EARLY_START = EarlyStart()


class BacklogLimit:
    """How many attempts may wait for a handler: as many as will soon find a free one.

    Args:
        most: the limit however many end.
        horizon_s: see `HORIZON_S`.
    """

    def __init__(self, most: int, horizon_s: float = HORIZON_S) -> None:
        self._horizon_s = horizon_s
        self._most = most
        # When attempts ended and how many, the oldest first; and their sum.
        self._ended: deque[tuple[float, int]] = deque()
        self._count = 0

    def add_ended(self, count: int, now_s: float) -> None:
        """Adds attempts that took at most `horizon_s` and have ended."""
        if count:
            self._ended.append((now_s, count))
            self._count += count

    def at(self, now_s: float) -> int:
        """The limit now.

        Args:
            now_s: seconds on a monotonic clock; never less than before.
        """
        while self._ended and self._ended[0][0] + self._horizon_s <= now_s:
            self._count -= self._ended.popleft()[1]
        return min(self._most, self._count)
