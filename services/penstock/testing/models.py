"""Runs of tasks, their attempts, and the lines of their logs, as tests look at them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.client.models import Task
from penstock.contracts.progress import Progress
from penstock.core.task import Priority, State
from penstock.errors import NotSucceeded, PenstockError


class NoEnd(PenstockError):  # noqa: N818 (says what happened)
    """A task cannot end: a stage has no handler, or asks for another attempt without end."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a task's log.

    Attributes:
        level: as in `logging`.
        source: `task` for `task.log`, `stdout`, `stderr`, the name of a logger, or `penstock`.
        text: the line, without secrets.
        fields: its structured values.
    """

    level: int
    source: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{logging.getLevelName(self.level)} {self.source}: {self.text}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that has ended.

    Attributes:
        stage: its stage.
        step: number of the stage in the task's sequence of stages; 0 is the first.
        attempt: number of the attempt of this stage; 0 is the first.
        outcome: next, done, fail, retry, spawn, wait or expired.
        worker: id of the worker.
        error: kind, message and optionally traceback; None without one.
        started_at: when its handler began; None when that is unknown.
        finished_at: when it ended.
        context: the context that its handler received, as JSON (or bytes); None on a real
            deployment, which keeps only the context of the current stage.
        log: what its handler logged and printed; on a real deployment none.
        progress: the reports of its handler, in order; on a real deployment none.
    """

    stage: str
    step: int
    attempt: int
    outcome: str
    worker: str | None
    error: Mapping[str, str] | None
    started_at: datetime | None
    finished_at: datetime | None
    context: Any = None
    log: Sequence[LogLine] = ()
    progress: Sequence[Progress] = ()


class Run:
    """A task that was submitted, as it is now: each attribute is read when it is asked for.

    Tests receive it from `Pipeline` or `Deployment`.
    """

    def __init__(
        self,
        task_id: int,
        read: Callable[[int], Task],
        attempts: Callable[[Task], Sequence[Attempt]],
        records: Callable[[int], tuple[list[LogLine], list[Progress]]] = lambda _id: ([], []),
        *,
        created: bool = True,
    ) -> None:
        self._id = task_id
        self._read = read
        self._attempts = attempts
        self._records = records
        self._created = created

    @property
    def id(self) -> int:
        """Task id."""
        return self._id

    @property
    def created(self) -> bool:
        """False when an earlier submission with the same idempotency key created the task."""
        return self._created

    @property
    def task(self) -> Task:
        """The task, as `Client.get` returns it."""
        return self._read(self._id)

    @property
    def type(self) -> str:
        """Task type."""
        return self.task.type

    @property
    def state(self) -> State:
        """State of the task."""
        return self.task.state

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.task.ended

    @property
    def stage(self) -> str:
        """Current stage, or the last one."""
        return self.task.stage

    @property
    def priority(self) -> Priority:
        """Order of release within the type."""
        return self.task.priority

    @property
    def context(self) -> Any:
        """Input of the current stage, or of the last one."""
        return self.task.context

    @property
    def error(self) -> Mapping[str, str] | None:
        """Kind, message and optionally traceback of the failure; None without one."""
        return self.task.error

    @property
    def result(self) -> Any:
        """The result of the last stage.

        Raises:
            NotSucceeded: the task has not succeeded; the message has its state, its stage and the
                error, with its traceback.
        """
        task = self.task
        if task.state is not State.SUCCEEDED:
            raise NotSucceeded(_told(task), task.id, task.state)
        return task.result

    @property
    def attempts(self) -> Sequence[Attempt]:
        """The attempts that have ended, in order."""
        return self._attempts(self.task)

    @property
    def stages(self) -> list[str]:
        """The stages that the task has entered, in order."""
        task = self.task
        entered = {attempt.step: attempt.stage for attempt in self._attempts(task)}
        entered[int(task.raw["step"])] = task.stage
        return [entered[step] for step in sorted(entered)]

    @property
    def outcomes(self) -> list[str]:
        """The outcomes of the attempts that have ended, in order."""
        return [attempt.outcome for attempt in self.attempts]

    @property
    def log(self) -> list[LogLine]:
        """The lines of all attempts, in order; on a real deployment none."""
        return self._records(self._id)[0]

    @property
    def progress(self) -> list[Progress]:
        """The reports of progress of all attempts, in order; on a real deployment none."""
        return self._records(self._id)[1]

    def __repr__(self) -> str:
        task = self.task
        error = f", {task.error['kind']}: {task.error['message']}" if task.error is not None else ""
        return f"<Run {task.type} {task.id}: {task.state} in {task.stage!r}{error}>"


def _told(task: Task) -> str:
    told = f"task {task.id} is {task.state} in stage {task.stage!r} of {task.type}"
    if task.error is None:
        return told
    told += f": {task.error['kind']}: {task.error['message']}"
    traceback = task.error.get("traceback")
    return f"{told}\n{traceback.rstrip()}" if traceback else told


def attempt_of(raw: Mapping[str, Any]) -> Attempt:
    """An attempt, from the document of its task."""
    return Attempt(
        raw["stage"],
        raw["step"],
        raw["attempt"],
        raw["outcome"],
        raw["worker"],
        raw["error"],
        _moment(raw["started_at"]),
        _moment(raw["finished_at"]),
    )


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def id_of(run: Run | int) -> int:
    """The id of a task, which callers may give instead of its run."""
    return run if isinstance(run, int) else run.id
