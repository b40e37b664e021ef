"""Ends the attempts of expired leases, for heartbeats and for `penstock check --repair`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import asyncpg

from penstock.contracts.event import OutboxEntry
from penstock.contracts.result import Failure
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome, conclude
from penstock.postgres.advance import Ending, advance, retry_states


@dataclass(frozen=True, slots=True)
class ExpiredLease:
    """A lease to end.

    Attributes:
        attempt_id: of its attempt.
        worker: its holder; None when no worker claimed the attempt.
        reason: one sentence for the task's history.
        max_attempts: the limit of attempts that the claim named; None leaves it to the task's row
            and its type.
    """

    attempt_id: AttemptId
    worker: str | None
    reason: str
    max_attempts: int | None = None


@dataclass(frozen=True, slots=True)
class Expiry:
    """The effect of expired leases.

    Attributes:
        ended: the attempts that ended, each with its task's type.
        outbox: written with them, to be published.
    """

    ended: list[tuple[Ending, str]]
    outbox: OutboxEntry


async def expire(
    pool: asyncpg.Pool[asyncpg.Record],
    leases: Sequence[ExpiredLease],
    *,
    chance: Callable[[], float],
    source: str,
) -> Expiry:
    """Ends the attempts of leases, unless they have ended or were cancelled before.

    Args:
        pool: of the database.
        leases: at most one an attempt.
        chance: random numbers from 0 to 1, for jitter.
        source: of CloudEvents (see `penstock.settings.Platform`).

    Raises:
        PostgresUnavailable: nothing took effect.
    """
    states = await retry_states(pool, [lease.attempt_id.task_id for lease in leases])
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
        return Expiry([], OutboxEntry())
    advanced = await advance(pool, endings, source=source)
    ended = [(ending, states[ending.fence.id].type) for ending in endings if ending.fence in advanced.applied]
    return Expiry(ended, advanced.outbox)
