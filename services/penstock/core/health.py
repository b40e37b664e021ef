"""Whether a callback target is slow for good: what it is charged with, and the guards. Pure; time is an argument.

The rule (requirements C2 to C4): a slow call charges its target with one, up to a ceiling, and says when. A call that is
not slow takes one off, but only once the last slow one is longer ago than the calm time, so that intermittent slowness
cannot flap around the threshold. A target is abnormal from the slow call that makes its count reach the threshold on
until a count taken off leaves the threshold or less. How a call ended does not matter, only what it took: quick failures
are counted apart and never make a target abnormal.

The guards (C4a), each of which can be turned off: a share of the recent calls must be slow (a busy target that is nearly
always quick stays); an idle abnormal target decays; and when many targets become abnormal at once it is this process, or
its way out, that is suspected, not they (`Suspicion`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.target import TargetId


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """When a target is abnormal.

    Attributes:
        slow_s: a call that takes longer is slow, in seconds.
        threshold: the count that makes a target abnormal.
        ceiling: the count goes no further.
        calm_s: nothing is taken off a count for this long after a slow call, in seconds.
        by_timer: a call is charged when it has taken `slow_s`, and not only when it ends.
        share: least share of a target's recent calls that must be slow for it to become abnormal; 0 turns this off.
        recent_s: how far back the recent calls go, in seconds (the time in which their weight falls to a third).
        recent_calls: there are at least so many of them, however long ago they were.
        decay_s: an abnormal target without a call loses one count in so many seconds after the calm time; 0 turns this off.
        suspicion_share: when more than this share of all addresses becomes abnormal within `suspicion_s`, nothing is charged
            for that long; 0 turns this off.
        suspicion_least: and they must be at least so many.
        suspicion_s: see there, in seconds.
        suspicion_most_s: for how long on end; after this it is the targets, in seconds.
    """

    slow_s: float = 3.0
    threshold: int = 10
    ceiling: int = 20
    calm_s: float = 60.0
    by_timer: bool = True
    share: float = 0.05
    recent_s: float = 5.0
    recent_calls: int = 100
    decay_s: float = 6.0
    suspicion_share: float = 0.1
    suspicion_least: int = 10
    suspicion_s: float = 30.0
    suspicion_most_s: float = 300.0

    def problems(self) -> list[str]:
        """What makes no sense, one sentence each."""
        # Written so that NaN is refused too.
        found = [
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("slow_s", "recent_s", "suspicion_s", "suspicion_most_s")
            if not 0 < getattr(self, name) < math.inf
        ]
        found += [
            f"{name}={getattr(self, name)} must not be negative"
            for name in ("calm_s", "decay_s")
            if not 0 <= getattr(self, name) < math.inf
        ]
        found += [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("threshold", "recent_calls", "suspicion_least")
            if getattr(self, name) < 1
        ]
        found += [
            f"{name}={getattr(self, name)} must be from 0 to 1"
            for name in ("share", "suspicion_share")
            if not 0 <= getattr(self, name) <= 1
        ]
        if self.ceiling < self.threshold:
            found.append(f"ceiling={self.ceiling} must be at least threshold={self.threshold}")
        return found


@dataclass(frozen=True, slots=True)
class Vitals:
    """What is kept of a target's health, and survives a crash.

    Attributes:
        count: what it is charged with.
        slow_at_s: when the last slow call was, seconds on the caller's clock; None when there was none.
        called_at_s: when the last call was.
        abnormal: whether its callbacks are diverted.
    """

    count: int = 0
    slow_at_s: float | None = None
    called_at_s: float | None = None
    abnormal: bool = False


class HealthWindow:
    """The health of one target.

    Args:
        policy: when it is abnormal.
        vitals: what was kept; left out, the target is new.

    Attributes:
        failures: quick failures on end.
    """

    __slots__ = ("_called_at_s", "_calls", "_policy", "_slow_calls", "_vitals", "_weighed_s", "failures")

    def __init__(self, policy: HealthPolicy, vitals: Vitals | None = None) -> None:
        self._policy = policy
        self._vitals = vitals or Vitals()
        # Apart from the others: a call to a target that is charged with nothing changes this alone.
        self._called_at_s = self._vitals.called_at_s
        # Recent calls, and the slow ones among them; not kept: a new owner judges by what it sees.
        self._calls = 0.0
        self._slow_calls = 0.0
        self._weighed_s = -math.inf
        self.failures = 0

    def record(self, *, slow: bool, now_s: float, failed: bool = False) -> None:
        """A call took longer than `slow_s`, or ended before that.

        Args:
            slow: which of the two.
            now_s: seconds on a clock that may step, but is the same for all who kept these vitals.
            failed: a call that is not slow did not deliver.
        """
        self._weigh(slow=slow, now_s=now_s)
        if not slow:
            self.failures = self.failures + 1 if failed else 0
            if not self._vitals.count and not self._vitals.abnormal:
                self._called_at_s = now_s
                return
        vitals = self.vitals(now_s)
        count, slow_at_s, abnormal = vitals.count, vitals.slow_at_s, vitals.abnormal
        if slow:
            count, slow_at_s = min(count + 1, self._policy.ceiling), now_s
            abnormal = abnormal or (count >= self._policy.threshold and self._share_is_met())
        elif count and (slow_at_s is None or now_s - slow_at_s > self._policy.calm_s):
            count -= 1
            abnormal = abnormal and count > self._policy.threshold
        self._called_at_s = now_s
        self._vitals = Vitals(count, slow_at_s, now_s, abnormal)

    def vitals(self, now_s: float) -> Vitals:
        """What is to be kept: the count as it is now, decayed while nobody called."""
        policy, kept = self._policy, self._vitals
        # A clock that was set back must not keep a target abnormal for as long as it was ahead.
        slow_at_s = None if kept.slow_at_s is None else min(kept.slow_at_s, now_s)
        called_at_s = None if self._called_at_s is None else min(self._called_at_s, now_s)
        count, abnormal = kept.count, kept.abnormal
        if abnormal and policy.decay_s and called_at_s is not None:
            idle_s = now_s - max(called_at_s, slow_at_s or called_at_s) - policy.calm_s
            lost = max(0, min(count, math.floor(idle_s / policy.decay_s)))
            if lost:
                count -= lost
                abnormal = count > policy.threshold
        return Vitals(count, slow_at_s, called_at_s, abnormal)

    def verdict(self, now_s: float) -> bool:
        """Whether the target is abnormal."""
        return self._vitals.abnormal and self.vitals(now_s).abnormal

    def forgive(self) -> None:
        """Takes everything off: it was not the target."""
        self._vitals = Vitals(called_at_s=self._called_at_s)
        self._calls = self._slow_calls = 0.0

    @property
    def charged(self) -> bool:
        """Whether anything but nought is to be kept."""
        return self._vitals.count > 0

    @property
    def share(self) -> float:
        """The share of the recent calls that were slow."""
        return self._slow_calls / self._calls if self._calls else 0.0

    def _share_is_met(self) -> bool:
        return self.share >= self._policy.share

    def _weigh(self, *, slow: bool, now_s: float) -> None:
        """Counts a call among the recent ones, whose weight falls with time, but not below `recent_calls` in all."""
        policy = self._policy
        if self._calls:
            passed_s = max(0.0, now_s - self._weighed_s)
            floor = min(1.0, (policy.recent_calls - 1) / self._calls)
            weight = max(math.exp(-passed_s / policy.recent_s), floor)
            self._calls *= weight
            self._slow_calls *= weight
        self._weighed_s = now_s
        self._calls += 1.0
        self._slow_calls += slow


class Suspicion:
    """Whether it is this process, or its way out, that is slow, and not the targets.

    Args:
        policy: how many at once are too many.
    """

    def __init__(self, policy: HealthPolicy) -> None:
        self._policy = policy
        # (when, target) of those that have become abnormal of late.
        self._tripped: deque[tuple[float, TargetId]] = deque()
        self._since_s = -math.inf
        self._until_s = -math.inf

    def trip(self, target: TargetId, now_s: float, addresses: int) -> Sequence[TargetId]:
        """A target has become abnormal.

        Args:
            target: which.
            now_s: seconds on any clock that does not step.
            addresses: how many there are in all. Addresses are what is counted: one that hangs is no trouble of this process, in
                however many namespaces it is called.

        Returns:
            The targets that are to be forgiven, because with this one it has become too many at once.
        """
        policy = self._policy
        self._tripped.append((now_s, target))
        while self._tripped[0][0] < now_s - policy.suspicion_s:
            self._tripped.popleft()
        found = {name for _at_s, name in self._tripped}
        urls = {name.url for name in found}
        if (
            not policy.suspicion_share
            or len(urls) < policy.suspicion_least
            or len(urls) <= policy.suspicion_share * addresses
        ):
            return ()
        if now_s > self._until_s + policy.suspicion_s:
            self._since_s = now_s
        if now_s - self._since_s > policy.suspicion_most_s:
            # It goes on and on: then it is the targets. This also keeps the next suspicion away for a while.
            self._until_s = now_s
            return ()
        self._until_s = now_s + policy.suspicion_s
        self._tripped.clear()
        return sorted(found)

    def suspects(self, now_s: float) -> bool:
        """Whether nothing is to be charged to targets now."""
        return now_s < self._until_s

    def suspected(self, now_s: float) -> bool:
        """Whether it does, or did until a moment ago: if it goes on, it takes a moment until that is seen again."""
        return now_s < self._until_s + self._policy.suspicion_s
