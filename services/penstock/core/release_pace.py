"""Decides how soon a release may follow the one before.

A release begins a turn of the ring: ready records, polls of workers, results, a commit. Each turn
costs about the same, however many tasks it moves. At low rates each task is released at once. At
higher rates turns are spaced, so that tasks share them: a task waits for half a gap in the mean.

Pure: no I/O, no clock. When in doubt, nothing waits.
"""

from __future__ import annotations

from math import exp, inf

# Released tasks a second up to which no release waits: their turns take about a third of a core.
UNPACED_PER_S = 60.0
# The gap grows to its limit, in seconds, at this rate.
LONGEST_S = 0.016
PACED_PER_S = 420.0
# Seconds over which the rate is measured.
HORIZON_S = 0.5


class ReleasePace:
    """The gap between the releases of one process."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at_s = -inf
        self._more = False

    def add(self, tasks: int, now_s: float, *, more: bool = False) -> None:
        """A batch has been released.

        Args:
            tasks: of the batch.
            now_s: when its release began, on a monotonic clock; batches of several types that are
                released together have the same.
            more: the batch was as large as it may be, and further tasks are ready.
        """
        self._more = more or (self._more and now_s == self._at_s)
        self._rate = self._rate * exp((self._at_s - now_s) / HORIZON_S) + tasks / HORIZON_S
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next release."""
        if self._more:
            return 0.0
        share = (self._rate - UNPACED_PER_S) / (PACED_PER_S - UNPACED_PER_S)
        return max(0.0, self._at_s - now_s + LONGEST_S * min(1.0, max(0.0, share)))
