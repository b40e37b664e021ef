"""How many may start now, where so many a second may. Pure; time is an argument."""

from __future__ import annotations

# What is not used is saved up for so long, and no longer: else whoever was idle would start all of it at once.
SAVED_S = 0.1
# Starts are let go in steps of at least this, so that a high rate is not a statement for each.
STEP_S = 0.02


class Bucket:
    """Fills with tokens at a rate; each start takes one.

    It begins empty: who takes over from another must not give what that one has given already.

    Args:
        rate: tokens a second, above 0.
        now_s: seconds on any clock that does not step.
    """

    __slots__ = ("_rate", "_seen_s", "_tokens")

    def __init__(self, rate: float, now_s: float) -> None:
        self._rate = rate
        self._tokens = 0.0
        self._seen_s = now_s

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._rate

    def set_rate(self, rate: float, now_s: float) -> None:
        """Fills at another rate from now on; what is there stays, as far as it may be saved up."""
        self._fill(now_s)
        self._rate = rate
        self._tokens = min(self._tokens, self._most())

    def allowed(self, now_s: float) -> int:
        """How many may start now."""
        self._fill(now_s)
        # A hair below a whole one is rounding, and would be waited for for ever.
        return int(self._tokens + 1e-9)

    def take(self, starts: int) -> None:
        """So many of those that were allowed have started."""
        self._tokens -= starts

    def wait_s(self) -> float:
        """Seconds from when it was asked last until it is worth asking again."""
        wanted = min(self._most(), max(1.0, self._rate * STEP_S))
        return max(0.0, wanted - self._tokens) / self._rate

    def _most(self) -> float:
        return max(1.0, self._rate * SAVED_S)

    def _fill(self, now_s: float) -> None:
        passed_s, self._seen_s = max(0.0, now_s - self._seen_s), now_s
        self._tokens = min(self._most(), self._tokens + passed_s * self._rate)
