"""The tasks of a pipeline: what the gateway, task-sync and the stage processor do in PostgreSQL.

What a row becomes is decided by `penstock.core`, as in the services. This module has the rules that
are statements there: which row an end may change, and which columns it changes
(`schemas/postgres/queries`). The suite in tests/contract/testing runs against both.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from penstock.contracts import subscription
from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.submission import Submission
from penstock.contracts.task_type import TaskType
from penstock.core.attempt import AttemptId
from penstock.core.completion import FailureCounts, Fence, Outcome
from penstock.core.endings import RetryState, stored_state
from penstock.core.operations import TaskSnapshot, Verb, apply, state_after_attempt
from penstock.core.release_order import Head, first, position_of
from penstock.core.suspects import isolation_of
from penstock.core.task import FINAL, IN_FLIGHT, Priority, State, Transition, after, sources
from penstock.errors import IdempotencyConflict, NotFound
from penstock.postgres.ending import Ending
from penstock.postgres.tasks import Existing
from penstock.testing.clock import Clock
from penstock.testing.task_rows import FlowPlace, TaskRow, attempt_row

_WITH_ERROR = frozenset({State.FAILED, State.SCHEDULED, State.QUARANTINED})


class Tasks:
    """The tasks of a pipeline, by id.

    Args:
        clock: of the pipeline.
        types: the registered types, by name.
        on_end: called with each task that reaches a final state, and its state before.
    """

    def __init__(
        self, clock: Clock, types: Mapping[str, TaskType], on_end: Callable[[TaskRow, State], object]
    ) -> None:
        self._clock = clock
        self._types = types
        self._on_end = on_end
        self.rows: dict[int, TaskRow] = {}
        # Those that are not final: a test may submit thousands.
        self._open: dict[int, TaskRow] = {}
        self._by_flow: defaultdict[int, list[TaskRow]] = defaultdict(list)
        self._ids = itertools.count(1)
        self._by_idempotency_key: dict[tuple[str, str], int] = {}

    def get(self, task_id: int) -> TaskRow:
        """A task.

        Raises:
            NotFound: nothing has this id.
        """
        row = self.rows.get(task_id)
        if row is None:
            raise NotFound(f"there is no task {task_id}")
        return row

    def next_id(self) -> int:
        """The next id of a task or flow: they share a sequence."""
        return next(self._ids)

    def has_type(self, name: str) -> bool:
        """Whether a task type is registered."""
        return name in self._types

    def of_flow(self, flow_id: int, node: str | None = None) -> list[TaskRow]:
        """The tasks of a flow, or of one of its nodes, those of the latest generation last."""
        rows = self._by_flow.get(flow_id, ())
        return [row for row in rows if row.flow is not None and node in (None, row.flow.node)]

    def insert(self, submission: Submission, flow: FlowPlace | None = None) -> tuple[TaskRow, bool]:
        """Inserts a task; returns it, and False if its idempotency key has one already.

        Args:
            submission: of the task.
            flow: its place in a flow.

        Raises:
            IdempotencyConflict: that one has another context.
        """
        task_type = self._types[submission.type]
        if submission.idempotency_key is not None:
            found = self._by_idempotency_key.get((submission.type, submission.idempotency_key))
            if found is not None:
                outcome = Existing(found, self.rows[found].context_digest).outcome(submission)
                if isinstance(outcome, IdempotencyConflict):
                    raise outcome
                return self.rows[found], False
        now = self._clock.now
        row = TaskRow(
            id=self.next_id(),
            type=submission.type,
            state=State.SCHEDULED if submission.run_at and submission.run_at > now else State.READY,
            stage=submission.stage or task_type.first_stage,
            priority=submission.priority,
            context=submission.context,
            key=submission.key,
            idempotency_key=submission.idempotency_key,
            context_digest=submission.context_digest,
            events=submission.events or task_type.events,
            callbacks=subscription.to_columns(
                task_type.callbacks if submission.callbacks is None else submission.callbacks
            )
            or None,
            labels=submission.labels,
            due_at=submission.run_at,
            flow=flow,
            created_at=now,
            updated_at=now,
        )
        self.rows[row.id] = self._open[row.id] = row
        if flow is not None:
            self._by_flow[flow.flow_id].append(row)
        if row.idempotency_key is not None:
            self._by_idempotency_key[row.type, row.idempotency_key] = row.id
        return row, True

    def promote(self) -> None:
        """Makes scheduled tasks ready that are due."""
        for row in self._open.values():
            if row.state is State.SCHEDULED and row.due_at is not None and row.due_at <= self._clock.now:
                row.state, row.due_at = after(row.state, Transition.DUE), None

    def next_due(self) -> datetime | None:
        """When the next scheduled task is due."""
        due = [row.due_at for row in self._open.values() if row.state is State.SCHEDULED and row.due_at]
        return min(due, default=None)

    def release(self) -> list[ReadyTask]:
        """Releases the ready tasks of all types that are not paused, in their order."""
        released: list[ReadyTask] = []
        ready: defaultdict[str, dict[int, TaskRow]] = defaultdict(dict)
        for row in self._open.values():
            if row.state is State.READY:
                ready[row.type][row.id] = row
        for name, rows in ready.items():
            task_type = self._types[name]
            if task_type.paused:
                continue
            levels = first(map(self._head, rows.values()), len(rows), task_type.ageing_s)
            released += [
                self._queued(task_type, rows[task_id], level if task_type.ordered else None)
                for task_id, level in levels.items()
            ]
        return released

    def _head(self, row: TaskRow) -> Head:
        level, *place = position_of(row)
        since = row.created_at if row.flow is None else row.flow.since
        return Head(
            tuple(place),
            level,
            (self._clock.now - since).total_seconds(),
            begun=self._types[row.type].finish_first and row.step > 0,
        )

    def _queued(self, task_type: TaskType, row: TaskRow, level: int | None) -> ReadyTask:
        row.state, row.due_at = after(row.state, Transition.RELEASED), None
        row.queued_at = row.updated_at = self._clock.now
        if level is None:
            level = row.flow.priority if row.flow is not None else int(row.priority)
        ready = ReadyTask(
            fence=row.fence,
            type=row.type,
            context=row.context,
            lease_ms=task_type.lease_ms,
            tries=row.failures + row.losses,
            priority=Priority(level),
            isolation=isolation_of(row.losses, task_type.max_losses),
        )
        # As the worker reads it from Kafka.
        return ReadyTask.decode(ready.encode(), row.type)

    def claim(self, attempt_id: AttemptId, worker: str) -> None:
        """Notes that a worker runs an attempt, unless it is not the current one any more."""
        row = self.rows[attempt_id.task_id]
        if row.attempt_id == attempt_id and row.state in IN_FLIGHT:
            row.state, row.worker = after(row.state, Transition.CLAIMED), worker
            row.started_at = row.updated_at = self._clock.now

    def retry_state(self, task_id: int) -> RetryState | None:
        """The fields that decide about a failure or loss; None for a task that is not in flight."""
        row = self.rows[task_id]
        if row.state not in IN_FLIGHT:
            return None
        task_type = self._types[row.type]
        counts = FailureCounts(row.failures, row.losses)
        return RetryState(row.type, row.stage, counts, task_type.policy, task_type.max_losses)

    def is_current(self, fence: Fence) -> bool:
        """Whether the end of an attempt takes effect: the fence of `advance.sql`."""
        row = self.rows[fence.id]
        return row.fence == fence and row.state in IN_FLIGHT

    def late_attempt(self, fence: Fence) -> int | None:
        """The attempt that a late result ends; None if it has no effect.

        The rule of `advance.late_attempts`.
        """
        row = self.rows[fence.id]
        if (row.step, row.stage) != (fence.step, fence.stage) or row.attempt < fence.attempt:
            return None
        by_attempt = {each["attempt"]: each["outcome"] for each in row.attempts if each["step"] == fence.step}
        if by_attempt.get(fence.attempt) is not Outcome.EXPIRED:
            return None
        open_late = sources(Transition.ACCEPTED_LATE)
        if self._types[row.type].late_results != "accept" or row.state not in open_late:
            return None
        if row.state in FINAL:
            # A stage that its handler failed is finished; one that lost its last worker is not.
            return row.attempt + 1 if by_attempt.get(row.attempt) is Outcome.EXPIRED else None
        return row.attempt if row.attempt > fence.attempt else None

    def end(self, ending: Ending, started_at: datetime | None) -> TaskRow:
        """Moves a task whose attempt has ended, and writes its history (`advance.advance`).

        The caller has checked that the end takes effect.
        """
        fence, conclusion = ending.fence, ending.conclusion
        row, now = self.rows[fence.id], self._clock.now
        before, state = row.state, stored_state(conclusion)
        row.attempts.append(attempt_row(row, ending, started_at, now))
        pausing = row.pausing or row.state is State.PAUSED
        row.state, row.pausing = state_after_attempt(state, pausing=pausing), False
        row.stage, row.step, row.attempt = conclusion.stage, conclusion.step, conclusion.attempt
        row.failures, row.losses = conclusion.counts
        row.unhandled_s = conclusion.unhandled_s
        row.due_at = now + timedelta(seconds=conclusion.delay_s) if state is State.SCHEDULED else None
        if ending.outcome is Outcome.NEXT and ending.context is not None:
            row.context = ending.context
        row.result = ending.context if ending.outcome is Outcome.DONE else None
        row.error = ending.error if state in _WITH_ERROR else None
        row.worker = row.queued_at = row.started_at = None
        row.updated_at = now
        row.finished_at = now if row.state in FINAL else None
        if row.state in FINAL:
            self._finish(row, before)
        else:
            # A late result continues a task that had failed.
            self._open[row.id] = row
        return row

    def wake(self, task_id: int, step: int, stage: str, context: Context) -> bool:
        """Lets a task enter the stage for which it waited; False if it does not wait any more."""
        row = self.rows[task_id]
        if row.state is not State.WAITING or row.step != step:
            return False
        row.state = State.PAUSED if row.pausing else State.READY
        row.pausing, row.stage, row.step, row.attempt = False, stage, step + 1, 0
        row.failures = row.losses = 0
        row.context, row.updated_at = context, self._clock.now
        return True

    def _finish(self, row: TaskRow, before: State) -> None:
        self._open.pop(row.id, None)
        if before not in FINAL:
            self._on_end(row, before)

    def cancel(self, ids: Iterable[int]) -> list[TaskRow]:
        """Cancels those of the tasks that are not final; returns them."""
        rows = [self.rows[task_id] for task_id in ids if task_id in self.rows]
        cancelled = [row for row in rows if row.state in sources(Transition.CANCELLED)]
        for row in cancelled:
            before = row.state
            row.state, row.pausing, row.due_at = after(before, Transition.CANCELLED), False, None
            row.updated_at = row.finished_at = self._clock.now
            self._finish(row, before)
        return cancelled

    def change(self, row: TaskRow, verb: Verb) -> bool:
        """Applies an operator's verb; returns whether the task has changed."""
        due_ahead = row.due_at is not None and row.due_at > self._clock.now
        changed = apply(verb, TaskSnapshot(row.state, row.attempt, row.pausing, due_ahead))
        if changed is None:
            return False
        row.state, row.attempt, row.pausing = changed.state, changed.attempt, changed.pausing
        row.updated_at = self._clock.now
        if not changed.due_ahead:
            row.due_at = None
        if verb is Verb.RECOVER:
            row.failures = row.losses = 0
            row.error = row.finished_at = None
            self._open[row.id] = row
        return True

    @property
    def unfinished(self) -> Iterable[TaskRow]:
        """The tasks that are not final."""
        return self._open.values()

    def __iter__(self) -> Iterator[TaskRow]:
        return iter(self.rows.values())
