"""The cache of task types: a registered type is known at once, and misses share a query."""

import asyncio

from penstock.errors import PostgresUnavailable
from penstock.postgres import types
from penstock.postgres.types import TaskType, TypeCache

TASK_TYPES = ()


async def test_a_type_is_known_as_soon_as_it_is_registered(pool):
    """T2: the cache asks the database before a name counts as unknown, also right after another
    miss and without a notification."""
    cache = TypeCache(pool)
    for number in range(5):
        name = f"t{number}"
        await cache.require([name])
        assert cache.get(name) is None
        await types.register(pool, TaskType(name=name))
        await cache.require([name])
        assert cache.get(name).name == name


async def test_concurrent_misses_share_a_query(pool, monkeypatch):
    """T2: unknown names cannot flood the database. Each caller's names are in a query that began
    after its call, also when a query fails."""
    cache, queries, gate = TypeCache(pool), [], asyncio.Event()
    await cache.load()
    named = types.named

    async def count(pool, names):
        queries.append(set(names))
        await gate.wait()
        if len(queries) == 2:
            raise PostgresUnavailable("for the test")
        return await named(pool, names)

    monkeypatch.setattr(types, "named", count)
    first = asyncio.ensure_future(cache.require(["first"]))
    await asyncio.sleep(0)
    await types.register(pool, TaskType(name="n7"))
    later = [asyncio.ensure_future(cache.require([f"n{number}"])) for number in range(100)]
    await asyncio.sleep(0)
    gate.set()
    outcomes = await asyncio.gather(first, *later, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [PostgresUnavailable]
    assert queries == [{"first"}, *[{f"n{number}" for number in range(100)}] * 2]
    assert cache.get("n7") is not None
