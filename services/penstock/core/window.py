"""The window: how many records of a type may wait on its ready topic. Pure: no I/O, no clock.

Records on Kafka keep their order, so a late urgent task waits behind all of them. The window
therefore holds about one second of the workers' work; a smaller one would leave workers without
records.

The consumer group's lag does not show the completion rate, because a worker that starts takes
thousands of records at once. The window follows a sample of released attempts instead, and measures
the rate at which they end.

The measured rate is limited by the window itself. When workers leave almost nothing of the window,
they are starved: the window grows by a factor, and shrinks again when they leave enough.

When in doubt, the window is small: it is the floor at rest, at the start, and while no attempt
ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.core.attempt import AttemptId

# Largest sample of a type. The rate's error is about 1/√n, where n sampled attempts end within the
# horizon.
MAX_SAMPLE = 256
# The rate covers this many seconds. After a pause of this length the sample starts anew.
HORIZON_S = 2.0
# Workers are starved when they leave at most this share of the window.
STARVED_SHARE = 0.25
# The largest factor for starved workers, and the seconds of sufficient lag after which the factor
# halves.
MAX_FACTOR = 4
SUFFICIENT_S = 1.0


class WindowReason(StrEnum):
    """The bound that sets the window's size. The values are labels of a metric."""

    FLOOR = "floor"
    DRAIN = "drain"
    STARVED = "hunger"
    CEILING = "ceiling"
    # One second of starts, when the type has a rate and that is less than the window.
    RATE = "rate"


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """Bounds of a window.

    Attributes:
        floor: fewest records, at least 1; a lower ceiling takes precedence.
        ceiling: most records.
        work_s: seconds of the workers' work that the window holds between the two.
    """

    floor: int
    ceiling: int
    work_s: float = 1.0


class Window:
    """The window of one type.

    Args:
        policy: its bounds.
    """

    def __init__(self, policy: WindowPolicy) -> None:
        self._policy = policy
        # Sampled attempts in flight, each with the number of attempts that it represents.
        self._sample: dict[AttemptId, int] = {}
        self._stride = 1
        self._since_stride = 0
        self._ended = 0
        # (seconds, attempts that had ended by then), oldest first.
        self._measurements: deque[tuple[float, int]] = deque()
        self._factor = 1
        self._factor_changed_s = float("-inf")

    @property
    def completions_per_s(self) -> float:
        """The completion rate: attempts that end per second; 0 while it is unknown."""
        if len(self._measurements) < 2:
            return 0.0
        (begin_s, before), (end_s, after) = self._measurements[0], self._measurements[-1]
        return (after - before) / (end_s - begin_s)

    @property
    def size(self) -> int:
        """Most records that may wait."""
        return self._size_and_reason()[0]

    @property
    def reason(self) -> WindowReason:
        """The bound that sets the size."""
        return self._size_and_reason()[1]

    def _size_and_reason(self) -> tuple[int, WindowReason]:
        policy = self._policy
        by_rate = int(self.completions_per_s * policy.work_s)
        wanted = max(by_rate, policy.floor) * self._factor
        if wanted >= policy.ceiling:
            return policy.ceiling, WindowReason.CEILING
        if self._factor > 1:
            return wanted, WindowReason.STARVED
        return wanted, WindowReason.DRAIN if by_rate > policy.floor else WindowReason.FLOOR

    def observe_lag(self, lag: int, now_s: float) -> None:
        """Adapts the factor to the records that the workers left.

        Args:
            lag: records left of a window that was at least half full at the observation before.
            now_s: seconds on any clock that does not step.
        """
        if lag <= self.size * STARVED_SHARE:
            self._factor = min(MAX_FACTOR, self._factor * 2)
            self._factor_changed_s = now_s
        elif self._factor > 1 and now_s - self._factor_changed_s >= SUFFICIENT_S:
            self._factor //= 2
            self._factor_changed_s = now_s

    def add_released(self, attempt_ids: Sequence[AttemptId], now_s: float) -> None:
        """Adds some of the attempts that went to the ready topic to the sample."""
        if not self._measurements or now_s - self._measurements[-1][0] > HORIZON_S:
            # The moments at which the sampled attempts ended during the pause are unknown.
            self._sample.clear()
            self._stride, self._since_stride, self._ended = 1, 0, 0
            self._measurements = deque([(now_s, 0)])
        # Each sampled attempt represents the stride that leads to it.
        first = (-self._since_stride - 1) % self._stride
        self._sample.update(dict.fromkeys(attempt_ids[first :: self._stride], self._stride))
        self._since_stride += len(attempt_ids)
        while len(self._sample) > MAX_SAMPLE:
            self._stride *= 2
            every_other = list(self._sample.items())[1::2]
            self._sample = {attempt_id: 2 * weight for attempt_id, weight in every_other}

    def discard(self, attempt_ids: Collection[AttemptId]) -> None:
        """Removes withdrawn attempts: workers did not end them."""
        for attempt_id in attempt_ids:
            self._sample.pop(attempt_id, None)

    def sample(self) -> list[AttemptId]:
        """The attempts for `observe_sample`."""
        return list(self._sample)

    def observe_sample(self, in_flight: Collection[AttemptId], now_s: float) -> None:
        """Counts the sampled attempts that have ended.

        Args:
            in_flight: the attempts of the last `sample()` that have not ended.
            now_s: when that was read.
        """
        if not self._measurements or now_s <= self._measurements[-1][0]:
            return
        for attempt_id in [attempt_id for attempt_id in self._sample if attempt_id not in in_flight]:
            self._ended += self._sample.pop(attempt_id)
        self._measurements.append((now_s, self._ended))
        # One measurement before the horizon stays: the rate is measured from there.
        while len(self._measurements) > 2 and now_s - self._measurements[1][0] >= HORIZON_S:
            self._measurements.popleft()
        if len(self._sample) < MAX_SAMPLE // 4:
            self._stride = 1
