"""Leases in PostgreSQL: worker and heartbeats partition of each running attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import asyncpg

from penstock.core.attempt import AttemptId
from penstock.core.leases import Lease
from penstock.postgres.connection import translated
from penstock.postgres.queries import fetch, query

# Leases that are read at a time.
ROWS_PER_FETCH = 5_000


async def claimed(
    pool: asyncpg.Pool[asyncpg.Record], leases: Sequence[Lease], by_heartbeat: Sequence[bool]
) -> tuple[set[AttemptId], set[int]]:
    """Writes claims as `running`, with their terms.

    Returns:
        The claims whose attempt is current; and the ids of tasks that another transaction locks,
        whose claims are not written.

    Args:
        pool: of the database.
        leases: of the claims.
        by_heartbeat: of each, whether a heartbeat brought it; such a claim takes no attempt from
            another worker.

    Raises:
        PostgresUnavailable: nothing was written.
    """
    rows = await fetch(
        pool,
        "leases.claimed",
        id=[lease.attempt_id.task_id for lease in leases],
        step=[lease.attempt_id.step for lease in leases],
        attempt=[lease.attempt_id.attempt for lease in leases],
        worker=[lease.worker for lease in leases],
        partition=[lease.partition for lease in leases],
        lease_ms=[round(lease.timeout_s * 1000) for lease in leases],
        max_attempts=[lease.max_attempts for lease in leases],
        by_heartbeat=list(by_heartbeat),
    )
    locked = set(rows.pop()["locked"]) if rows and rows[-1]["locked"] else set()
    return {AttemptId(row["id"], row["step"], row["attempt"]) for row in rows}, locked


async def held(
    pool: asyncpg.Pool[asyncpg.Record],
    partitions: Iterable[int],
    now_s: float,
    *,
    unclaimed: bool | None = None,
) -> list[Lease]:
    """The leases of partitions, each with its whole timeout from `now_s` on.

    Args:
        pool: of the database.
        partitions: of the heartbeats topic.
        now_s: when they begin.
        unclaimed: only those of attempts with which a worker went on and that have no claim, or
            only the others; None is both.

    Raises:
        PostgresUnavailable: no server.
    """
    found: list[Lease] = []
    with translated():
        # By cursor: there may be a hundred thousand, and one answer of all would hold up the loop.
        async with pool.acquire() as connection, connection.transaction(readonly=True):
            cursor = await connection.cursor(query("leases.held"), list(partitions), unclaimed)
            while rows := await cursor.fetch(ROWS_PER_FETCH):
                found += [_lease_of(row, now_s) for row in rows]
    return found


def _lease_of(row: asyncpg.Record, now_s: float) -> Lease:
    return Lease(
        attempt_id=AttemptId(row["id"], row["step"], row["attempt"]),
        worker=row["worker"],
        timeout_s=row["lease_ms"] / 1000,
        seen_s=now_s,
        partition=row["lease_partition"],
        max_attempts=row["max_attempts"],
    )


@dataclass(frozen=True, slots=True)
class Holder:
    """The type and state of a current attempt, and the worker that holds it."""

    type_name: str
    state: str
    worker: str | None


async def holders(
    pool: asyncpg.Pool[asyncpg.Record], attempt_ids: Sequence[AttemptId]
) -> dict[AttemptId, Holder]:
    """Type, state and worker of those attempts that are current; the others are over.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(
        pool,
        "leases.holders",
        [attempt_id.task_id for attempt_id in attempt_ids],
        [attempt_id.step for attempt_id in attempt_ids],
        [attempt_id.attempt for attempt_id in attempt_ids],
    )
    return {
        AttemptId(row["id"], row["step"], row["attempt"]): Holder(row["type"], row["state"], row["worker"])
        for row in rows
    }
