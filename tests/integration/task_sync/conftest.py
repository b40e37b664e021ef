"""Fixtures of the tests of task-sync."""

from contextlib import AsyncExitStack

import pytest
from tests.support.pipeline import System
from tests.support.services import make_topics

from penstock.postgres import types
from penstock.postgres.connection import open_pool


@pytest.fixture
async def pool(settings):
    """A pool of the database, with the type `t`."""
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=1))
        yield pool


@pytest.fixture
async def system(kafka_servers, prefix, database):
    """A platform of which a test starts the services, with the type `t`."""
    await make_topics(kafka_servers, prefix)
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        yield System(kafka_servers, prefix, database, stack, pool)
