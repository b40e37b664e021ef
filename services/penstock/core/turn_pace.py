"""Decides how soon a turn of a ring may follow the one before.

A turn of the ring is a release, its ready records, a poll of workers, their results, a commit. Each
step costs about the same, however many tasks it moves. At low rates each task is moved at once. At
higher rates the steps are spaced, so that tasks share them: a task waits for half a gap in the
mean.

Pure: no I/O, no clock. When in doubt, nothing waits.
"""

from __future__ import annotations

from math import exp, inf

# Seconds over which the rate is measured.
HORIZON_S = 0.5


class TurnPace:
    """The gap between the turns of one process.

    Args:
        unpaced_per_s: entries a second up to which there is no gap.
        paced_per_s: entries a second at which the gap has grown to its limit.
        longest_s: its limit.
    """

    def __init__(self, unpaced_per_s: float, paced_per_s: float, longest_s: float) -> None:
        self._unpaced_per_s = unpaced_per_s
        self._paced_per_s = paced_per_s
        self._longest_s = longest_s
        self._rate = 0.0
        self._at_s = -inf
        self._more = False

    def add(self, entries: int, now_s: float, *, more: bool = False) -> None:
        """A turn has moved entries.

        Args:
            entries: that it moved.
            now_s: when it began, on a monotonic clock; batches of several types that are released
                together have the same.
            more: it moved as many as it may, and further ones wait.
        """
        self._more = more or (self._more and now_s == self._at_s)
        self._rate = self._rate * exp((self._at_s - now_s) / HORIZON_S) + entries / HORIZON_S
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next turn may begin."""
        return 0.0 if self._more else max(0.0, self._at_s - now_s + self._gap_s(self._rate))

    def gap_s(self, now_s: float) -> float:
        """Seconds between two turns, at the rate of now."""
        return self._gap_s(self._rate * exp((self._at_s - now_s) / HORIZON_S))

    def _gap_s(self, rate: float) -> float:
        share = (rate - self._unpaced_per_s) / (self._paced_per_s - self._unpaced_per_s)
        return self._longest_s * min(1.0, max(0.0, share))
