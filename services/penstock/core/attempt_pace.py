"""How long the attempts of a type take, from a few of them. Pure: no I/O, no clock.

Short attempts are released in bundles: a few tasks go to one partition, so one worker reads, claims
and commits them together. Other attempts go one to each partition: a worker with one slot would run
a bundle one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from penstock.core.attempt import AttemptId

# Seconds that the last task of a bundle may wait for the others.
BUNDLE_S = 0.02
# Most tasks of a bundle: the next tasks may take longer than the last ones.
MAX_BUNDLE = 4
# Attempts that are measured together, and fewest from which a bundle follows.
SAMPLE = 32
FEWEST = 8
# Seconds between two measurements.
MEASURE_S = 1.0


class AttemptPace:
    """The durations of a type's last attempts.

    Attributes:
        bundle: how many tasks may go to one partition together, at least 1.
    """

    def __init__(self) -> None:
        self.bundle = 1
        self._released: deque[AttemptId] = deque(maxlen=SAMPLE)
        self._asked = 0
        self._measured_s = float("-inf")

    def add_released(self, attempt_ids: Sequence[AttemptId]) -> None:
        """Attempts that went to the ready topic."""
        self._released.extend(attempt_ids[-SAMPLE:])

    def due(self, now_s: float) -> list[AttemptId]:
        """The attempts for `observe`; empty while it is too soon for another measurement."""
        if now_s - self._measured_s < MEASURE_S or len(self._released) < FEWEST:
            return []
        self._measured_s, self._asked = now_s, len(self._released)
        return list(self._released)

    def observe(self, durations_s: Collection[float]) -> None:
        """The durations of those attempts of the last `due()` that have ended.

        Attempts that last do not end soon, so too few ends speak against a bundle.
        """
        if len(durations_s) < max(FEWEST, self._asked // 2):
            self.bundle = 1
            return
        longest_s = max(durations_s)
        self.bundle = max(1, min(MAX_BUNDLE, int(BUNDLE_S / max(longest_s, 1e-6))))
