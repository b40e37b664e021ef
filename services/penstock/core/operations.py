"""Bulk operations on tasks: the states that a verb reaches, its changes, and its batches.

The statements of `operations.sql` and `advance.sql` implement `apply` and `state_after_attempt`;
tests compare them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from penstock.core.task import FINAL, State, Transition, after, sources

# Most tasks changed in one transaction. It bounds how long other services wait for the locks of a
# batch.
BATCH_SIZE = 1_000
# Batches a second of an operation with a rate.
BATCHES_PER_SECOND = 10.0


class Subject(StrEnum):
    """The things that an operation changes."""

    TASK = "task"
    FLOW = "flow"


class Verb(StrEnum):
    """Changes that operators make to tasks by filter."""

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    REPRIORITISE = "reprioritise"
    RECOVER = "recover"


_TRANSITIONS = {
    Verb.CANCEL: Transition.CANCELLED,
    Verb.PAUSE: Transition.PAUSED,
    Verb.RESUME: Transition.RESUMED,
    Verb.RECOVER: Transition.RECOVERED,
}


class TaskSnapshot(NamedTuple):
    """The fields of a task that a verb reads and changes.

    Attributes:
        state: its state.
        attempt: number of the attempt within its stage.
        pausing: whether a running task pauses at the end of its stage.
        due_ahead: whether its delay is not over.
    """

    state: State
    attempt: int = 0
    pausing: bool = False
    due_ahead: bool = False


def reachable(verb: Verb) -> frozenset[State]:
    """The states in which a verb changes a task."""
    transition = _TRANSITIONS.get(verb)
    return frozenset(State) - FINAL if transition is None else sources(transition)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """The tasks of an operation; a task matches when it has all given properties.

    Attributes:
        ids: its id is one of these.
        type: name of its type.
        stage: name of its stage.
        key: its concurrency key.
        states: its state is one of these.
        labels: it has all of these.
        priorities: its priority is one of these.
        created_since: it was created then or later.
        created_until: it was created before.
        finished_since: it ended then or later.
        finished_until: it ended before.
        error: a part of the kind or the message of its error; upper and lower case are equal.
    """

    ids: Sequence[int] | None = None
    type: str | None = None
    stage: str | None = None
    key: str | None = None
    states: Sequence[State] | None = None
    labels: Mapping[str, str] | None = None
    priorities: Sequence[int] | None = None
    created_since: datetime | None = None
    created_until: datetime | None = None
    finished_since: datetime | None = None
    finished_until: datetime | None = None
    error: str | None = None

    def states_for(self, verb: Verb) -> list[State]:
        """The states of the filter in which a verb changes a task."""
        return [state for state in State if state in reachable(verb) and state in (self.states or State)]


def apply(verb: Verb, task: TaskSnapshot) -> TaskSnapshot | None:
    """The task after a verb; None when the verb does not change it.

    Pausing a queued task starts a new attempt, because the record of the old attempt is on Kafka
    and a worker may claim it. Recovering starts a new attempt as well, because the history has the
    attempt that ended.
    """
    if task.state not in reachable(verb):
        return None
    if verb is Verb.RESUME and task.state is not State.PAUSED:
        return task._replace(pausing=False) if task.pausing else None
    if verb is Verb.PAUSE and task.state is State.RUNNING:
        return None if task.pausing else task._replace(pausing=True)
    state = after(task.state, _TRANSITIONS[verb]) if verb in _TRANSITIONS else task.state
    if verb is Verb.RESUME and task.due_ahead:
        state = State.SCHEDULED
    new_attempt = verb is Verb.RECOVER or (verb is Verb.PAUSE and task.state is State.QUEUED)
    return TaskSnapshot(
        state,
        task.attempt + new_attempt,
        task.pausing and verb is Verb.REPRIORITISE,
        task.due_ahead and verb not in (Verb.CANCEL, Verb.RECOVER),
    )


def state_after_attempt(state: State, *, pausing: bool) -> State:
    """The state of a task when its attempt ends; a task that is pausing does not run again.

    Args:
        state: the state without a pause.
        pausing: whether the task pauses at the end of its stage.
    """
    return State.PAUSED if pausing and state in (State.READY, State.SCHEDULED) else state


def batch_size(rate: float | None) -> int:
    """The number of tasks in one batch.

    Args:
        rate: tasks a second; None is without a limit.
    """
    return BATCH_SIZE if rate is None else max(1, min(BATCH_SIZE, math.ceil(rate / BATCHES_PER_SECOND)))
