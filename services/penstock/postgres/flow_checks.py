"""The queries of `penstock check` about flows, and its repairs (flow_checks.sql)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.postgres.checks import Pool
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.repeating import transacted


async def revive(pool: Pool, ids: Sequence[int], *, recount: bool = False) -> int:
    """Lets the owner decide anew about flows; returns how many.

    A node whose task does not exist starts again, with a new task.

    Flows that the owner, or another check, changes at this moment are left to it.

    Args:
        pool: of the database.
        ids: of the flows.
        recount: correct the counters of flows and maps first.

    Raises:
        PostgresUnavailable: nothing was changed.
    """

    async def work(connection: Any) -> int:
        locked = [row["id"] for row in await connection.fetch(query("flow_checks.lock"), list(ids))]
        # Later statements see what the owner has committed before these locks.
        if recount:
            await connection.fetch(query("flow_checks.recount_maps"), locked)
            await connection.fetch(query("flow_checks.recount"), locked)
        await connection.fetch(query("flow_checks.restart"), locked)
        await connection.fetch(query("flow_checks.revive"), locked)
        return len(locked)

    with translated():
        return await transacted(pool, work)


async def clear(pool: Pool, ids: Sequence[int]) -> int:
    """Deletes the limits and waits of flows that have ended; returns how many.

    Raises:
        PostgresUnavailable: nothing was deleted.
    """

    async def work(connection: Any) -> int:
        locked = [row["id"] for row in await connection.fetch(query("flow_checks.lock"), list(ids))]
        return int(await connection.fetchval(query("flow_checks.clear"), locked))

    with translated():
        return await transacted(pool, work)


async def cancel_children(pool: Pool, ids: Sequence[int]) -> int:
    """Cancels running flows whose parent, or waiting task, has ended; returns how many.

    Raises:
        PostgresUnavailable: perhaps none is.
    """
    with translated():
        return int(await pool.fetchval(query("flow_checks.cancel_children"), list(ids)))
