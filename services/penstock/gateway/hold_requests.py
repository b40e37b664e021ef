"""Requests of HTTP workers that wait for tasks, and the tasks that were claimed for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from aiokafka import TopicPartition

from penstock.contracts.ready import ReadyTask
from penstock.errors import KafkaUnavailable, Unavailable


@dataclass(slots=True)
class FetchedRecord:
    """A record in the buffer; without a `task` it is only committed."""

    partition: TopicPartition
    offset: int
    task: ReadyTask | None

    def without_task(self) -> FetchedRecord:
        """The record, to be committed only."""
        return FetchedRecord(self.partition, self.offset, None)


@dataclass(frozen=True, slots=True)
class ClaimedTasks:
    """The tasks that were claimed for one request.

    Attributes:
        tasks: tasks with inline contexts.
        claimed_s: when the claim was sent, on the loop's clock; leases start then.
    """

    tasks: list[ReadyTask]
    claimed_s: float

    @classmethod
    def none(cls) -> Self:
        """The answer without tasks."""
        return cls([], asyncio.get_running_loop().time())


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that waits for tasks.

    Attributes:
        worker: id of the worker.
        max_tasks: most tasks in its answer.
        is_connected: whether its client is still connected.
        max_attempts: attempts, the first included, by stage, for stages with a limit of their own.
        served: whether a round is working on its answer.
        overdue: whether its time is over, so that the round must answer even without tasks.
        records: the records that a round has assigned to it.
        answer: the tasks, or an error.
    """

    worker: str
    max_tasks: int
    is_connected: Callable[[], bool]
    max_attempts: Mapping[str, int]
    served: bool = False
    overdue: bool = False
    records: list[FetchedRecord] = field(default_factory=list)
    answer: asyncio.Future[ClaimedTasks] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def tasks(self) -> list[ReadyTask]:
        """The tasks of its records."""
        return [record.task for record in self.records if record.task is not None]

    def succeed(self, claimed: ClaimedTasks) -> None:
        """Answers the request, unless it has an answer."""
        self.served = True
        if not self.answer.done():
            self.answer.set_result(claimed)

    def fail(self, error: Exception) -> None:
        """Answers the request with an error that asks for a repetition, unless it has an answer."""
        self.served = True
        if not self.answer.done():
            unavailable = (
                error if isinstance(error, Unavailable) else KafkaUnavailable(f"{error}: repeat the request")
            )
            self.answer.set_exception(unavailable)

    def reset(self) -> None:
        """Lets the request wait for another round."""
        self.served = False
        self.records = []
