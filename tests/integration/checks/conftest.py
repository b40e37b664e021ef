"""Fixtures of the tests of `penstock check`."""

import pytest
from tests.support.services import make_topics

from penstock.checks import in_transit
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Platform


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    """A check gives what is in transit a second, instead of ten, to arrive."""
    monkeypatch.setattr(in_transit, "SETTLE_S", 1.0)
    monkeypatch.setattr(in_transit, "SEARCH_EVERY_S", 0.2)


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    """A platform with the ready topic of the type `t`."""
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    return Platform(kafka=kafka_servers, prefix=prefix, postgres=database)


@pytest.fixture
async def pool(settings):
    """A pool of the database, with the type `t`."""
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=2, max_attempts=5, events="all"))
        yield pool
