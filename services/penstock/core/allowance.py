"""How many requests somebody may make: a bucket of tokens each. Pure; time is an argument.

Unlike `core.rate`, which shares out starts evenly, this lets bursts through: clients make their requests in bursts.
"""

from __future__ import annotations

# Requests of so many seconds may come at once after a rest.
SAVED_S = 2.0


class Allowance:
    """Fills at a rate; each request takes one. It begins full.

    Args:
        rate: requests a second, above 0.
        now_s: seconds on any clock that does not step.
    """

    __slots__ = ("_rate", "_seen_s", "_tokens")

    def __init__(self, rate: float, now_s: float) -> None:
        self._rate = rate
        self._seen_s = now_s
        self._tokens = self._most()

    def take(self, now_s: float) -> float:
        """Takes one: 0 when there was one, else seconds until there is, and nothing was taken."""
        passed_s, self._seen_s = max(0.0, now_s - self._seen_s), now_s
        self._tokens = min(self._most(), self._tokens + passed_s * self._rate)
        # A hair below a whole one is rounding, and would be waited for for ever.
        if self._tokens >= 1 - 1e-9:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._rate

    def _most(self) -> float:
        return max(1.0, self._rate * SAVED_S)
