"""Paces calls per second to one target over both paths. Pure; time is an argument.

A path can have a lower rate of its own (`path_rate`). That rate limits the path's own calls and
leaves the others alone.

Both paths share one token bucket per target, or the target would get twice its rate. A bucket has
room for one token, so calls are evenly spaced. The paths
alternate: the path that made the last call yields the next one to a path that waits. It yields for
one interval at most, because the other path may have no free slot. So neither path starves the
other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.target import TargetId
from penstock.core.token_bucket import TokenBucket

# A schedule outlives its last call by this many seconds, so that the alternation of the paths is
# remembered.
_REMEMBERED_S = 60.0


@dataclass(slots=True)
class _Schedule:
    # By the target's rate, and by the rate of each path that has one.
    shared: TokenBucket | None = None
    by_path: dict[object, TokenBucket] = field(default_factory=dict)
    # When the last call was admitted.
    called_s: float = 0.0
    # The path of the last call, the paths that were refused since their own last call, and whether
    # the last path has yielded once.
    last_path: object = None
    refused: set[object] = field(default_factory=set)
    yielded: bool = False

    @property
    def end_s(self) -> float:
        """When every path may call."""
        buckets = [*self.by_path.values(), *([self.shared] if self.shared else [])]
        return self.called_s + max((1 / bucket.rate for bucket in buckets), default=0.0)


def _filled(bucket: TokenBucket | None, rate: float, now_s: float) -> TokenBucket:
    if bucket is None:
        return TokenBucket(rate, now_s, capacity_s=0.0, full=True)
    if bucket.rate != rate:
        bucket.set_rate(rate, now_s)
    return bucket


class CallPacer:
    """The schedules of all targets that have a rate.

    Args:
        rate_of: the rate of a target in calls per second; None when it has none.
    """

    def __init__(self, rate_of: Callable[[TargetId], float | None] = lambda _target_id: None) -> None:
        self._rate_of = rate_of
        self._schedules: dict[TargetId, _Schedule] = {}
        # Heap of (expiry, target), one entry per schedule. A schedule that was used meanwhile is
        # pushed again.
        self._expiries: list[tuple[float, TargetId]] = []

    def __len__(self) -> int:
        return len(self._schedules)

    def acquire(
        self, target_id: TargetId, path: object, now_s: float, path_rate: float | None = None
    ) -> float | None:
        """Admits a call and returns None, or returns when the next call is due.

        Args:
            target_id: the target to call.
            path: the caller, distinct from the other paths.
            now_s: seconds on a monotonic clock.
            path_rate: most calls per second of this path; None when only the target's rate counts.
        """
        self._expire(now_s)
        rate = self._rate_of(target_id)
        if not rate and not path_rate:
            return None
        schedule = self._schedules.get(target_id)
        if schedule is None:
            schedule = self._schedules[target_id] = _Schedule(called_s=now_s)
            slowest = min(limit for limit in (rate, path_rate) if limit)
            heapq.heappush(self._expiries, (now_s + 1 / slowest + _REMEMBERED_S, target_id))
        bucket = None
        if path_rate:
            bucket = schedule.by_path[path] = _filled(schedule.by_path.get(path), path_rate, now_s)
            if not bucket.available(now_s):
                # Not counted as refused: another path that yields now would delay its call for
                # nothing.
                return now_s + bucket.wait_s()
        next_s = self._acquire_shared(schedule, rate, path, now_s) if rate else None
        if next_s is None:
            schedule.called_s = now_s
            if bucket is not None:
                bucket.take()
        return next_s

    @staticmethod
    def _acquire_shared(schedule: _Schedule, rate: float, path: object, now_s: float) -> float | None:
        """As `acquire`, by the target's own rate."""
        bucket = schedule.shared = _filled(schedule.shared, rate, now_s)
        if not bucket.available(now_s):
            schedule.refused.add(path)
            return now_s + bucket.wait_s()
        if schedule.yielded:
            # The other paths did not call; they try again once they have a free slot.
            schedule.refused.clear()
        elif schedule.last_path is path and schedule.refused - {path}:
            schedule.yielded = True
            return now_s + 1 / rate
        bucket.take()
        schedule.last_path = path
        schedule.refused.discard(path)
        schedule.yielded = False
        return None

    def interval_s(self, target_id: TargetId, path: object, path_rate: float | None = None) -> float:
        """Seconds between two calls of one path while paths compete as now; 0 without a rate.

        Args:
            target_id: the target to call.
            path: the caller.
            path_rate: as in `acquire`.
        """
        rate = self._rate_of(target_id)
        path_s = 1 / path_rate if path_rate else 0.0
        if not rate:
            return path_s
        schedule = self._schedules.get(target_id)
        paths = 1 + len(schedule.refused - {path}) if schedule is not None else 1
        return max(path_s, paths / rate)

    def _expire(self, now_s: float) -> None:
        while self._expiries and self._expiries[0][0] <= now_s:
            _at_s, target_id = heapq.heappop(self._expiries)
            if (end_s := self._schedules[target_id].end_s + _REMEMBERED_S) > now_s:
                heapq.heappush(self._expiries, (end_s, target_id))
            else:
                del self._schedules[target_id]
