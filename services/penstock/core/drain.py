"""How many of the callbacks that are held for a target may go. Pure; time is an argument.

A target that hangs is probed, with one callback at a time and less and less often; one that answers is given what waits
for it at a bounded rate, so that it is not felled by its own backlog.

What has been let go takes its way through database and topic, and arrives in bursts. So the calls are bound to the same rate
as what is let go, as long as some of that may be on its way (`under_way`; `core.rates` keeps the clock).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# What is let go is with its path within this time, in seconds, whatever it takes to be called after that.
ON_ITS_WAY_S = 2.0


@dataclass(frozen=True, slots=True)
class DrainPolicy:
    """How fast.

    Attributes:
        rate: callbacks a second, to a target that answers; both what is let go and what is called of it.
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

    __slots__ = ("_called_s", "_policy", "_probe_at_s", "_room", "_seen_s", "_wait_s")

    def __init__(self, policy: DrainPolicy) -> None:
        self._policy = policy
        self._wait_s = policy.probe_s
        self._probe_at_s = -math.inf
        self._room = 0.0
        self._seen_s = -math.inf
        self._called_s = -math.inf

    def allow(self, now_s: float, *, hanging: bool, waiting: int = 0) -> int:
        """How many may go now; they count as gone.

        Args:
            now_s: seconds on any clock that does not step.
            hanging: the target's latest call was slow.
            waiting: how many wait already for its turn on their path; with what is let go now no more than a second's worth
                do. What one path cannot take is better held.
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
        most = max(1.0, self._policy.rate)
        self._room += min(passed_s * self._policy.rate, most)
        allowed = max(0, min(int(self._room), math.ceil(most) - waiting))
        self._room = min(self._room - allowed, most)
        if allowed or waiting:
            # What was let go while the first of it was on its way is behind that, and comes before this.
            calls = allowed + waiting + most
            self._called_s = now_s + 2 * ON_ITS_WAY_S + calls / self._policy.rate
        return allowed

    def under_way(self, now_s: float) -> bool:
        """Whether some of what was let go of a drain may still have to be called."""
        return now_s < self._called_s
