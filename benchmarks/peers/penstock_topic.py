"""Penstock, submitted to by its topic: one record per task, with acks=all."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiokafka import AIOKafkaProducer

from benchmarks.peers.penstock_http import prepare
from benchmarks.peers.penstock_worker import TYPE

__all__ = ["prepare", "submitter"]


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Sends a record per task."""
    topic = os.environ["PENSTOCK_PREFIX"] + "submitted"
    async with AIOKafkaProducer(bootstrap_servers=os.environ["PENSTOCK_KAFKA"], acks="all") as producer:

        async def submit(context: dict[str, Any]) -> None:
            await producer.send_and_wait(topic, orjson.dumps({"type": TYPE, "context": context}))

        yield submit
