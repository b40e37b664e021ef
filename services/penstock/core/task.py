"""What a task can be and what can happen to it: the one transition table.

    scheduled ─due▶ ready ─released▶ queued ─claimed▶ running ─┬▶ ready        next stage, attempt 0
                      ▲                                        ├▶ waiting      children, event, timer
                      ├── attempt + 1, after back-off ◀────────┤  expired · failed with attempts left
                      │                                        ├▶ succeeded
    paused · cancelled · quarantined                           └▶ failed ─recovered▶ ready

    scheduled · ready · queued ─paused▶ paused ─resumed▶ ready · scheduled, by the delay that is left
                       running ─paused▶ running, and then paused where it would go on

A result may find its task still `queued`: claims are written to PostgreSQL only once they have lived for a
moment (see `penstock.heartbeats`), so every transition out of `running` is also one out of `queued`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

from penstock.errors import Conflict


class State(StrEnum):
    """Where a task is. The words are the same in the schema, the API and the docs."""

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


class Happening(StrEnum):
    """What can happen to a task."""

    DUE = "due"
    RELEASED = "released"
    LOST = "lost"
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


class Priority(IntEnum):
    """Five levels; the smaller number goes first."""

    HIGHEST = 0
    HIGH = 1
    MEDIUM = 2
    LOW = 3
    LOWEST = 4


FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.QUARANTINED})
# A worker may hold a task in these, so a result or a lease can end the attempt.
IN_HAND = frozenset({State.QUEUED, State.RUNNING})

_OPEN = frozenset(State) - FINAL

TRANSITIONS: dict[tuple[State, Happening], State] = {
    (State.SCHEDULED, Happening.DUE): State.READY,
    (State.READY, Happening.RELEASED): State.QUEUED,
    (State.QUEUED, Happening.CLAIMED): State.RUNNING,
    # Its record is: Kafka no longer has it, and nobody has claimed it.
    (State.QUEUED, Happening.LOST): State.READY,
    # Another worker claims a record that was delivered twice: the lease moves to it.
    (State.RUNNING, Happening.CLAIMED): State.RUNNING,
    **{
        (state, happening): target
        for state in IN_HAND
        for happening, target in (
            (Happening.ADVANCED, State.READY),
            (Happening.RETRIED, State.SCHEDULED),
            (Happening.SUSPENDED, State.WAITING),
            (Happening.SUCCEEDED, State.SUCCEEDED),
            (Happening.FAILED, State.FAILED),
            (Happening.QUARANTINED, State.QUARANTINED),
        )
    },
    (State.WAITING, Happening.WOKEN): State.READY,
    # What has a delay left goes back to it: `penstock.core.operations`.
    (State.PAUSED, Happening.RESUMED): State.READY,
    # As a new attempt: the record on Kafka is left one that is over.
    **{(state, Happening.PAUSED): State.PAUSED for state in (State.SCHEDULED, State.READY, State.QUEUED)},
    # Its stage ends first: it is marked, and the mark can be taken away.
    (State.RUNNING, Happening.PAUSED): State.RUNNING,
    (State.RUNNING, Happening.RESUMED): State.RUNNING,
    **{(state, Happening.CANCELLED): State.CANCELLED for state in _OPEN},
    **{(state, Happening.RECOVERED): State.READY for state in (State.FAILED, State.QUARANTINED)},
}


def after(state: State, happening: Happening) -> State:
    """The state a task is in after something happened to it.

    Raises:
        Conflict: that cannot happen to a task in this state.
    """
    target = TRANSITIONS.get((state, happening))
    if target is None:
        raise Conflict(f"a task that is {state} cannot be {happening}")
    return target


def sources(happening: Happening) -> frozenset[State]:
    """The states in which something can happen; SQL fences are tested against these."""
    return frozenset(state for state, what in TRANSITIONS if what is happening)
