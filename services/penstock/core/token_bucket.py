"""Token bucket: a rate limit with bounded bursts. Pure; time is an argument.

A small capacity that starts empty spreads starts evenly, and a new owner of a type repeats none of
the starts of the owner before. A larger capacity that starts full lets clients send their requests
in bursts.
"""

from __future__ import annotations

# Rounding can leave the tokens this far below a whole number; without the tolerance, a caller would
# wait for it forever. A clock that shows a month has 1e-9 s, which are 1e-6 tokens at 1,000/s.
_ROUNDING = 1e-6


class TokenBucket:
    """Fills at a steady rate up to its capacity, which is never less than one token.

    Args:
        rate: tokens a second, above 0.
        now_s: seconds on any clock that does not step.
        capacity_s: the capacity, in seconds at the rate.
        full: whether the bucket starts full; otherwise it starts empty.
    """

    __slots__ = ("_capacity", "_capacity_s", "_filled_at_s", "_rate", "_tokens")

    def __init__(self, rate: float, now_s: float, *, capacity_s: float, full: bool) -> None:
        self._rate = rate
        self._capacity_s = capacity_s
        self._filled_at_s = now_s
        self._capacity = self._capacity_at(rate)
        self._tokens = self._capacity if full else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._rate

    def set_rate(self, rate: float, now_s: float) -> None:
        """Changes the rate; the tokens in the bucket stay, up to the new capacity."""
        self._fill(now_s)
        self._rate = rate
        self._capacity = self._capacity_at(rate)
        self._tokens = min(self._tokens, self._capacity)

    def available(self, now_s: float) -> int:
        """Fills the bucket and returns the number of whole tokens in it."""
        self._fill(now_s)
        return int(self._tokens + _ROUNDING)

    def take(self, tokens: int = 1) -> None:
        """Removes tokens; the caller has checked that they are `available`."""
        self._tokens -= tokens

    def wait_s(self, batch_s: float = 0.0) -> float:
        """Seconds from the last call of `available` until the next batch of tokens is there.

        Args:
            batch_s: size of the batch in seconds at the rate; it has at least one token, and at
                most the capacity.
        """
        batch = min(self._capacity, max(1.0, self._rate * batch_s))
        return max(0.0, batch - self._tokens) / self._rate

    def _capacity_at(self, rate: float) -> float:
        return max(1.0, rate * self._capacity_s)

    def _fill(self, now_s: float) -> None:
        elapsed_s, self._filled_at_s = now_s - self._filled_at_s, now_s
        if elapsed_s > 0:
            tokens = self._tokens + elapsed_s * self._rate
            self._tokens = min(tokens, self._capacity)
