"""Schedules the heartbeats of a worker with two queues. Pure; time is an argument.

The main queue holds the attempts that need a heartbeat in this cycle, the backup queue those that
had one. Step A (`step`) runs at a steady rate: it takes due attempts from main, the most overdue
first, and moves them to backup once their heartbeat is confirmed. Step B moves backup to main at
the end of each cycle. An attempt is due half a cycle after its last contact, which is its claim or
a confirmed heartbeat.

Guarantees, while `step` runs every `step_s` seconds and heartbeats are confirmed
- The time between two contacts is at most two cycles and two steps, which the policy fits into the
  timeout.
- No step sends more than the limit allows. After a stall, overdue heartbeats follow at the limit,
  in order and without a burst. In normal operation the rate is what the attempts need.
- A worker that claims no more attempts than there is `room` for keeps every one alive within the
  limit.
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

# Stale entries that a queue may have without being compacted.
FEW_ENTRIES = 64


class Answer(Enum):
    """The answer to a heartbeat; all but `CONFIRMED` are classes of errors.

    `GONE`: the attempt is unknown to the platform, or cancelled. `THROTTLED`: too many heartbeats.
    `UNKNOWN`: any other error, or no answer.
    """

    CONFIRMED = "confirmed"
    GONE = "gone"
    THROTTLED = "throttled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HeartbeatPolicy:
    """Times and rates of heartbeats.

    Attributes:
        timeout_s: seconds without a heartbeat after which the platform considers an attempt lost.
        cycle_s: seconds within which each due attempt gets one heartbeat.
        step_s: seconds between two steps.
        rate_per_s: heartbeats a second in normal operation, at least.
        limit_per_s: heartbeats a second at most.
        retries: how often a heartbeat is repeated within a cycle after unknown errors.
    """

    timeout_s: float = 300.0
    cycle_s: float = 120.0
    step_s: float = 1.0
    rate_per_s: float = 1.0
    limit_per_s: float = 1_000.0
    retries: int = 3

    def validate(self) -> list[str]:
        """The problems of the policy, a sentence each."""
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
                "otherwise the platform may consider an attempt lost although its heartbeats arrive"
            )
        if self.limit_per_s < self.rate_per_s or self.limit_per_s * self.step_s < 1:
            problems.append(
                f"limit_per_s={self.limit_per_s:g} must allow rate_per_s={self.rate_per_s:g} and one heartbeat a step"
            )
        return problems

    @classmethod
    def within(cls, timeout_s: float, *, limit_per_s: float = 1_000.0) -> HeartbeatPolicy:
        """A policy for another timeout, with the proportions of the default one."""
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
        """How many attempts can be kept alive within the limit."""
        return math.floor(self.limit_per_s * self.cycle_s)


class _Rank(IntEnum):
    """The position in main: first, ordered by last contact, or last."""

    FRONT = 0
    MIDDLE = 1
    END = 2


@dataclass(slots=True)
class _Attempt:
    """The state of one attempt.

    Attributes:
        contact_s: when its last confirmed heartbeat, or its claim, was sent.
        sent_s: when its unanswered heartbeat was sent; None without one.
        entry: number of its entry in main; None while it is in backup or unanswered. Entries with
            other numbers are stale.
        retries: unknown errors in this cycle.
    """

    contact_s: float
    sent_s: float | None = None
    entry: int | None = None
    retries: int = 0


class HeartbeatQueue(Generic[K]):
    """The attempts in flight of one worker that share a timeout.

    Args:
        policy: times and rates.
        now_s: seconds on a monotonic clock.
    """

    def __init__(self, policy: HeartbeatPolicy, now_s: float) -> None:
        self.policy = policy
        self._attempts: dict[K, _Attempt] = {}
        self._main: list[tuple[_Rank, float, int, K]] = []
        self._end: deque[tuple[int, K]] = deque()
        self._number = 0
        self._cycle_ends_s = now_s + policy.cycle_s
        self._stepped_s = now_s
        self._tokens = 0.0
        self._paused_until_s = now_s

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt_id: K) -> bool:
        return attempt_id in self._attempts

    @property
    def room(self) -> int:
        """How many more attempts can be kept alive within the limit."""
        return max(0, self.policy.capacity - len(self._attempts))

    def add(self, attempt_id: K, now_s: float) -> None:
        """Adds a claimed attempt; its claim is its first contact."""
        self._attempts[attempt_id] = _Attempt(now_s)
        self._enqueue(attempt_id, _Rank.MIDDLE)

    def discard(self, attempt_ids: Iterable[K]) -> None:
        """Removes attempts."""
        for attempt_id in attempt_ids:
            self._attempts.pop(attempt_id, None)
        self._compact()

    def silent(self, now_s: float, for_s: float, among: Iterable[K] | None = None) -> list[K]:
        """Attempts, or those of `among`, whose last contact was `for_s` seconds ago or earlier."""
        attempt_ids = (
            self._attempts
            if among is None
            else [attempt_id for attempt_id in among if attempt_id in self._attempts]
        )
        return [
            attempt_id for attempt_id in attempt_ids if now_s - self._attempts[attempt_id].contact_s >= for_s
        ]

    def pause(self, now_s: float, for_s: float) -> None:
        """Pauses all heartbeats, at most for half a cycle: a longer pause could cost leases."""
        self._paused_until_s = max(self._paused_until_s, now_s + min(for_s, self.policy.cycle_s / 2))

    def step(self, now_s: float) -> list[K]:
        """Step A, and step B at the end of a cycle: returns the attempts that need a heartbeat now.

        An attempt is not returned again until its heartbeat is answered, or a cycle has passed.

        Args:
            now_s: seconds, greater than at the step before; it identifies the heartbeats of this
                step (`answer`).
        """
        if now_s >= self._cycle_ends_s:
            self._begin_cycle(now_s)
        idle_s = self.policy.cycle_s / 2
        due: list[K] = []
        allowed = self._allowed(now_s)
        if now_s < self._paused_until_s:
            return due
        while self._main and len(due) < allowed:
            rank, contact_s, number, attempt_id = self._main[0]
            attempt = self._attempts.get(attempt_id)
            if attempt is None or attempt.entry != number:
                heapq.heappop(self._main)
            elif rank is _Rank.MIDDLE and now_s - contact_s < idle_s:
                break  # no later entry of this rank is due
            else:
                heapq.heappop(self._main)
                if rank is _Rank.MIDDLE and now_s - attempt.contact_s < idle_s:
                    # A report was its contact since.
                    self._enqueue(attempt_id, rank)
                    continue
                attempt.entry = None
                attempt.sent_s = now_s
                due.append(attempt_id)
        while self._end and len(due) < allowed:
            number, attempt_id = self._end.popleft()
            attempt = self._attempts.get(attempt_id)
            if attempt is not None and attempt.entry == number:
                attempt.entry = None
                attempt.sent_s = now_s
                due.append(attempt_id)
        self._tokens -= len(due)
        return due

    def answer(self, attempt_id: K, answer: Answer, sent_s: float) -> None:
        """Records the answer to an attempt's latest heartbeat; ignores all other answers.

        Args:
            attempt_id: of the attempt.
            answer: the answer.
            sent_s: the `now_s` of the step that returned it. Without this check, the answer to an
                earlier heartbeat would count as contact at the time of the latest.
        """
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.sent_s != sent_s:
            return
        attempt.sent_s = None
        if answer is Answer.CONFIRMED:
            # The moment of sending: the answer may have taken long.
            attempt.contact_s = max(attempt.contact_s, sent_s)
            attempt.retries = 0
        elif answer is Answer.GONE:
            del self._attempts[attempt_id]
        elif answer is Answer.THROTTLED:
            self._enqueue(attempt_id, _Rank.FRONT)
        elif attempt.retries < self.policy.retries:
            attempt.retries += 1
            self._enqueue(attempt_id, _Rank.END)

    def add_contact(self, attempt_id: K, sent_s: float) -> None:
        """Records that the platform has a report of an attempt, which counts as its heartbeat."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            attempt.contact_s = max(attempt.contact_s, sent_s)

    def _allowed(self, now_s: float) -> int:
        """How many heartbeats this step may send."""
        policy = self.policy
        elapsed_s = max(0.0, now_s - self._stepped_s)
        self._stepped_s = now_s
        rate = max(policy.rate_per_s, len(self._attempts) / policy.cycle_s)
        if self._main:
            attempt = self._attempts.get(self._main[0][3])
            # Later than a cycle and the idle half cycle before it: heartbeats are overdue.
            if attempt is not None and now_s - attempt.contact_s > 1.5 * policy.cycle_s:
                rate = policy.limit_per_s
        rate = min(rate, policy.limit_per_s)
        step_limit = max(1.0, policy.limit_per_s * policy.step_s)
        # At most one unused token is kept, so heartbeats come at a steady rate and without bursts.
        self._tokens = min(step_limit, min(self._tokens, 1.0) + rate * elapsed_s)
        return math.floor(self._tokens)

    def _begin_cycle(self, now_s: float) -> None:
        """Step B: attempts need a heartbeat again, unless one is unanswered for under a cycle."""
        abandoned_s = now_s - self.policy.cycle_s
        self._cycle_ends_s = now_s + self.policy.cycle_s
        self._main.clear()
        self._end.clear()
        for attempt_id, attempt in self._attempts.items():
            attempt.retries = 0
            if attempt.sent_s is None or attempt.sent_s <= abandoned_s:
                attempt.sent_s = None
                self._enqueue(attempt_id, _Rank.MIDDLE)

    def _enqueue(self, attempt_id: K, rank: _Rank) -> None:
        self._number += 1
        attempt = self._attempts[attempt_id]
        attempt.entry = self._number
        if rank is _Rank.END:
            self._end.append((self._number, attempt_id))
        else:
            heapq.heappush(self._main, (rank, attempt.contact_s, self._number, attempt_id))
        self._compact()

    def _compact(self) -> None:
        """Removes stale entries once they are the majority: a cycle may last for hours."""
        if len(self._main) + len(self._end) <= 2 * len(self._attempts) + FEW_ENTRIES:
            return
        self._main = [entry for entry in self._main if self._is_current(*entry[2:])]
        heapq.heapify(self._main)
        self._end = deque(entry for entry in self._end if self._is_current(*entry))

    def _is_current(self, number: int, attempt_id: K) -> bool:
        attempt = self._attempts.get(attempt_id)
        return attempt is not None and attempt.entry == number
