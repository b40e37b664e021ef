"""How many of the callbacks that are held for a target may go. Pure; time is an argument.

A target that hangs is probed, with one callback at a time and less and less often; one that answers is given what waits
for it at a bounded rate, so that it is not felled by its own backlog.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrainPolicy:
    """How fast.

    Attributes:
        rate: callbacks a second, to a target that answers.
        probe_s: seconds between the first probes of one that hangs; each wait is twice the one before.
        probe_most_s: but no longer than this.
    """

    rate: float = 20.0
    probe_s: float = 5.0
    probe_most_s: float = 60.0

    def problems(self) -> list[str]:
        """What makes no sense, one sentence each."""
        found = [
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("rate", "probe_s")
            # Written so that NaN is refused too.
            if not 0 < getattr(self, name) < math.inf
        ]
        if not self.probe_s <= self.probe_most_s < math.inf:
            found.append(f"probe_most_s={self.probe_most_s} must be at least probe_s={self.probe_s}")
        return found


class Drain:
    """What one target may be given.

    Args:
        policy: how fast.
    """

    __slots__ = ("_policy", "_probe_at_s", "_room", "_seen_s", "_wait_s")

    def __init__(self, policy: DrainPolicy) -> None:
        self._policy = policy
        self._wait_s = policy.probe_s
        self._probe_at_s = -math.inf
        self._room = 0.0
        self._seen_s = -math.inf

    def allow(self, now_s: float, *, hanging: bool) -> int:
        """How many may go now; they count as gone.

        Args:
            now_s: seconds on any clock that does not step.
            hanging: the target's latest call was slow.
        """
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        if hanging:
            self._room = 0.0
            if now_s < self._probe_at_s:
                return 0
            self._probe_at_s = now_s + self._wait_s
            self._wait_s = min(2 * self._wait_s, self._policy.probe_most_s)
            return 1
        self._wait_s, self._probe_at_s = self._policy.probe_s, -math.inf
        # What was not taken is not saved up for more than a second; the part of one that is left is never lost.
        self._room += min(passed_s * self._policy.rate, max(1.0, self._policy.rate))
        allowed = int(self._room)
        self._room -= allowed
        return allowed
