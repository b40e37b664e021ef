"""When a target that has a rate may be called next, whichever path the call takes. Pure; time is an argument.

A path may be bound to less for a while (`most`): that holds for its own calls, and takes nothing from the others.

Two paths share one clock for each target, or it would get twice its rate. They take turns: who had the last call leaves
the next one to another that waits for it, but for no longer than one call more would have to wait, since the other may
have no slot. So neither path keeps a target from the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.target import TargetId

# For so long after a target could be called again it is remembered whose turn it is.
_REMEMBERED_S = 60.0


@dataclass(slots=True)
class _Clock:
    # When the next call may be, as far as the target's rate goes, and when one of each path that is bound to less.
    at_s: float
    paths: dict[object, float] = field(default_factory=dict)
    # Who had the last call, who has asked in vain since their own, and whether the last one has let those go first.
    last: object = None
    waiting: set[object] = field(default_factory=set)
    yielded: bool = False

    @property
    def end_s(self) -> float:
        """When any path may call."""
        return max(self.at_s, *self.paths.values()) if self.paths else self.at_s


class Rates:
    """The clocks of all targets that have a rate.

    Args:
        rate: the most calls a second that a target is to get; None for any number.
    """

    def __init__(self, rate: Callable[[TargetId], float | None] = lambda _target: None) -> None:
        self._rate = rate
        self._clocks: dict[TargetId, _Clock] = {}
        # (when, target): when a clock may be forgotten, unless it was put forward meanwhile; one for each.
        self._ends: list[tuple[float, TargetId]] = []

    def __len__(self) -> int:
        return len(self._clocks)

    def turn(self, target: TargetId, path: object, now_s: float, most: float | None = None) -> float | None:
        """None when the target may be called now, and then it counts as called; else when to ask again.

        Args:
            target: which.
            path: who asks: anything that is unlike the other paths.
            now_s: seconds on any clock that does not step.
            most: calls a second that this path may make, however many the target may get; None for those.
        """
        self._forget(now_s)
        rate = self._rate(target)
        if not rate and not most:
            return None
        clock = self._clocks.get(target)
        if clock is None:
            clock = self._clocks[target] = _Clock(now_s)
            slowest = min(one for one in (rate, most) if one)
            heapq.heappush(self._ends, (now_s + 1 / slowest + _REMEMBERED_S, target))
        if most and now_s < (path_s := clock.paths.get(path, now_s)):
            # Not waiting for the others: there is nothing that they could leave to it.
            return path_s
        turn_s = self._shared_turn(clock, rate, path, now_s) if rate else None
        if turn_s is None and most:
            clock.paths[path] = now_s + 1 / most
        return turn_s

    @staticmethod
    def _shared_turn(clock: _Clock, rate: float, path: object, now_s: float) -> float | None:
        """As `turn`, by the target's own rate."""
        if now_s < clock.at_s:
            clock.waiting.add(path)
            return clock.at_s
        if clock.yielded:
            # The others had their chance; whoever finds a slot later asks again.
            clock.waiting.clear()
        elif clock.last is path and clock.waiting - {path}:
            clock.yielded = True
            return now_s + 1 / rate
        clock.at_s = now_s + 1 / rate
        clock.last = path
        clock.waiting.discard(path)
        clock.yielded = False
        return None

    def renew(self, target: TargetId, now_s: float) -> None:
        """Its rate has changed: its next call is reckoned by the new one, not by what was.

        Args:
            target: which.
            now_s: as in `turn`.
        """
        if (clock := self._clocks.get(target)) is not None:
            rate = self._rate(target)
            clock.at_s = min(clock.at_s, now_s + 1 / rate if rate else now_s)

    def pace_s(self, target: TargetId, path: object, most: float | None = None) -> float:
        """Seconds between two calls of one path to a target while as many paths want it as do now; 0 without a rate.

        Args:
            target: which.
            path: whose calls.
            most: as in `turn`.
        """
        rate = self._rate(target)
        own_s = 1 / most if most else 0.0
        if not rate:
            return own_s
        clock = self._clocks.get(target)
        return max(own_s, (1 + len(clock.waiting - {path}) if clock is not None else 1) / rate)

    def _forget(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _at_s, target = heapq.heappop(self._ends)
            if (end_s := self._clocks[target].end_s + _REMEMBERED_S) > now_s:
                heapq.heappush(self._ends, (end_s, target))
            else:
                del self._clocks[target]
