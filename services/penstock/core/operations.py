"""What operators do to many tasks at once: which tasks each verb can reach, what it makes of one, and at what pace.

`applied` and `onward` are what the statements of `operations.sql` and `advance.sql` do; these are tested against them.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

from penstock.core.task import FINAL, Happening, State, after, sources

# Tasks changed in one transaction: a batch that fails is small, and nobody waits long behind its locks.
AT_A_TIME = 1_000
# Batches a second of an operation that has a rate.
BATCHES_A_SECOND = 10.0


class Verb(StrEnum):
    """What can be done to tasks by filter."""

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    REPRIORITISE = "reprioritise"
    RECOVER = "recover"


_HAPPENING = {
    Verb.CANCEL: Happening.CANCELLED,
    Verb.PAUSE: Happening.PAUSED,
    Verb.RESUME: Happening.RESUMED,
    Verb.RECOVER: Happening.RECOVERED,
}


class Standing(NamedTuple):
    """What a verb looks at in a task, and may change.

    Attributes:
        state: where it is.
        attempt: which run of its stage.
        pausing: while running: it is to be paused when its stage ends.
        due_ahead: its delay is not over.
    """

    state: State
    attempt: int = 0
    pausing: bool = False
    due_ahead: bool = False


def reachable(verb: Verb) -> frozenset[State]:
    """The states in which a verb changes a task."""
    if verb is Verb.RESUME:
        # A mark may be left on what does not run: by a process of a version that did not know of it.
        return frozenset(State) - FINAL
    happening = _HAPPENING.get(verb)
    return frozenset(State) - FINAL if happening is None else sources(happening)


def applied(verb: Verb, task: Standing) -> Standing | None:
    """What a verb makes of a task; None when there is nothing to change.

    A queued task that is paused leaves its attempt: the record on Kafka speaks of one that is over. So does a
    recovered one, since the attempt it ended with has its place in the history.
    """
    if task.state not in reachable(verb):
        return None
    if verb is Verb.RESUME and task.state is not State.PAUSED:
        return task._replace(pausing=False) if task.pausing else None
    if verb is Verb.PAUSE and task.state is State.RUNNING:
        return None if task.pausing else task._replace(pausing=True)
    state = after(task.state, _HAPPENING[verb]) if verb in _HAPPENING else task.state
    if verb is Verb.RESUME and task.due_ahead:
        state = State.SCHEDULED
    moved_on = verb is Verb.RECOVER or (verb is Verb.PAUSE and task.state is State.QUEUED)
    return Standing(
        state,
        task.attempt + moved_on,
        task.pausing and verb is Verb.REPRIORITISE,
        task.due_ahead and verb not in (Verb.CANCEL, Verb.RECOVER),
    )


def onward(state: State, *, pausing: bool) -> State:
    """Where a task goes that would go to `state` when its attempt ends: what is to be paused does not go on by itself."""
    return State.PAUSED if pausing and state in (State.READY, State.SCHEDULED) else state


def batch(rate: float | None) -> int:
    """How many tasks to change at a time.

    Args:
        rate: tasks a second; None is as many as go.
    """
    return AT_A_TIME if rate is None else max(1, min(AT_A_TIME, math.ceil(rate / BATCHES_A_SECOND)))
