"""A database with task types, for tests of flows."""

from __future__ import annotations

import pytest

from penstock.postgres import types
from penstock.postgres.connection import open_pool


@pytest.fixture
async def pool(database):
    async with open_pool(database, "test") as pool:
        for name in ("a", "b"):
            await types.register(pool, types.TaskType(name=name, partitions=1))
        yield pool
