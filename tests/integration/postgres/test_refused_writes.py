"""PostgreSQL refuses writes because its disk is full: readiness tells it."""

from __future__ import annotations

import pytest

from penstock.errors import PostgresUnavailable
from penstock.postgres import health, refused_writes
from penstock.postgres.connection import open_pool, translated

FULL = """
DO $$ BEGIN
    RAISE EXCEPTION 'could not extend file "base/5/16404": No space left on device' USING ERRCODE = '53100';
END $$
"""


async def test_readiness_tells_that_the_disk_is_full(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S11, O4: a refused write of this process makes it unready, with the reason, until
    writes are refused no more. The probe itself only reads."""
    monkeypatch.setattr(refused_writes, "_last", None)
    async with open_pool(database, "test") as pool:
        await health.probe(pool)
        with pytest.raises(PostgresUnavailable), translated():
            await pool.execute(FULL)
        with pytest.raises(PostgresUnavailable, match="No space left on device"):
            await health.probe(pool)
        monkeypatch.setattr(refused_writes, "RECENT_S", 0.0)
        await health.probe(pool)
