"""What several tests of the callbacks service share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.callback_targets import Bench, Target, bench, target_server


@pytest.fixture
async def platform(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[Bench]:
    async with bench(kafka_servers, prefix, database) as made:
        yield made


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    async with target_server() as made:
        yield made
