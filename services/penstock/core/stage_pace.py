"""Decides when attempts come back that exceed their stage's limit on a worker.

Other stages of the type are on the same topic, so a worker cannot leave these attempts there. It
hands them back, and each returns about when the stage has a slot for it. They return somewhat
faster than the stage runs: an idle slot costs more than a further hand-back.

Pure: no I/O, no clock.
"""

from __future__ import annotations

# The shortest and the longest delay, in seconds. The longest bounds how often a long backlog is
# handed back, and how long a worker that becomes free can wait for it.
LEAST_S = 0.1
MOST_S = 60.0
# Attempts return in this share of the time that the stage needs for them.
SHARE = 0.25
# Seconds of an attempt before one has ended.
FIRST_S = 0.02
# Weight of the latest attempt in the average.
WEIGHT = 0.3
# Share of a delay that is random.
JITTER = 0.25


class StagePace:
    """The pace of one stage on one worker.

    Args:
        limit: most attempts of the stage at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._mean_s: float | None = None
        # When the last attempt that was handed back returns.
        self._due_s = 0.0

    def add_ended(self, seconds: float) -> None:
        """Adds an attempt that has ended."""
        mean_s = seconds if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + WEIGHT * (seconds - mean_s)

    def delay_s(self, now_s: float, oldest_s: float, chance: float) -> float:
        """Seconds until an attempt that is handed back now may be released.

        Args:
            now_s: seconds on a monotonic clock.
            oldest_s: for how long the oldest attempt of the stage has been running.
            chance: a random number from 0 to 1, the caller's.
        """
        # An attempt that still runs takes at least as long as it has taken.
        attempt_s = max(FIRST_S if self._mean_s is None else self._mean_s, oldest_s)
        self._due_s = max(self._due_s, now_s) + attempt_s * SHARE / self._limit
        self._due_s = min(self._due_s, now_s + MOST_S)
        # The difference of two large numbers may exceed the bound by its rounding.
        return min(MOST_S, max(LEAST_S, (self._due_s - now_s) * (1 - JITTER * chance)))
