"""The state of an owned type: its ready topic, its lag, and the window that bounds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import ceil, inf

from penstock.contracts.task_type import TaskType
from penstock.core.attempt_pace import AttemptPace
from penstock.core.ready_partitions import ReadyPartitions
from penstock.core.task import Priority
from penstock.core.window import Window, WindowReason
from penstock.errors import KafkaRefused, KafkaUnavailable


@dataclass(slots=True)
class ReadyTopic:
    """The ready topic of one owned type. All moments are on the loop's clock.

    Attributes:
        type: its settings.
        topic: full name of the topic.
        window: how many records may wait there; a rate can set a smaller bound (`size_and_reason`).
        partitions: what each partition holds, and which worker reads it.
        begins: offset of each partition's oldest record, at the last look.
        invalid: committed offsets that were beyond the end at the last look, by partition.
        bounds_s: when the bounds were last read.
        written_s: when a batch was last written.
        may_have_ready: a task of the type may be ready.
        may_have_queued: a task of the type may be queued.
        first_ready: priority of the first ready task, while the window is full; None otherwise.
        polled_s: when the workers' offsets were last read.
        taken_changed_s: when they were last found changed.
        poll_interval_s: seconds until they are read again.
        measured_s: when the window's sample was last read.
        released: tasks that this process released.
        withdrawn: tasks that it withdrew from busy workers.
        pace: how long the type's attempts take.
        full: the window was full, and more than half of its records wait still.
        polling: one poll at a time, so that no older answer follows a newer one.
        failure: why its bounds could not be read; it is to be opened anew.
        lag_failure: why its last poll failed.
    """

    type: TaskType
    topic: str
    window: Window
    may_have_ready: bool = True
    may_have_queued: bool = True
    first_ready: Priority | None = None
    polled_s: float = -inf
    taken_changed_s: float = -inf
    poll_interval_s: float = 0.0
    measured_s: float = -inf
    released: int = 0
    withdrawn: int = 0
    full: bool = False
    begins: dict[int, int] = field(default_factory=dict)
    invalid: dict[int, int] = field(default_factory=dict)
    bounds_s: float = -inf
    written_s: float = -inf
    pace: AttemptPace = field(default_factory=AttemptPace)
    polling: asyncio.Lock = field(default_factory=asyncio.Lock)
    failure: KafkaUnavailable | None = None
    lag_failure: KafkaUnavailable | KafkaRefused | None = None
    partitions: ReadyPartitions = field(init=False)

    def __post_init__(self) -> None:
        self.partitions = ReadyPartitions(self.type.partitions)

    @property
    def lag(self) -> int:
        """Records of tasks that no worker has taken."""
        return self.partitions.lag

    def room(self) -> int:
        """How many more records may wait on the topic.

        A full window has no room until half of it is taken: tasks that are released one by one are
        claimed, run and committed one by one, too. Slow readers get one record while an
        urgent task overtakes others.
        """
        size, lag = self.size_and_reason()[0], self.lag
        self.full = lag >= size or (self.full and lag * 2 > size)
        if self.full:
            return 0
        narrow = self.partitions.narrow_room()
        return size - lag if narrow is None else min(narrow, size - lag)

    @property
    def half_full(self) -> bool:
        """Whether the window is over half full."""
        return self.lag * 2 > self.size_and_reason()[0]

    def poll_at_s(self) -> float:
        """When to poll; infinity if nothing is to be learned.

        A new topic is polled at once. A window that is over half full and may get a task is polled
        at its interval, and any other one when its records wait for a busy worker.
        """
        if self.polled_s == -inf:
            return -inf
        next_s = self.polled_s + self.poll_interval_s
        if self.may_have_ready and (self.half_full or self.partitions.narrow_room() == 0):
            return next_s
        return max(self.partitions.late_at_s(), next_s)

    def size_and_reason(self) -> tuple[int, WindowReason]:
        """Most records that may wait, and the bound that sets it.

        A type with a rate has at most one second of starts there, because a worker that joins late
        begins them at once.
        """
        rate = self.type.starts_per_s
        if rate is not None and max(1, ceil(rate)) < self.window.size:
            return max(1, ceil(rate)), WindowReason.RATE
        return self.window.size, self.window.reason
