"""When to try again: exponential back-off with jitter, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a stage is tried.

    Attributes:
        max_attempts: tries in all, the first included; 1 never retries.
        base_s: delay before the second try, in seconds.
        factor: each further delay is this much longer.
        max_s: no delay is longer, in seconds.
        jitter: share of the delay that is random, from 0 (none) to 1 (anything from nothing to the whole).
    """

    max_attempts: int = 3
    base_s: float = 1.0
    factor: float = 2.0
    max_s: float = 300.0
    jitter: float = 0.5

    def problems(self) -> list[str]:
        """What makes no sense, one sentence each."""
        found = []
        if self.max_attempts < 1:
            found.append(f"max_attempts={self.max_attempts} must be at least 1")
        if self.base_s < 0 or self.factor < 1:
            found.append(f"base_s={self.base_s} must not be negative and factor={self.factor} not below 1")
        if self.max_s < self.base_s:
            found.append(f"max_s={self.max_s} must not be below base_s={self.base_s}")
        if not 0 <= self.jitter <= 1:
            found.append(f"jitter={self.jitter} must be from 0 to 1")
        return found

    def exhausted(self, tries: int) -> bool:
        """Whether `tries` tries, all in vain, are all there may be."""
        return tries >= self.max_attempts

    def delay_s(self, tries: int, chance: float) -> float:
        """Seconds to wait after `tries` vain tries (at least 1).

        Args:
            tries: vain tries so far.
            chance: a random number from 0 (inclusive) to 1, the caller's.
        """
        # The exponent is bounded so that a task retried for weeks does not overflow a float.
        full = min(self.max_s, self.base_s * self.factor ** min(max(tries - 1, 0), 64))
        return full * (1 - self.jitter * chance)
