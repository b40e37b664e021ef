"""The states of a task and its transitions, in one table.

    scheduled ─due▶ ready ─released▶ queued ─claimed▶ running ─┬▶ ready        next stage, attempt 0
                      ▲                                        ├▶ waiting    children, event, timer
                      ├── attempt + 1, after back-off ◀────────┤  expired · failed, attempts left
                      │                                        ├▶ succeeded
    paused · cancelled · quarantined                           └▶ failed ─recovered▶ ready

    scheduled · ready · queued ─paused▶ paused ─resumed▶ ready · scheduled, by the delay left
                       running ─paused▶ running, and paused at the end of its stage

    scheduled · ready · paused · failed · quarantined ─accepted late▶ running

A late result is of an attempt that expired. While its stage is unfinished, the attempt is `running`
again for the statement that ends it. A task that is `paused` is paused again at the end of its
stage. The stage of a task that is `failed` or `quarantined` is unfinished if its last attempt
expired.

A result may find its task still `queued`, because a short claim is never written to PostgreSQL (see
`penstock.heartbeats`). So every transition out of `running` is also one out of `queued`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

from penstock.errors import Conflict


class State(StrEnum):
    """The state of a task. The words are the same in the schema, the API and the docs."""

    SCHEDULED = "scheduled"
    READY = "ready"
    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"


class Transition(StrEnum):
    """The events that move a task."""

    DUE = "due"
    RELEASED = "released"
    LOST = "lost"
    WITHDRAWN = "withdrawn"
    CLAIMED = "claimed"
    ADVANCED = "advanced"
    RETRIED = "retried"
    SUSPENDED = "suspended"
    WOKEN = "woken"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    RESUMED = "resumed"
    QUARANTINED = "quarantined"
    RECOVERED = "recovered"
    ACCEPTED_LATE = "accepted_late"


class Priority(IntEnum):
    """Five levels; the smaller number goes first."""

    HIGHEST = 0
    HIGH = 1
    MEDIUM = 2
    LOW = 3
    LOWEST = 4


FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.QUARANTINED})
# A worker may hold a task in these, so a result or a lease can end the attempt.
IN_FLIGHT = frozenset({State.QUEUED, State.RUNNING})

_OPEN = frozenset(State) - FINAL

TRANSITIONS: dict[tuple[State, Transition], State] = {
    (State.SCHEDULED, Transition.DUE): State.READY,
    (State.READY, Transition.RELEASED): State.QUEUED,
    (State.QUEUED, Transition.CLAIMED): State.RUNNING,
    # Its record is lost: Kafka no longer has it, and no worker has claimed it.
    (State.QUEUED, Transition.LOST): State.READY,
    # Its record waits behind a busy worker; with a new attempt, so that the record is stale.
    (State.QUEUED, Transition.WITHDRAWN): State.READY,
    # Another worker claims a record that was delivered twice: the lease moves to it.
    (State.RUNNING, Transition.CLAIMED): State.RUNNING,
    **{
        (state, transition): target
        for state in IN_FLIGHT
        for transition, target in (
            (Transition.ADVANCED, State.READY),
            (Transition.RETRIED, State.SCHEDULED),
            (Transition.SUSPENDED, State.WAITING),
            (Transition.SUCCEEDED, State.SUCCEEDED),
            (Transition.FAILED, State.FAILED),
            (Transition.QUARANTINED, State.QUARANTINED),
        )
    },
    (State.WAITING, Transition.WOKEN): State.READY,
    # A task with delay left returns to `scheduled`: `penstock.core.operations`.
    (State.PAUSED, Transition.RESUMED): State.READY,
    # With a new attempt, so that the record on Kafka is stale.
    **{(state, Transition.PAUSED): State.PAUSED for state in (State.SCHEDULED, State.READY, State.QUEUED)},
    # Its stage ends first: the task is marked, and the mark can be removed.
    (State.RUNNING, Transition.PAUSED): State.RUNNING,
    (State.RUNNING, Transition.RESUMED): State.RUNNING,
    **{(state, Transition.CANCELLED): State.CANCELLED for state in _OPEN},
    **{(state, Transition.RECOVERED): State.READY for state in (State.FAILED, State.QUARANTINED)},
    # Then the result ends the attempt, by a transition out of `running`.
    **{
        (state, Transition.ACCEPTED_LATE): State.RUNNING
        for state in frozenset(State) - {State.WAITING, State.SUCCEEDED, State.CANCELLED}
    },
}


def after(state: State, transition: Transition) -> State:
    """The state of a task after a transition.

    Raises:
        Conflict: the state has no such transition.
    """
    target = TRANSITIONS.get((state, transition))
    if target is None:
        raise Conflict(f"a task that is {state} cannot be {transition}")
    return target


def sources(transition: Transition) -> frozenset[State]:
    """The states that have a transition; SQL fences are tested against these."""
    return frozenset(state for state, each in TRANSITIONS if each is transition)
