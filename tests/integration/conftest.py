"""Fixtures of the integration tests: topics with few partitions, and the callbacks service with a
target."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.support.callback_targets import Bench, Target, bench, target_server
from tests.support.topics import FEW_PARTITIONS

from penstock.kafka.topology import topic_config


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
