"""Ends the attempts of expired leases, for heartbeats and for `penstock check --repair`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import asyncpg

from penstock.contracts.event import OutboxEntry
from penstock.contracts.result import Failure
from penstock.core.completion import Outcome
from penstock.core.endings import ExpiredLease, conclude_expired
from penstock.postgres.advance import advance, retry_states
from penstock.postgres.ending import Ending


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
    expired, suspects_of_workers = conclude_expired(
        leases, states, others=others, suspected=suspected, chance=chance
    )
    endings = [
        Ending(
            fence=each.fence,
            outcome=Outcome.EXPIRED,
            conclusion=each.conclusion,
            worker=each.lease.worker,
            error=Failure(kind="LeaseExpired", message=each.lease.reason),
        )
        for each in expired
    ]
    if not endings:
        return Expiry([], OutboxEntry(), suspects_of_workers)
    advanced = await advance(pool, endings, waits=waits, source=source)
    ended = [(ending, states[ending.fence.id].type) for ending in endings if ending.fence in advanced.applied]
    return Expiry(ended, advanced.outbox, suspects_of_workers, advanced.locked)
