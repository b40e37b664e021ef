"""Health of callback targets: a circuit breaker that counts slow calls. Pure; time is an argument.

The rule (requirements C2 to C4)
- A slow call adds one to the target's count, up to a ceiling. A quick call subtracts one, but only
  after the calm time since the last slow call, so that intermittent slowness does not flap around
  the threshold.
- A target becomes abnormal when a slow call raises its count to the threshold. It becomes normal
  when a subtraction leaves the threshold or less.
- Only the duration of a call matters. Quick failures are counted separately and never make a target
  abnormal.

The guards (C4a), each of which can be turned off
- A minimum share of the recent calls must be slow, so that a busy and mostly quick target stays
  normal.
- The count of an idle abnormal target decays.
- When many targets become abnormal at once, the cause is this process or its network: see
  `SelfCheck`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.target import TargetId


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """When a target is abnormal.

    Attributes:
        slow_s: a call that takes longer is slow, in seconds.
        threshold: the count that makes a target abnormal.
        ceiling: the highest count.
        calm_s: seconds after a slow call in which quick calls subtract nothing.
        share: least share of a target's recent calls that must be slow to make it abnormal; 0 turns
            this off.
        recent_s: seconds in which the weight of a recent call falls to a third.
        recent_calls: least number of calls that count as recent, however old they are.
        decay_s: after the calm time, an abnormal target without calls loses one of its count in so
            many seconds; 0 turns this off.
        self_check_share: when more than this share of all addresses becomes abnormal within
            `self_check_s`, self-check mode begins; 0 turns this off.
        self_check_least: least number of addresses for that.
        self_check_s: length of the window above, and of self-check mode, in seconds.
        self_check_most_s: longest continuous self-check mode, in seconds; after it the targets
            count as the cause.
    """

    slow_s: float = 3.0
    threshold: int = 10
    ceiling: int = 20
    calm_s: float = 60.0
    share: float = 0.05
    recent_s: float = 5.0
    recent_calls: int = 100
    decay_s: float = 6.0
    self_check_share: float = 0.1
    self_check_least: int = 10
    self_check_s: float = 30.0
    self_check_most_s: float = 300.0


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """The part of a target's health that is stored and survives a crash.

    Attributes:
        count: slow calls, less what was subtracted.
        slow_at_s: when the last slow call was, seconds on the caller's clock; None without one.
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
        snapshot: as it was stored; None for a new target.

    Attributes:
        failures: consecutive quick failures.
    """

    __slots__ = ("_called_at_s", "_calls", "_policy", "_slow_calls", "_snapshot", "_weighed_at_s", "failures")

    def __init__(self, policy: HealthPolicy, snapshot: HealthSnapshot | None = None) -> None:
        self._policy = policy
        self._snapshot = snapshot or HealthSnapshot()
        # Apart from the snapshot: a quick call to a target with count 0 changes only this.
        self._called_at_s = self._snapshot.called_at_s
        # Weights of the recent calls, and of the slow ones among them. They are not stored: a new
        # owner starts over.
        self._calls = 0.0
        self._slow_calls = 0.0
        self._weighed_at_s = -math.inf
        self.failures = 0

    def record(self, *, slow: bool, now_s: float, failed: bool = False) -> None:
        """Records one call.

        Args:
            slow: whether it took longer than `slow_s`.
            now_s: wall-clock seconds, shared with the processes that stored the snapshot; may step.
            failed: whether a quick call failed.
        """
        self._weigh(slow=slow, now_s=now_s)
        if not slow:
            self.failures = self.failures + 1 if failed else 0
            if not self._snapshot.count and not self._snapshot.abnormal:
                self._called_at_s = now_s
                return
        snapshot = self.snapshot(now_s)
        count, slow_at_s, abnormal = snapshot.count, snapshot.slow_at_s, snapshot.abnormal
        if slow:
            count, slow_at_s = min(count + 1, self._policy.ceiling), now_s
            abnormal = abnormal or (count >= self._policy.threshold and self._share_is_met())
        elif count and (slow_at_s is None or now_s - slow_at_s > self._policy.calm_s):
            count -= 1
            abnormal = abnormal and count > self._policy.threshold
        self._called_at_s = now_s
        self._snapshot = HealthSnapshot(count, slow_at_s, now_s, abnormal)

    def snapshot(self, now_s: float) -> HealthSnapshot:
        """The health to store, with the decay up to now."""
        policy, stored = self._policy, self._snapshot
        # After the clock was set back, times in the future would keep a target abnormal.
        slow_at_s = None if stored.slow_at_s is None else min(stored.slow_at_s, now_s)
        called_at_s = None if self._called_at_s is None else min(self._called_at_s, now_s)
        count, abnormal = stored.count, stored.abnormal
        if abnormal and policy.decay_s and called_at_s is not None:
            idle_s = now_s - max(called_at_s, slow_at_s or called_at_s) - policy.calm_s
            lost = max(0, min(count, math.floor(idle_s / policy.decay_s)))
            if lost:
                count -= lost
                abnormal = count > policy.threshold
        return HealthSnapshot(count, slow_at_s, called_at_s, abnormal)

    def is_abnormal(self, now_s: float) -> bool:
        """Whether the circuit breaker is open."""
        return self._snapshot.abnormal and self.snapshot(now_s).abnormal

    def freeze(self, now_s: float) -> None:
        """Lets no time pass for the decay: nothing is known about the target meanwhile."""
        if self._snapshot.abnormal:
            self._snapshot = self.snapshot(now_s)
            self._called_at_s = now_s

    def reset(self) -> None:
        """Clears the count: the slow calls were not the target's fault."""
        self._snapshot = HealthSnapshot(called_at_s=self._called_at_s)
        self._calls = self._slow_calls = 0.0

    @property
    def has_count(self) -> bool:
        """Whether the count is above 0, so that it has to be stored."""
        return self._snapshot.count > 0

    @property
    def share(self) -> float:
        """The share of the recent calls that were slow."""
        return self._slow_calls / self._calls if self._calls else 0.0

    def _share_is_met(self) -> bool:
        return self.share >= self._policy.share

    def _weigh(self, *, slow: bool, now_s: float) -> None:
        """Adds a call to the recent ones.

        Their weight falls with time, but the total stays at `recent_calls` or more.
        """
        policy = self._policy
        if self._calls:
            passed_s = max(0.0, now_s - self._weighed_at_s)
            floor = min(1.0, (policy.recent_calls - 1) / self._calls)
            weight = max(math.exp(-passed_s / policy.recent_s), floor)
            self._calls *= weight
            self._slow_calls *= weight
        self._weighed_at_s = now_s
        self._calls += 1.0
        self._slow_calls += slow


