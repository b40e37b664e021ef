"""Retries: exponential back-off with jitter, and how many attempts there may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with jitter.

    Attributes:
        base_s: the first delay, in seconds.
        factor: each further delay is this much longer.
        max_s: the longest delay, in seconds.
        jitter: share of a delay that is random, from 0 (none) to 1 (any delay from 0 to the full
            one).
    """

    base_s: float = 1.0
    factor: float = 2.0
    max_s: float = 300.0
    jitter: float = 0.5

    def problems(self) -> list[str]:
        """One sentence for each value that makes no sense."""
        found = []
        # In this form the comparisons also refuse NaN.
        if not (self.base_s >= 0 and self.factor >= 1):
            found.append(f"base_s={self.base_s} must not be negative and factor={self.factor} not below 1")
        if not self.max_s >= self.base_s:
            found.append(f"max_s={self.max_s} must not be below base_s={self.base_s}")
        if not 0 <= self.jitter <= 1:
            found.append(f"jitter={self.jitter} must be from 0 to 1")
        return found

    def delay_s(self, failures: int, chance: float) -> float:
        """Seconds to wait after `failures` failed attempts (at least 1).

        Args:
            failures: failed attempts so far.
            chance: a random number from 0 (inclusive) to 1, the caller's.
        """
        # The exponent is bounded: a task that is retried for weeks would overflow a float.
        full = min(self.max_s, self.base_s * self.factor ** min(max(failures - 1, 0), 64))
        return full * (1 - self.jitter * chance)


@dataclass(frozen=True, slots=True)
class RetryPolicy(Backoff):
    """How often a stage is tried, and after which delays.

    Attributes:
        max_attempts: attempts in all, the first included; 1 never retries.
    """

    max_attempts: int = 3

    def problems(self) -> list[str]:
        """One sentence for each value that makes no sense."""
        found = []
        if self.max_attempts < 1:
            found.append(f"max_attempts={self.max_attempts} must be at least 1")
        # Without `super`, which does not find the class that `slots` makes.
        return found + Backoff.problems(self)

    def exhausted(self, failures: int) -> bool:
        """Whether `failures` failed attempts are all that there may be."""
        return failures >= self.max_attempts


@dataclass(frozen=True, slots=True)
class StageRetries:
    """The retries of a stage, where it differs from its type.

    Attributes:
        max_attempts: attempts in all, the first included; None is the type's number.
        backoff: delays after failures; None are the type's.
    """

    max_attempts: int | None = None
    backoff: Backoff | None = None

    def delay_ms(self, failures: int, chance: float) -> int | None:
        """Milliseconds to wait after `failures` failed attempts; None is as the type says.

        Args:
            failures: failed attempts so far, at least 1.
            chance: a random number from 0 (inclusive) to 1, the caller's.
        """
        return None if self.backoff is None else round(self.backoff.delay_s(failures, chance) * 1000)
