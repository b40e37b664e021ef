"""When to give which sign of life: the worker's side of heartbeats. Two queues; time is an argument.

The main deque holds what is still to be beaten in this cycle, the backup queue what has been. Step A, at a steady
rate, takes from the main deque what is due; step B, at the end of each cycle, moves the backup queue behind it.
Any report about an attempt (its claim, a beat, progress) counts as its beat, so what has just been heard of is
passed over until it has been silent for a cycle.

Guarantees, while `step` is called at least once a step:
- Nothing is silent for longer than two cycles and a step, which fits into the timeout (`BeatPolicy.validate`).
- No step sends more than the rate allows. The rate is what the policy says, or what the number of attempts in hand
  needs, up to the platform's limit; beyond that limit there is no room (`room`), rather than attempts that are missed.
- After a standstill the overdue are sent first the most overdue, at the highest rate allowed and no faster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Answer(Enum):
    """What came of a beat.

    The error classes: `GONE` (unknown to the platform, or cancelled), `THROTTLED` (sent too fast) and `UNKNOWN`
    (anything else: no answer, an answer that makes no sense).
    """

    HEARD = "heard"
    GONE = "gone"
    THROTTLED = "throttled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BeatPolicy:
    """How to beat.

    Attributes:
        timeout_s: seconds of silence after which the platform takes an attempt for lost.
        cycle_s: seconds within which each attempt is beaten once.
        step_s: seconds between two steps.
        rate_per_s: beats a second at ease.
        limit_per_s: beats a second that the platform takes at most.
        retries: how often an unknown error is answered within a cycle before the attempt waits for the next.
    """

    timeout_s: float = 300.0
    cycle_s: float = 120.0
    step_s: float = 1.0
    rate_per_s: float = 1.0
    limit_per_s: float = 1_000.0
    retries: int = 3

    def validate(self) -> list[str]:
        """What is wrong with it, one sentence each."""
        problems = [
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("timeout_s", "cycle_s", "step_s", "rate_per_s", "limit_per_s")
            if not getattr(self, name) > 0
        ]
        if problems:
            return problems
        if 2 * self.cycle_s + 2 * self.step_s > self.timeout_s:
            problems.append(
                f"cycle_s={self.cycle_s:g} must fit twice, with two steps of {self.step_s:g} s, in "
                f"timeout_s={self.timeout_s:g}: one beat may be lost without the attempt being taken for lost"
            )
        if self.limit_per_s < self.rate_per_s:
            problems.append(
                f"limit_per_s={self.limit_per_s:g} must not be below rate_per_s={self.rate_per_s:g}"
            )
        if self.retries < 0:
            problems.append(f"retries={self.retries} must be at least 0")
        return problems

    @classmethod
    def for_timeout(cls, timeout_s: float) -> BeatPolicy:
        """The usual proportions (120 s in 300 s, a step a second) for another timeout."""
        step_s = min(1.0, timeout_s / 30)
        return cls(timeout_s=timeout_s, cycle_s=timeout_s * 0.4, step_s=step_s)

    @property
    def capacity(self) -> int:
        """How many attempts can be kept alive at the highest rate."""
        return math.floor(self.limit_per_s * self.cycle_s)


@dataclass(slots=True)
class _Pulse:
    """One attempt: when it was last heard of, when the beat under way was sent, and its errors in this cycle."""

    heard_s: float
    queued: bool = True
    sent_s: float | None = None
    retries: int = 0


class BeatQueue(Generic[K]):
    """The attempts of one worker that share a timeout.

    Args:
        policy: see `BeatPolicy`.
        now_s: the time, on the caller's clock, which only grows.
    """

    def __init__(self, policy: BeatPolicy, now_s: float) -> None:
        self.policy = policy
        self._pulses: dict[K, _Pulse] = {}
        # By when it was last heard of, so that the most overdue is first; stale entries are passed over.
        self._main: list[tuple[float, int, K]] = []
        self._backup: list[K] = []
        self._order = 0
        self._front = -1
        self._cycle_ends_s = now_s + policy.cycle_s
        self._allowance = 0.0
        self._stepped_s = now_s

    def __len__(self) -> int:
        return len(self._pulses)

    def __contains__(self, key: K) -> bool:
        return key in self._pulses

    @property
    def room(self) -> int:
        """How many more attempts can be kept alive."""
        return self.policy.capacity - len(self._pulses)

    @property
    def rate_per_s(self) -> float:
        """Beats a second that the attempts in hand need, at least what the policy says, at most its limit."""
        policy = self.policy
        return min(policy.limit_per_s, max(policy.rate_per_s, len(self._pulses) / policy.cycle_s))
