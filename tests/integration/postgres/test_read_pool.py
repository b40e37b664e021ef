"""The connections of reads, and how many of them one reader uses."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
from tests.support.waiting import in_time, wait_until

from penstock.postgres.read_pool import open_split_pool, reading


async def test_reads_by_id_leave_a_connection_to_other_readers(database: str) -> None:
    """S12: statements of one reader that hang use all connections but one. Another reader is
    answered meanwhile."""
    holder = await asyncpg.connect(database)
    await holder.execute("SELECT pg_advisory_lock(34)")
    async with open_split_pool(database, "test", size=2, reads=3, pooled=False) as pool:

        async def read(actor: str, text: str) -> Any:
            with reading(actor, lists=False):
                return await pool.fetchval(text)

        hang = "SELECT pg_advisory_xact_lock(34)"
        hanging = asyncio.gather(*(read("greedy", hang) for _ in range(6)), return_exceptions=True)
        waits = "SELECT count(*) = 2 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
        await wait_until(lambda: holder.fetchval(waits))
        assert await in_time(read("modest", "SELECT 1")) == 1
        assert not hanging.done()
        await holder.execute("SELECT pg_advisory_unlock(34)")
        await in_time(hanging)
    await holder.close()
