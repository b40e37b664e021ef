"""Decides the ends of attempts by what is stored of their tasks.

The services and `penstock.testing` end attempts by these functions, so that both decide alike.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.attempt import AttemptId
from penstock.core.completion import (
    SUSPENDING,
    Conclusion,
    FailureCounts,
    Fence,
    Outcome,
    conclude,
    conclude_unhandled,
)
from penstock.core.leases import Lease
from penstock.core.retry import RetryPolicy
from penstock.core.suspects import LostAttempt, charged, suspects_of
from penstock.core.task import State

# Outcomes of handlers that have done their work; late ones may still count.
GOOD = frozenset({Outcome.NEXT, Outcome.DONE}) | SUSPENDING


@dataclass(frozen=True, slots=True)
class RetryState:
    """The stage of a task, its failures and losses so far, and their limits.

    Attributes:
        type: of the task.
        stage: of the task.
        counts: failures and losses of the stage so far.
        policy: attempts of the stage, and the delays between them.
        max_losses: lost workers of the stage above which the task is quarantined.
        unhandled_s: seconds for which workers without the stage's handler have delayed the task
            since it last ran.
        no_handler_s: the seconds of such delays after which the task fails; None is without end.
    """

    type: str
    stage: str
    counts: FailureCounts
    policy: RetryPolicy
    max_losses: int
    unhandled_s: float = 0.0
    no_handler_s: float | None = None


@dataclass(frozen=True, slots=True)
class ExpiredLease:
    """A lease to end.

    Attributes:
        attempt_id: of its attempt.
        worker: its holder; None when no worker claimed the attempt.
        reason: one sentence for the task's history.
        max_attempts: the limit of attempts that the claim named; None leaves it to the task's row
            and its type.
        begun: whether the handler had begun; None when that is unknown.
    """

    attempt_id: AttemptId
    worker: str | None
    reason: str
    max_attempts: int | None = None
    begun: bool | None = True

    @classmethod
    def of(cls, lease: Lease) -> ExpiredLease:
        """The end of a lease that had no heartbeat for its whole timeout."""
        reason = f"no heartbeat from worker {lease.worker} for {lease.timeout_s:g} s"
        return cls(lease.attempt_id, lease.worker, reason, lease.max_attempts, lease.begun)


class ExpiredAttempt(NamedTuple):
    """The end of an attempt whose lease expired."""

    lease: ExpiredLease
    fence: Fence
    conclusion: Conclusion


def counts_failures(outcome: Outcome) -> bool:
    """Whether the end of an attempt needs its task's retry state.

    An attempt that was handed back has not run, so its task keeps its failures and its losses.
    """
    return outcome in (Outcome.FAIL, Outcome.HANDED_BACK)


def conclude_result(
    fence: Fence,
    outcome: Outcome,
    state: RetryState | None,
    *,
    next_stage: str | None,
    delay_s: float | None,
    permanent: bool,
    max_attempts: int | None,
    no_handler: bool = False,
    chance: Callable[[], float],
) -> Conclusion:
    """Decides the next state of a task from the result of its worker.

    Args:
        fence: the attempt that ended.
        outcome: how it ended.
        state: with an outcome for which `counts_failures` is true.
        next_stage: with NEXT, the stage to enter.
        delay_s: seconds that the handler or its stage asks for; None leaves them to the policy.
        permanent: with FAIL, whether the handler ruled out a retry.
        max_attempts: with FAIL, the stage's own limit of attempts; None is the state's.
        no_handler: with HANDED_BACK, whether the worker had no handler for the stage.
        chance: random numbers from 0 to 1, for the jitter.
    """
    if no_handler and state is not None:
        return conclude_unhandled(
            fence,
            delay_s,
            counts=state.counts,
            unhandled_s=state.unhandled_s,
            no_handler_s=state.no_handler_s,
        )
    policy = state.policy if state else None
    if policy is not None and max_attempts is not None:
        policy = dataclasses.replace(policy, max_attempts=max_attempts)
    return conclude(
        fence,
        outcome,
        next_stage=next_stage,
        delay_s=delay_s,
        permanent=permanent,
        counts=state.counts if state else None,
        policy=policy,
        chance=chance() if policy else 0.0,
    )


def conclude_expired(
    leases: Sequence[ExpiredLease],
    states: Mapping[int, RetryState],
    *,
    others: Sequence[ExpiredLease],
    suspected: Collection[str | None],
    chance: Callable[[], float],
) -> tuple[list[ExpiredAttempt], frozenset[str | None]]:
    """Decides where the tasks of expired leases go.

    Args:
        leases: at most one an attempt.
        states: by task id; a task without one has ended or was cancelled since.
        others: the other leases of the same workers, which have not expired yet.
        suspected: workers whose loss was charged to a suspect before.
        chance: random numbers from 0 to 1, for the jitter.

    Returns:
        The ends, and the workers with a begun suspect, to which their loss is charged.
    """
    charges, suspects_of_workers = _charges([*leases, *others], states, suspected)
    ended = []
    for lease in leases:
        task_id, step, attempt = lease.attempt_id
        state = states.get(task_id)
        if state is None:
            continue
        policy = state.policy
        if lease.max_attempts is not None:
            # The row has this limit only after the claim was written.
            policy = dataclasses.replace(policy, max_attempts=lease.max_attempts)
        fence = Fence(task_id, step, state.stage, attempt)
        conclusion = conclude(
            fence,
            Outcome.EXPIRED,
            counts=state.counts,
            policy=policy,
            max_losses=state.max_losses,
            charged=lease.attempt_id in charges,
            begun=lease.begun is not False,
            chance=chance(),
        )
        ended.append(ExpiredAttempt(lease, fence, conclusion))
    return ended, suspects_of_workers


def _charges(
    leases: Sequence[ExpiredLease], states: Mapping[int, RetryState], suspected: Collection[str | None]
) -> tuple[set[AttemptId], frozenset[str | None]]:
    """The attempts to charge, and the workers with a begun suspect."""
    held_by: defaultdict[str | None, list[LostAttempt[AttemptId]]] = defaultdict(list)
    for lease in leases:
        state = states.get(lease.attempt_id.task_id)
        if state is not None:
            held_by[lease.worker].append(LostAttempt(lease.attempt_id, state.counts.losses, lease.begun))
    charges: set[AttemptId] = set()
    for worker, held in held_by.items():
        charges |= charged(held, suspects_charged=worker in suspected)
    return charges, frozenset(worker for worker, held in held_by.items() if suspects_of(held))


def stored_state(conclusion: Conclusion) -> State:
    """The state that is stored: a next stage with a delay is scheduled, as any delayed task."""
    delayed = conclusion.state is State.READY and conclusion.delay_s > 0
    return State.SCHEDULED if delayed else conclusion.state
