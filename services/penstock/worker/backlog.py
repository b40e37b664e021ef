"""The attempts that wait for a handler, in order of priority, within the limits of their stages.

An attempt whose stage is at its limit does not delay those of other stages. Few of them wait here:
`BacklogLimit` says how many will soon have a slot. All others are handed back, because another
worker may be idle (`core.stage_pace`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping

from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId
from penstock.core.early_start import HORIZON_S, BacklogLimit
from penstock.core.stage_pace import StagePace
from penstock.worker.priority_semaphore import PriorityQueue

# Most attempts of one stage that wait, beside as many as run.
MOST_WAITING = 1_000

# An attempt to hand back, and milliseconds until it may be released.
Surplus = tuple[ReadyTask, int]


class LimitedStage:
    """The attempts of a stage with a limit of its own.

    Args:
        limit: most attempts at once.
        numbers: count arrivals at the worker.
    """

    def __init__(self, limit: int, numbers: Iterator[int]) -> None:
        self.limit = limit
        self.waiting = PriorityQueue(numbers)
        self.running: dict[AttemptId, float] = {}
        # When an attempt last began, or the first one of those that wait came.
        self.moved_s = 0.0
        self._soon = BacklogLimit(MOST_WAITING)
        self._pace = StagePace(limit)

    @property
    def has_room(self) -> bool:
        """Whether another attempt may begin."""
        return len(self.running) < self.limit

    def add(self, ready: ReadyTask, now_s: float) -> None:
        """Adds an attempt that waits."""
        if not self.waiting:
            self.moved_s = now_s
        self.waiting.add(ready)

    def take_surplus(self, now_s: float) -> list[Surplus]:
        """Removes and returns attempts to hand back: of the least urgent, the latest."""
        most = self.limit - len(self.running) + max(self.limit, self._soon.at(now_s))
        last = self.waiting.take_last(len(self.waiting) - most)
        return [self.surplus(ready, now_s) for ready in last]

    def surplus(self, ready: ReadyTask, now_s: float) -> Surplus:
        """An attempt to hand back, with its delay."""
        oldest_s = now_s - next(iter(self.running.values()), now_s)
        return ready, round(self._pace.delay_s(now_s, oldest_s, random.random()) * 1000)  # noqa: S311 (no secret)

    def begin(self, attempt_id: AttemptId, now_s: float) -> None:
        """Counts an attempt until it ends."""
        self.running[attempt_id] = self.moved_s = now_s

    def end(self, attempt_id: AttemptId, now_s: float) -> None:
        """Counts an attempt no longer."""
        began_s = self.running.pop(attempt_id, None)
        if began_s is not None:
            self._pace.add_ended(now_s - began_s)
            self._soon.add_ended(now_s - began_s <= HORIZON_S, now_s)


class Backlog:
    """The attempts that wait for a handler.

    Args:
        limits: most attempts at once by (type, stage), for stages with a limit.

    Attributes:
        has_limits: whether a stage has one. Without, attempts need not be counted.
    """

    def __init__(self, limits: Mapping[tuple[str, str], int]) -> None:
        numbers = itertools.count()
        self._free = PriorityQueue(numbers)
        self._limited = {stage: LimitedStage(limit, numbers) for stage, limit in limits.items()}
        self._stages = list(self._limited.values())
        self.has_limits = bool(limits)

    def __len__(self) -> int:
        if not self.has_limits:
            return len(self._free)
        return len(self._free) + sum(len(stage.waiting) for stage in self._stages)

    def __contains__(self, attempt_id: object) -> bool:
        """Whether an attempt waits; may be asked from any thread."""
        return attempt_id in self._free or any(attempt_id in stage.waiting for stage in self._stages)

    @property
    def free(self) -> PriorityQueue:
        """Those of stages without a limit."""
        return self._free

    def add(self, ready: ReadyTask, now_s: float) -> None:
        """Adds an attempt."""
        if self.has_limits and (stage := self._of(ready)) is not None:
            stage.add(ready, now_s)
        else:
            self._free.add(ready)

    def take_surplus(self, now_s: float) -> list[Surplus]:
        """Removes and returns attempts to hand back, because their stage is at its limit."""
        return [each for stage in self._stages for each in stage.take_surplus(now_s)]

    def take(self) -> ReadyTask | None:
        """Removes and returns the first attempt whose stage has room."""
        if not self.has_limits:
            return self._free.take() if self._free else None
        first: PriorityQueue | None = self._free or None
        for stage in self._stages:
            if stage.waiting and stage.has_room and (first is None or stage.waiting.head < first.head):
                first = stage.waiting
        return None if first is None else first.take()

    def take_all(self) -> list[ReadyTask]:
        """Removes and returns all attempts."""
        return [queue.take() for queue in self._queues() for _ in range(len(queue))]

    def take_stuck(self, now_s: float, stuck_s: float) -> list[Surplus]:
        """Removes and returns attempts of limited stages of which none began for long.

        Args:
            now_s: seconds on a monotonic clock.
            stuck_s: for how long.
        """
        stuck = (stage for stage in self._stages if stage.waiting and stage.moved_s + stuck_s <= now_s)
        return [
            stage.surplus(stage.waiting.take(), now_s) for stage in stuck for _ in range(len(stage.waiting))
        ]

    def next_stuck_s(self, stuck_s: float) -> float:
        """When `take_stuck` may next return something; infinity while nothing waits there."""
        return min((stage.moved_s + stuck_s for stage in self._stages if stage.waiting), default=math.inf)

    def drop(self, attempt_ids: Collection[AttemptId]) -> None:
        """Removes attempts."""
        for queue in self._queues():
            queue.drop(attempt_ids)

    def has_room(self, ready: ReadyTask) -> bool:
        """Whether the stage of an attempt lets another one begin."""
        stage = self._of(ready)
        return stage is None or stage.has_room

    def begin(self, ready: ReadyTask, now_s: float) -> None:
        """Counts an attempt that begins for the limit of its stage."""
        if (stage := self._of(ready)) is not None:
            stage.begin(ready.attempt_id, now_s)

    def end(self, ready: ReadyTask, now_s: float) -> bool:
        """Counts it no longer; returns whether its stage has a limit."""
        if (stage := self._of(ready)) is None:
            return False
        stage.end(ready.attempt_id, now_s)
        return True

    def _of(self, ready: ReadyTask) -> LimitedStage | None:
        return self._limited.get((ready.type, ready.fence.stage))

    def _queues(self) -> Iterator[PriorityQueue]:
        yield self._free
        for stage in self._stages:
            yield stage.waiting
