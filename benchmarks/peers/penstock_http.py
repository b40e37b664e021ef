"""Penstock, submitted to by HTTP: one request per task, by the client of the SDK.

One of each service, with default settings. The lease is 30 s instead of 300 s, as the time-outs of
the other peers are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers.penstock_worker import TYPE
from penstock.client import Client


async def prepare() -> None:
    """Registers the type."""
    async with Client() as client:
        await client.register_type(TYPE, first_stage="one", lease_ms=30_000)


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Sends a request per task."""
    async with Client() as client:

        async def submit(context: dict[str, Any]) -> None:
            await client.submit(TYPE, context)

        yield submit
