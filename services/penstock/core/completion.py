"""Decides where a task goes when an attempt ends."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from penstock.core.attempt import AttemptId, count_of
from penstock.core.retry import RetryPolicy
from penstock.core.task import State, Transition, after


class Outcome(StrEnum):
    """How an attempt ended. Workers report all but `expired`, which the platform sets.

    With `handed_back` a worker returns an attempt that it has not run to an end. That counts
    neither as a failure nor as a loss.
    """

    NEXT = "next"
    DONE = "done"
    FAIL = "fail"
    RETRY = "retry"
    HANDED_BACK = "handed_back"
    SPAWN = "spawn"
    WAIT = "wait"
    EXPIRED = "expired"


# The task waits for its children, or for an event.
SUSPENDING = frozenset({Outcome.SPAWN, Outcome.WAIT})

# The shortest delay of an attempt that a worker without the stage's handler hands back: a worker
# that asks for none would take the task again at once, without end.
NO_HANDLER_DELAY_S = 0.25


class Fence(NamedTuple):
    """One attempt of one stage of one task: a commit takes effect only if the task is still in it.

    `step` counts the stages a task has entered, so that a stage visited twice has two steps.
    """

    id: int
    step: int
    stage: str
    attempt: int

    @property
    def attempt_id(self) -> AttemptId:
        """The attempt without its stage, which its step implies."""
        # A third quicker than by its names; it is asked for with each result.
        return tuple.__new__(AttemptId, (self[0], self[1], self[3]))

    def ids(self) -> dict[str, object]:
        """The fields of a log record about this attempt."""
        return {"task": self.id, "step": self.step, "stage": self.stage, "attempt": count_of(self.attempt)}


class FailureCounts(NamedTuple):
    """Failures and losses of the current stage so far.

    Attributes:
        failures: attempts whose handler failed.
        losses: attempts whose worker was lost.
    """

    failures: int = 0
    losses: int = 0


# A stage that was just entered.
NO_FAILURES = FailureCounts()


class Conclusion(NamedTuple):
    """The place of a task after an attempt ended.

    Attributes:
        state: the new state.
        stage: the new stage.
        step: the new step.
        attempt: the new attempt.
        delay_s: seconds until it may be released; 0 when at once.
        counts: failures and losses of the new stage.
        unhandled_s: seconds for which workers without the stage's handler have delayed it.
    """

    state: State
    stage: str
    step: int
    attempt: int
    delay_s: float
    counts: FailureCounts
    unhandled_s: float = 0.0


def conclude(
    fence: Fence,
    outcome: Outcome,
    *,
    next_stage: str | None = None,
    delay_s: float | None = None,
    permanent: bool = False,
    counts: FailureCounts | None = None,
    policy: RetryPolicy | None = None,
    max_losses: int = 3,
    charged: bool = True,
    begun: bool = True,
    chance: float = 0.0,
) -> Conclusion:
    """Decides where a task goes.

    Args:
        fence: the attempt that ended.
        outcome: how it ended.
        next_stage: with NEXT, the stage to enter.
        delay_s: with NEXT, RETRY and HANDED_BACK, the seconds that the worker asks for. With FAIL,
            those that the stage has in place of the policy's delay; None leaves it to the policy.
        permanent: with FAIL, whether the handler ruled out a retry.
        counts: with FAIL, HANDED_BACK and EXPIRED, the failures and losses before this one.
        policy: with FAIL and EXPIRED, the attempts there may be and their delays.
        max_losses: with EXPIRED, how many workers the stage may lose before its task is
            quarantined.
        charged: with EXPIRED, whether the loss counts for the stage (`core.suspects`).
        begun: with EXPIRED, whether the handler may have begun: an attempt that has begun counts
            for the limit of attempts, also when its loss is not charged.
        chance: with FAIL and EXPIRED, a random number from 0 to 1 for the jitter.
    """
    if outcome is Outcome.NEXT:
        assert next_stage is not None
        return Conclusion(
            after(State.RUNNING, Transition.ADVANCED),
            next_stage,
            fence.step + 1,
            0,
            delay_s or 0.0,
            NO_FAILURES,
        )
    attempt = count_of(fence.attempt)
    counts = counts or NO_FAILURES
    if outcome is Outcome.DONE or outcome in SUSPENDING:
        ended = Transition.SUCCEEDED if outcome is Outcome.DONE else Transition.SUSPENDED
        return Conclusion(after(State.RUNNING, ended), fence.stage, fence.step, attempt, 0.0, counts)
    if outcome in (Outcome.RETRY, Outcome.HANDED_BACK):
        # A handler that asks for a retry, to poll a remote job for example, has not failed.
        return Conclusion(
            after(State.RUNNING, Transition.RETRIED),
            fence.stage,
            fence.step,
            attempt + 1,
            delay_s or 0.0,
            counts,
        )
    policy = policy or RetryPolicy()
    end: Transition | None = None
    if outcome is Outcome.EXPIRED:
        # Losses have a limit of their own (W8): a task that kills its workers is quarantined,
        # however often it may fail. Losses also use up attempts: a task that may be tried once is
        # not tried again when its worker is lost.
        if charged:
            counts = FailureCounts(counts.failures, counts.losses + 1)
        failures = counts.failures + counts.losses + (0 if charged else 1)
        if charged and counts.losses >= max_losses:
            end = Transition.QUARANTINED
        elif begun and policy.exhausted(failures):
            end = Transition.FAILED
    else:
        counts = FailureCounts(counts.failures + 1, counts.losses)
        failures = counts.failures
        if permanent or policy.exhausted(failures):
            end = Transition.FAILED
    if end is not None:
        return Conclusion(after(State.RUNNING, end), fence.stage, fence.step, attempt, 0.0, counts)
    wait_s = policy.delay_s(failures, chance) if delay_s is None else delay_s
    return Conclusion(
        after(State.RUNNING, Transition.RETRIED), fence.stage, fence.step, attempt + 1, wait_s, counts
    )


def conclude_unhandled(
    fence: Fence,
    delay_s: float | None,
    *,
    counts: FailureCounts,
    unhandled_s: float,
    no_handler_s: float | None,
) -> Conclusion:
    """Decides where a task goes that a worker without its stage's handler has handed back.

    The delays are added up, and no clock is read: a task that was paused, or had to wait behind
    others, keeps its chance to meet a worker with the handler.

    Args:
        fence: the attempt that was handed back.
        delay_s: that the worker asks for.
        counts: failures and losses of the stage, which stay.
        unhandled_s: seconds for which such workers have delayed the task before.
        no_handler_s: the seconds of such delays after which the task fails; None is without end.
    """
    attempt = count_of(fence.attempt)
    if no_handler_s is not None and unhandled_s >= no_handler_s:
        failed = after(State.RUNNING, Transition.FAILED)
        return Conclusion(failed, fence.stage, fence.step, attempt, 0.0, counts, unhandled_s)
    delay_s = max(delay_s or 0.0, NO_HANDLER_DELAY_S)
    return Conclusion(
        after(State.RUNNING, Transition.RETRIED),
        fence.stage,
        fence.step,
        attempt + 1,
        delay_s,
        counts,
        unhandled_s + delay_s,
    )