class SelfCheck:
    """Decides whether this process or its network is slow, rather than the targets.

    In self-check mode, slow calls do not count against targets.

    Args:
        policy: how many abnormal addresses at once begin self-check mode.
    """

    def __init__(self, policy: HealthPolicy) -> None:
        self._policy = policy
        # (when, target, server) of the targets that became abnormal within the window.
        self._tripped: deque[tuple[float, TargetId, str]] = deque()
        self._since_s = -math.inf
        self._until_s = -math.inf

    def trip(
        self, target_id: TargetId, server: str, now_s: float, hosts: int, within: Mapping[str, int]
    ) -> Sequence[TargetId]:
        """Records that a target has become abnormal.

        Servers are counted, not targets: a server that hangs is one failure, by however many URLs
        and names it is called. Any namespace is left out in turn, so that none can begin self-check
        mode by what it calls: the others must show the failure, too, if there are any.

        Args:
            target_id: the target.
            server: what it shares with the targets that hang together with it.
            now_s: seconds on a monotonic clock.
            hosts: how many hosts there are in all.
            within: how many of them each namespace calls.

        Returns:
            The targets to reset, if this one begins self-check mode.
        """
        policy = self._policy
        self._tripped.append((now_s, target_id, server))
        while self._tripped[0][0] < now_s - policy.self_check_s:
            self._tripped.popleft()
        tripped = {tripped_id for _at_s, tripped_id, _server in self._tripped}
        if (
            not policy.self_check_share
            or len({server for _at_s, _id, server in self._tripped}) < policy.self_check_least
            or not self._are_many(hosts)
            or not all(
                self._are_many(hosts - within.get(namespace, 0), namespace)
                for namespace in {target.namespace for target in tripped}
                if within.keys() - {namespace}
            )
        ):
            return ()
        if now_s > self._until_s + policy.self_check_s:
            self._since_s = now_s
        if now_s - self._since_s > policy.self_check_most_s:
            # After this long the targets are the cause. `_until_s` also delays the next self-check
            # mode.
            self._until_s = now_s
            return ()
        self._until_s = now_s + policy.self_check_s
        self._tripped.clear()
        return sorted(tripped)

    def _are_many(self, hosts: int, without: str | None = None) -> bool:
        """Whether more than the share of the hosts has tripped, without those of a namespace."""
        servers = {server for _at_s, target, server in self._tripped if target.namespace != without}
        return len(servers) > self._policy.self_check_share * max(hosts, 0)

    def is_active(self, now_s: float) -> bool:
        """Whether self-check mode is on, so that slow calls do not count."""
        return now_s < self._until_s

    def was_active(self, now_s: float) -> bool:
        """Whether self-check mode is on or ended within the last window.

        A lasting failure takes a window to show again.
        """
        return now_s < self._until_s + self._policy.self_check_s
