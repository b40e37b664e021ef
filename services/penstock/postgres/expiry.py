"""Ends the attempts of expired leases, for heartbeats and for `penstock check --repair`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import asyncpg

from penstock.contracts.event import OutboxEntry
from penstock.contracts.result import Failure
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.suspects import Held, charged, suspects_of
from penstock.postgres.advance import Ending, RetryState, advance, retry_states


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


@dataclass(frozen=True, slots=True)
class Expiry:
    """The effect of expired leases.

    Attributes:
        ended: the attempts that ended, each with its task's type.
        outbox: written with them, to be published.
        suspected: workers with a begun suspect, to which their loss is charged.
        locked: ids of tasks that another transaction locks, whose leases have not ended.
    """

    ended: list[tuple[Ending, str]]
    outbox: OutboxEntry
    suspected: frozenset[str | None] = frozenset()
    locked: frozenset[int] = frozenset()


async def expire(
    pool: asyncpg.Pool[asyncpg.Record],
    leases: Sequence[ExpiredLease],
    *,
    chance: Callable[[], float],
    source: str,
    others: Sequence[ExpiredLease] = (),
    suspected: Collection[str | None] = (),
    waits: bool = True,
) -> Expiry:
    """Ends the attempts of leases, unless they have ended or were cancelled before.

    Args:
        pool: of the database.
        leases: at most one an attempt.
        chance: random numbers from 0 to 1, for jitter.
        source: of CloudEvents (see `penstock.settings.Platform`).
        others: the other leases of the same workers, which have not expired yet.
        suspected: workers whose loss was charged to a suspect before.
        waits: whether to wait for tasks that another transaction locks; else they are `locked`.

    Raises:
        PostgresUnavailable: nothing took effect.
    """
    states = await retry_states(pool, [lease.attempt_id.task_id for lease in (*leases, *others)])
    charges, suspects_of_workers = _charges([*leases, *others], states, suspected)
    endings = []
    for lease in leases:
        task_id, step, attempt = lease.attempt_id
        state = states.get(task_id)
        if state is None:
            continue  # ended or cancelled since
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
        endings.append(
            Ending(
                fence=fence,
                outcome=Outcome.EXPIRED,
                conclusion=conclusion,
                worker=lease.worker,
                error=Failure(kind="LeaseExpired", message=lease.reason),
            )
        )
    if not endings:
        return Expiry([], OutboxEntry(), suspects_of_workers)
    advanced = await advance(pool, endings, waits=waits, source=source)
    ended = [(ending, states[ending.fence.id].type) for ending in endings if ending.fence in advanced.applied]
    return Expiry(ended, advanced.outbox, suspects_of_workers, advanced.locked)


def _charges(
    leases: Sequence[ExpiredLease], states: Mapping[int, RetryState], suspected: Collection[str | None]
) -> tuple[set[AttemptId], frozenset[str | None]]:
    """The attempts to charge, and the workers with a begun suspect."""
    held_by: defaultdict[str | None, list[Held[AttemptId]]] = defaultdict(list)
    for lease in leases:
        state = states.get(lease.attempt_id.task_id)
        if state is not None:
            held_by[lease.worker].append(Held(lease.attempt_id, state.counts.losses, lease.begun))
    charges: set[AttemptId] = set()
    for worker, held in held_by.items():
        charges |= charged(held, suspects_charged=worker in suspected)
    return charges, frozenset(worker for worker, held in held_by.items() if suspects_of(held))
