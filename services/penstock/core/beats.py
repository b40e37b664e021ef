"""When to give which sign of life: the worker's side of heartbeats. Two queues; time is an argument.

Main holds what is still to be beaten in this cycle, backup what has been. Step A (`step`), at a steady rate, takes
from main what is due, the most overdue first, and moves it to backup once it is heard. Step B, at the end of each
cycle, moves backup to main. An attempt is not due before it was silent for half a cycle. Its claim and its beats are the
only signs of life there are, until handlers can report progress: the one report besides is its end, after which nothing
is beaten.

Guarantees, while `step` is called about once a step and beats are heard
- Nothing is silent for longer than two cycles and two steps, which the policy makes fit into the timeout.
- No step sends more than the limit allows, whatever happened before: after a standstill what is overdue is made up
  for at the limit, in order, and not in a burst. At ease the rate is only what the attempts in hand need.
- Whoever takes no more in than there is `room` for keeps all alive within the limit: none is silently missed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Answer(Enum):
    """What came of a beat; but for `HEARD` the classes of errors.

    `GONE`: unknown to the platform, or cancelled. `THROTTLED`: too fast. `UNKNOWN`: anything else, no answer included.
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
        cycle_s: seconds within which each silent attempt is beaten once.
        step_s: seconds between two steps.
        rate_per_s: beats a second at ease, at least.
        limit_per_s: beats a second at most.
        retries: how often a beat that met an unknown error is sent again within a cycle.
    """

    timeout_s: float = 300.0
    cycle_s: float = 120.0
    step_s: float = 1.0
    rate_per_s: float = 1.0
    limit_per_s: float = 1_000.0
    retries: int = 3

    def validate(self) -> list[str]:
        """What is wrong with it, a sentence each."""
        problems = [
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("timeout_s", "cycle_s", "step_s", "rate_per_s", "limit_per_s")
            if not getattr(self, name) > 0
        ]
        if self.retries < 0:
            problems.append(f"retries={self.retries} must be at least 0")
        if problems:
            return problems
        if 2 * (self.cycle_s + self.step_s) > self.timeout_s:
            problems.append(
                f"cycle_s={self.cycle_s:g} and step_s={self.step_s:g} must fit twice in timeout_s={self.timeout_s:g}: "
                "else an attempt may be taken for lost although its beats are heard"
            )
        if self.limit_per_s < self.rate_per_s or self.limit_per_s * self.step_s < 1:
            problems.append(
                f"limit_per_s={self.limit_per_s:g} must allow rate_per_s={self.rate_per_s:g} and a beat a step"
            )
        return problems

    @classmethod
    def within(cls, timeout_s: float, *, limit_per_s: float = 1_000.0) -> BeatPolicy:
        """The proportions of 120 s in 300 s, in steps of a second, for another timeout."""
        step_s = min(1.0, timeout_s / 30)
        rate_per_s = 1 / step_s
        return cls(
            timeout_s=timeout_s,
            cycle_s=timeout_s * 0.4,
            step_s=step_s,
            rate_per_s=rate_per_s,
            limit_per_s=max(limit_per_s, rate_per_s),
        )

    @property
    def capacity(self) -> int:
        """How many attempts can be kept alive."""
        return math.floor(self.limit_per_s * self.cycle_s)


class _Rank(IntEnum):
    """Where in main: in front of the others, among them by silence, or behind them."""

    FRONT = 0
    MIDDLE = 1
    END = 2


@dataclass(slots=True)
class _Pulse:
    """One attempt.

    Attributes:
        heard_s: when it was last heard of.
        sent_s: when the beat was sent that is under way; None when none is.
        due: its number in main; None while it is in backup or under way. Entries with another number are stale.
        retries: unknown errors in this cycle.
    """

    heard_s: float
    sent_s: float | None = None
    due: int | None = None
    retries: int = 0


class BeatQueue(Generic[K]):
    """The attempts in one worker's hand that share a timeout.

    Args:
        policy: see `BeatPolicy`.
        now_s: seconds on the caller's clock, which only grows.
    """

    def __init__(self, policy: BeatPolicy, now_s: float) -> None:
        self.policy = policy
        self._pulses: dict[K, _Pulse] = {}
        self._main: list[tuple[_Rank, float, int, K]] = []
        self._end: deque[tuple[int, K]] = deque()
        self._number = 0
        self._cycle_ends_s = now_s + policy.cycle_s
        self._stepped_s = now_s
        self._allowance = 0.0
        self._held_back_s = now_s

    def __len__(self) -> int:
        return len(self._pulses)

    def __contains__(self, key: K) -> bool:
        return key in self._pulses

    @property
    def room(self) -> int:
        """How many more attempts can be kept alive."""
        return max(0, self.policy.capacity - len(self._pulses))

    def add(self, key: K, now_s: float) -> None:
        """An attempt was claimed; its claim was its first sign of life."""
        self._pulses[key] = _Pulse(now_s)
        self._file(key, _Rank.MIDDLE)

    def discard(self, keys: Iterable[K]) -> None:
        """Nothing more is to be said of these."""
        for key in keys:
            self._pulses.pop(key, None)

    def silent(self, now_s: float, for_s: float, among: Iterable[K] | None = None) -> list[K]:
        """What was not heard of for `for_s` seconds or longer; of these attempts only, where they are given."""
        keys = self._pulses if among is None else [key for key in among if key in self._pulses]
        return [key for key in keys if now_s - self._pulses[key].heard_s >= for_s]

    def hold_back(self, now_s: float, for_s: float) -> None:
        """Whoever hears beats asks for silence. Not longer than half a cycle: obedience must not cost a lease."""
        self._held_back_s = max(self._held_back_s, now_s + min(for_s, self.policy.cycle_s / 2))

    def step(self, now_s: float) -> list[K]:
        """Step A, and step B when a cycle has ended: what to beat now. Each is guarded until it is answered.

        Args:
            now_s: seconds, later than at the step before: it tells the beats of this step from earlier ones (`answer`).
        """
        if now_s >= self._cycle_ends_s:
            self._begin_cycle(now_s)
        idle_s = self.policy.cycle_s / 2
        chosen: list[K] = []
        allowed = self._allowed(now_s)
        if now_s < self._held_back_s:
            return chosen
        while self._main and len(chosen) < allowed:
            rank, heard_s, number, key = self._main[0]
            pulse = self._pulses.get(key)
            if pulse is None or pulse.due != number:
                heapq.heappop(self._main)
            elif rank is _Rank.MIDDLE and now_s - heard_s < idle_s:
                break  # and so is everything behind it in the middle
            else:
                heapq.heappop(self._main)
                pulse.due = None
                pulse.sent_s = now_s
                chosen.append(key)
        while self._end and len(chosen) < allowed:
            number, key = self._end.popleft()
            pulse = self._pulses.get(key)
            if pulse is not None and pulse.due == number:
                pulse.due = None
                pulse.sent_s = now_s
                chosen.append(key)
        self._allowance -= len(chosen)
        return chosen

    def answer(self, key: K, answer: Answer, sent_s: float) -> None:
        """What came of a beat. A second answer to the same beat, and one to a beat given up, is ignored.

        Args:
            key: the attempt.
            answer: what came of it.
            sent_s: the `now_s` of the step that chose it. Only the latest beat of an attempt is waited for: what is
                said of an earlier one must not look like contact at the time of this one.
        """
        pulse = self._pulses.get(key)
        if pulse is None or pulse.sent_s != sent_s:
            return
        pulse.sent_s = None
        if answer is Answer.HEARD:
            # As of when it was sent: it may have been long on its way.
            pulse.heard_s = max(pulse.heard_s, sent_s)
            pulse.retries = 0
        elif answer is Answer.GONE:
            del self._pulses[key]
        elif answer is Answer.THROTTLED:
            self._file(key, _Rank.FRONT)
        elif pulse.retries < self.policy.retries:
            pulse.retries += 1
            self._file(key, _Rank.END)

    def _allowed(self, now_s: float) -> int:
        """How many beats this step may send."""
        policy = self.policy
        elapsed_s = max(0.0, now_s - self._stepped_s)
        self._stepped_s = now_s
        rate = max(policy.rate_per_s, len(self._pulses) / policy.cycle_s)
        if self._main:
            pulse = self._pulses.get(self._main[0][3])
            # Longer silent than a cycle and the idle time before it: there is something to make up for.
            if pulse is not None and now_s - pulse.heard_s > 1.5 * policy.cycle_s:
                rate = policy.limit_per_s
        rate = min(rate, policy.limit_per_s)
        most = max(1.0, policy.limit_per_s * policy.step_s)
        # What was not needed is not saved up, but for a fraction: beats come at a steady rate, not in bursts.
        self._allowance = min(most, min(self._allowance, 1.0) + rate * elapsed_s)
        return math.floor(self._allowance)

    def _begin_cycle(self, now_s: float) -> None:
        """Step B: everything is to be beaten again; a beat that nobody answered in a whole cycle is given up."""
        given_up_s = now_s - self.policy.cycle_s
        self._cycle_ends_s = now_s + self.policy.cycle_s
        self._main.clear()
        self._end.clear()
        for key, pulse in self._pulses.items():
            pulse.retries = 0
            if pulse.sent_s is None or pulse.sent_s <= given_up_s:
                pulse.sent_s = None
                self._file(key, _Rank.MIDDLE)

    def _file(self, key: K, rank: _Rank) -> None:
        self._number += 1
        pulse = self._pulses[key]
        pulse.due = self._number
        if rank is _Rank.END:
            self._end.append((self._number, key))
            return
        heapq.heappush(self._main, (rank, pulse.heard_s, self._number, key))
