"""How submissions of concurrent requests fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.waiting import in_time

from penstock.errors import PostgresUnavailable
from penstock.gateway.batcher import SubmissionBatcher


class ClosingPool:
    """A pool that cancels those who wait for a connection."""

    async def acquire(self, **_options: object) -> None:
        raise asyncio.CancelledError


async def _insert(_connection: Any, submissions: Sequence[str]) -> Sequence[str]:
    return submissions


async def test_a_connection_that_closes_itself_is_an_outage() -> None:
    """O1: each request is answered, and so is the next one. The writer ended, and no request was
    answered any more."""
    pool: Any = ClosingPool()
    batcher: SubmissionBatcher[str, str] = SubmissionBatcher(pool, 1.0, _insert)
    for _ in range(2):
        with pytest.raises(PostgresUnavailable):
            await in_time(batcher.submit(["a"]))
