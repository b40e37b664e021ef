"""What becomes of a task when an attempt ends: the decision behind every row the stage processor writes."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from penstock.core.retry import RetryPolicy
from penstock.core.task import Happening, State, after


class Outcome(StrEnum):
    """How an attempt ended. The first four are a worker's to report, `expired` the platform's."""

    NEXT = "next"
    DONE = "done"
    FAIL = "fail"
    RETRY = "retry"
    EXPIRED = "expired"


class Fence(NamedTuple):
    """Names one attempt of one stage of one task: what a commit must still find in order to take effect.

    `step` counts the stages a task has entered, so that a stage visited twice is not the same attempt twice.
    """

    id: int
    step: int
    stage: str
    attempt: int

    def ids(self) -> dict[str, object]:
        """By which an entry of a log can be found."""
        return {"task": self.id, "step": self.step, "stage": self.stage, "attempt": self.attempt}


class Tally(NamedTuple):
    """Vain tries of the current stage so far.

    Attributes:
        failures: attempts whose handler failed.
        losses: attempts whose worker was lost.
    """

    failures: int = 0
    losses: int = 0


# A stage just entered.
UNTRIED = Tally()


class Verdict(NamedTuple):
    """Where a task goes when an attempt ends.

    Attributes:
        state: the new state.
        stage: the new stage.
        step: the new step.
        attempt: the new attempt.
        delay_s: seconds until it may be released; 0 when at once.
        tally: vain tries of the stage it is now in.
    """

    state: State
    stage: str
    step: int
    attempt: int
    delay_s: float
    tally: Tally


def conclude(
    fence: Fence,
    outcome: Outcome,
    *,
    next_stage: str | None = None,
    delay_s: float = 0.0,
    permanent: bool = False,
    tally: Tally | None = None,
    policy: RetryPolicy | None = None,
    max_losses: int = 3,
    chance: float = 0.0,
) -> Verdict:
    """Decides what becomes of a task.

    Args:
        fence: the attempt that ended.
        outcome: how it ended.
        next_stage: with NEXT, the stage to enter.
        delay_s: with RETRY, the seconds the handler asked for.
        permanent: with FAIL, the handler knows that trying again is useless.
        tally: with FAIL and EXPIRED, the vain tries before this one.
        policy: with FAIL and EXPIRED, how often to try.
        max_losses: with EXPIRED, how many workers the stage may lose before its task is quarantined.
        chance: with FAIL and EXPIRED, a random number from 0 to 1 for the jitter.
    """
    if outcome is Outcome.NEXT:
        assert next_stage is not None
        return Verdict(
            after(State.RUNNING, Happening.ADVANCED), next_stage, fence.step + 1, 0, delay_s, UNTRIED
        )
    tally = tally or UNTRIED
    if outcome is Outcome.DONE:
        return Verdict(
            after(State.RUNNING, Happening.SUCCEEDED), fence.stage, fence.step, fence.attempt, 0.0, tally
        )
    if outcome is Outcome.RETRY:
        # Asked for by the handler (polling a remote job, say): not a vain try, so not counted.
        return Verdict(
            after(State.RUNNING, Happening.RETRIED),
            fence.stage,
            fence.step,
            fence.attempt + 1,
            delay_s,
            tally,
        )
    policy = policy or RetryPolicy()
    end: Happening | None = None
    if outcome is Outcome.EXPIRED:
        # Counted apart (W8): a task that kills its workers is no task that fails, and one that may be tried only
        # once is not tried again because its worker was lost.
        tally = Tally(tally.failures, tally.losses + 1)
        tries = tally.failures + tally.losses
        if tally.losses >= max_losses:
            end = Happening.QUARANTINED
        elif policy.exhausted(tries):
            end = Happening.FAILED
    else:
        tally = Tally(tally.failures + 1, tally.losses)
        tries = tally.failures
        if permanent or policy.exhausted(tries):
            end = Happening.FAILED
    if end is not None:
        return Verdict(after(State.RUNNING, end), fence.stage, fence.step, fence.attempt, 0.0, tally)
    wait_s = policy.delay_s(tries, chance)
    return Verdict(
        after(State.RUNNING, Happening.RETRIED), fence.stage, fence.step, fence.attempt + 1, wait_s, tally
    )
