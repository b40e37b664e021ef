"""The fixtures that every integration test stands on."""

from __future__ import annotations

import asyncpg

_NAMES = []


async def test_a_test_has_a_migrated_database_of_its_own(database):
    """The tables are there, and what is left in them is nobody else's."""
    connection = await asyncpg.connect(database)
    try:
        assert await connection.fetchval("SELECT count(*) FROM penstock.task") == 0
        await connection.execute("CREATE TABLE public.mine ()")
    finally:
        await connection.close()
    _NAMES.append(database)


async def test_the_next_test_has_another(database, prefix):
    """Not the database of the test before, and a prefix fit for topics."""
    connection = await asyncpg.connect(database)
    try:
        assert await connection.fetchval("SELECT to_regclass('public.mine')") is None
    finally:
        await connection.close()
    assert database not in _NAMES
    assert prefix.endswith(".")
