"""Decides which records a worker runs before it claims them, and how many it takes.

Most handlers of fast stages end within milliseconds. A claim and a commit before each of them cost
more than the handler. So a worker runs a few new records first, and claims those that last.

Pure: no I/O, no clock. When in doubt the worker claims first: a handler that kills its process is
counted only if its attempt was claimed.
"""

from __future__ import annotations

from collections import deque

# Seconds after which an attempt that still runs is claimed, and one that still waits. The latter is
# handed back before, as a rule. A claim says that a handler has begun, so the attempt is charged if
# its worker is lost; and without a claim its partition would not be committed for long.
CLAIM_AFTER_S = 0.1
CLAIM_WAITING_AFTER_S = 0.75
# Seconds, and records, between two commits of what is settled.
COMMIT_EVERY_S = 0.1
COMMIT_RECORDS = 100

# Records of one poll from which on one claim for all of them costs little.
MANY_RECORDS = 100
# A record of this age may have run before, on a worker that it killed. Or task-sync may be about to
# withdraw it: it withdraws records that were not taken for `ready_partitions.STUCK_S`.
OLD_S = 0.75
# So may a record that is read within this time after partitions were assigned.
AFTER_ASSIGNMENT_S = 10.0

# Attempts that ended within this time suggest how many will end within the next.
HORIZON_S = 0.25


def claims_first(*, records: int, oldest_s: float, assigned_s: float, suspects: bool) -> bool:
    """Whether a worker claims the records of a poll, and commits, before their handlers begin.

    Args:
        records: of the poll.
        oldest_s: age of the oldest record.
        assigned_s: seconds since partitions were assigned.
        suspects: whether one of the tasks is a suspect (`core.suspects`).
    """
    return suspects or records >= MANY_RECORDS or oldest_s >= OLD_S or assigned_s < AFTER_ASSIGNMENT_S


class BacklogLimit:
    """How many attempts may wait for a handler: as many as will soon find a free one.

    Args:
        most: the limit however many end.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # When attempts ended and how many, the oldest first; and their sum.
        self._ended: deque[tuple[float, int]] = deque()
        self._count = 0

    def add_ended(self, count: int, now_s: float) -> None:
        """Adds attempts that took at most `HORIZON_S` and have ended."""
        if count:
            self._ended.append((now_s, count))
            self._count += count

    def at(self, now_s: float) -> int:
        """The limit now.

        Args:
            now_s: seconds on a monotonic clock; never less than before.
        """
        while self._ended and self._ended[0][0] + HORIZON_S <= now_s:
            self._count -= self._ended.popleft()[1]
        return min(self._most, self._count)
