"""Fixtures of the integration tests: topics with few partitions, a database with task types, a
gateway, a deployment, and the callbacks service with a target."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.support.callback_targets import Bench, Target, bench, target_server
from tests.support.gateways import Caller, running_gateway
from tests.support.pipeline import System
from tests.support.services import make_topics
from tests.support.topics import FEW_PARTITIONS

from penstock.kafka.topology import topic_config
from penstock.postgres import types
from penstock.postgres.connection import open_pool

# The task types of a module without TASK_TYPES of its own.
_TASK_TYPES = (types.TaskType(name="t", partitions=2),)


@pytest.fixture(autouse=True)
def _few_partitions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declares the topics of tests, for this process and its children, unless the test needs the
    real declaration."""
    if request.node.get_closest_marker("declared_topics"):
        return
    read = topic_config._read
    monkeypatch.setattr(topic_config, "_read", lambda file: read(file or str(FEW_PARTITIONS)))
    monkeypatch.setenv("PENSTOCK_TOPICS_FILE", str(FEW_PARTITIONS))


@pytest.fixture
async def platform(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[Bench]:
    async with bench(kafka_servers, prefix, database) as made:
        yield made


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    async with target_server() as made:
        yield made


@pytest.fixture
async def where(kafka_servers: str, prefix: str, database: str, tmp_path: Path) -> dict[str, Any]:
    """Settings that lead to this test's topics, database and objects. The topics exist."""
    await make_topics(kafka_servers, prefix)
    objects = tmp_path / "objects"
    objects.mkdir(exist_ok=True)
    return {"kafka": kafka_servers, "prefix": prefix, "postgres": database, "objects": objects.as_uri()}


@pytest.fixture
async def pool(request: pytest.FixtureRequest, database: str) -> AsyncIterator[asyncpg.Pool]:
    """A pool of the database, with the task types that the module names as TASK_TYPES."""
    async with open_pool(database, "test", size=8) as opened:
        for task_type in getattr(request.module, "TASK_TYPES", _TASK_TYPES):
            await types.register(opened, task_type)
        yield opened


@pytest.fixture
async def gateway(where: dict[str, Any]) -> AsyncIterator[Caller]:
    """A gateway, with the type `media`."""
    async with running_gateway(**where) as caller:
        await caller.post("/types", {"name": "media"})
        yield caller


@pytest.fixture
async def system(where: dict[str, Any], pool: asyncpg.Pool) -> AsyncIterator[System]:
    """A deployment of which a test starts the services."""
    async with AsyncExitStack() as stack:
        yield System(where["kafka"], where["prefix"], where["postgres"], stack, pool)
