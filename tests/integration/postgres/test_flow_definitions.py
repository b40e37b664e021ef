"""Definitions and those below them: one moment for all versions, mostly one query."""

from __future__ import annotations

import pytest

from penstock.errors import TooLarge
from penstock.postgres import flow_definitions
from penstock.postgres.flow_definitions import MAX_BELOW, DefinitionCache

TASK_TYPES = ()


class Counting:
    """A pool that counts its queries."""

    def __init__(self, pool):
        self.pool = pool
        self.queries = 0

    async def fetch(self, *arguments):
        self.queries += 1
        return await self.pool.fetch(*arguments)


def definition(name, version, *children):
    nodes = {
        f"n{index}": {"kind": "flow", "flow": child} | ({} if pinned is None else {"version": pinned})
        for index, (child, pinned) in enumerate(children)
    }
    return {"flow": name, "version": version, "nodes": nodes or {"a": {"kind": "task", "type": "t"}}}


async def test_versions_are_of_one_moment_and_known_definitions_are_not_read_again(pool):
    """F1: a chain of 30 definitions is reached level by level once, and by one query afterwards.
    Newer versions are seen at once, and named versions are kept."""
    for depth in range(30):
        below = [(f"d{depth + 1}", None)] if depth < 29 else []
        await flow_definitions.insert(pool, definition(f"d{depth}", 1, *below), None)
    counting = Counting(pool)
    cache = DefinitionCache(counting)
    first = await cache.reach([("d0", None)])
    assert first.versions_of(first.get("d0", None)) == {f"d{depth}": 1 for depth in range(1, 30)}
    counting.queries = 0
    again = await cache.reach([("d0", None)])
    assert (again.outlines, counting.queries) == (first.outlines, 1)
    await flow_definitions.insert(pool, definition("d29", 5), None)
    await flow_definitions.insert(pool, definition("d20", 2, ("d29", 1), ("leaf", None)), None)
    await flow_definitions.insert(pool, definition("leaf", 7), None)
    reached = await cache.reach([("d0", None), ("d5", 1), ("none", None), ("d0", 9)])
    versions = reached.versions_of(reached.get("d0", 1))
    # The named version of d29 counts for the node that names it. No other node reaches d29 now.
    assert versions == {f"d{depth}": 1 for depth in range(1, 20)} | {"d20": 2, "d29": 1, "leaf": 7}
    assert reached.get("none", None) is None
    assert reached.get("d0", 9) is None
    hidden = await cache.reach([("d0", None)], visible=lambda name: name != "d3")
    assert {name for name, _ in hidden.outlines} == {"d0", "d1", "d2"}


async def test_a_definition_has_a_bounded_number_below_it(pool):
    """F1: reading a thousand definitions at each start would take seconds."""
    async with pool.acquire() as connection, connection.transaction():
        for number in range(MAX_BELOW + 1):
            await flow_definitions.insert(connection, definition(f"leaf{number}", 1), None)
    cache = DefinitionCache(pool)
    assert (
        len((await cache.reach([(f"leaf{number}", None) for number in range(MAX_BELOW)])).outlines)
        == MAX_BELOW
    )
    with pytest.raises(TooLarge, match="use fewer"):
        await cache.reach([(f"leaf{number}", None) for number in range(MAX_BELOW + 1)])
