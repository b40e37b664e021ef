"""Leases as PostgreSQL knows them: who runs what, and over which partition of heartbeats it is heard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import asyncpg

from penstock.core.leases import Key, Lease
from penstock.postgres.connection import translated
from penstock.postgres.queries import query


async def claimed(
    pool: asyncpg.Pool[asyncpg.Record], leases: Sequence[Lease], beaten: Sequence[bool]
) -> set[Key]:
    """Writes claims as `running`, each with what it was claimed with; returns those whose attempt is still to be run.

    Args:
        pool: of the database.
        leases: as they were claimed.
        beaten: of each, whether it was only beaten: then it is written, and returned, unless another worker holds it.

    Raises:
        PostgresUnavailable: nothing was written.
    """
    with translated():
        rows = await pool.fetch(
            query("leases.claimed"),
            [lease.key[0] for lease in leases],
            [lease.key[1] for lease in leases],
            [lease.key[2] for lease in leases],
            [lease.worker for lease in leases],
            [lease.partition for lease in leases],
            [round(lease.timeout_s * 1000) for lease in leases],
            [lease.max_attempts for lease in leases],
            list(beaten),
        )
    return {(row["id"], row["step"], row["attempt"]) for row in rows}


async def held(pool: asyncpg.Pool[asyncpg.Record], partitions: Iterable[int], now_s: float) -> list[Lease]:
    """The leases to restore for partitions, each with the whole timeout it was claimed with from `now_s` on.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await pool.fetch(query("leases.held"), list(partitions))
    return [
        Lease(
            key=(row["id"], row["step"], row["attempt"]),
            worker=row["worker"],
            timeout_s=row["lease_ms"] / 1000,
            seen_s=now_s,
            partition=row["lease_partition"],
            max_attempts=row["max_attempts"],
        )
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Holder:
    """What became of an attempt that somebody holds, or believes to."""

    state: str
    worker: str | None


async def holders(pool: asyncpg.Pool[asyncpg.Record], keys: Sequence[Key]) -> dict[Key, Holder]:
    """Of attempts that are their tasks' latest: state and worker; the others are over.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await pool.fetch(
            query("leases.holders"), [k[0] for k in keys], [k[1] for k in keys], [k[2] for k in keys]
        )
    return {(row["id"], row["step"], row["attempt"]): Holder(row["state"], row["worker"]) for row in rows}
