"""Decides whether a worker goes on with the next stage of a task by itself.

Between two short stages the way through PostgreSQL's backlog, task-sync and a ready record costs
several times what a handler takes. Where nothing limits or orders the tasks of a type, a worker
skips it: once the result of a stage is on Kafka, it begins the next stage with the context of that
result. The result says so, and its commit makes the task `running` instead of `ready`.

The worker chooses the number of that attempt. Another worker may have run the stage before, too,
and have gone on with another context: its attempt has another number, so the fence knows whose
result the task has taken.

Pure: no I/O, no clock. When in doubt the task becomes ready. A pause, a limit or a more urgent task
waits for `GOES_ON_S` at most: a worker goes on for so long after it took the ready record.
"""

from __future__ import annotations

from penstock.core.attempt import CHOSEN

# Seconds. Stages that last longer do not miss what the way costs.
GOES_ON_S = 1.0
# The largest number is below 2 ** 31.
NUMBERS = 1_147_000_000


def may_go_on(*, proven: bool, suspect: bool) -> bool:
    """Whether the ready record of a task of an unlimited type permits its worker to go on.

    Args:
        proven: reports need the token of their attempt, and only a ready record has one.
        suspect: the stage has lost a worker.
    """
    return not (proven or suspect)


def follow_number(chance: float) -> int:
    """The number of an attempt with which a worker goes on.

    Args:
        chance: a random number from 0 to below 1.
    """
    return CHOSEN + int(chance * NUMBERS)


def is_follow(attempt: int) -> bool:
    """Whether a worker has chosen the number of an attempt, or of one before it in its step."""
    return attempt >= CHOSEN
