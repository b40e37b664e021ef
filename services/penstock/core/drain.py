"""How many held callbacks of one target may be drained now. Pure; time is an argument.

A target that hangs is probed: one callback at a time, with a wait that doubles. A target that
answers receives its backlog at a bounded rate, so that the backlog does not overload it.

Drained callbacks pass through PostgreSQL and Kafka and arrive in bursts. While some of them may be
on their way (`is_draining`), the calls are bound to the same rate (see `core.call_pacer`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.core.token_bucket import TokenBucket

# A drained callback reaches its path within this many seconds; its wait for the call is extra.
TRANSIT_S = 2.0


@dataclass(frozen=True, slots=True)
class DrainPolicy:
    """How fast held callbacks are drained.

    Attributes:
        rate: callbacks per second to a target that answers; it bounds the draining and the calls.
        probe_s: seconds between the first probes of a target that hangs; each wait doubles.
        probe_most_s: the longest such wait, in seconds.
    """

    rate: float = 20.0
    probe_s: float = 5.0
    probe_most_s: float = 60.0


class Drain:
    """The drain of one target.

    Args:
        policy: how fast.
    """

    __slots__ = ("_bucket", "_draining_until_s", "_policy", "_probe_at_s", "_wait_s")

    def __init__(self, policy: DrainPolicy) -> None:
        self._policy = policy
        self._wait_s = policy.probe_s
        self._probe_at_s = -math.inf
        self._bucket: TokenBucket | None = None
        self._draining_until_s = -math.inf

    def allow(self, now_s: float, *, unresponsive: bool, waiting: int = 0) -> int:
        """How many callbacks may be drained now; they count as drained.

        Args:
            now_s: seconds on a monotonic clock.
            unresponsive: whether the target's latest call was slow.
            waiting: callbacks of the target that already wait on the diverted path. Together with
                the drained ones they may amount to one second of calls, because surplus callbacks
                are better held in PostgreSQL.
        """
        rate = self._policy.rate
        most = max(1.0, rate)
        if self._bucket is None:
            # Room for a fraction of a token beside one second's calls: without it, a caller with
            # few calls a second would lose the fraction each time.
            self._bucket = TokenBucket(rate, now_s, capacity_s=(most + 1) / rate, full=True)
        available = self._bucket.available(now_s)
        if unresponsive:
            self._bucket.take(available)
            if now_s < self._probe_at_s:
                return 0
            self._probe_at_s = now_s + self._wait_s
            self._wait_s = min(2 * self._wait_s, self._policy.probe_most_s)
            return 1
        self._wait_s, self._probe_at_s = self._policy.probe_s, -math.inf
        allowed = max(0, min(available, math.ceil(most) - waiting))
        self._bucket.take(allowed)
        if allowed or waiting:
            # Up to one second's callbacks may still be on their way and are called before these.
            calls = allowed + waiting + most
            self._draining_until_s = now_s + 2 * TRANSIT_S + calls / rate
        return allowed

    def is_draining(self, now_s: float) -> bool:
        """Whether some drained callbacks may not have been called yet."""
        return now_s < self._draining_until_s
