"""PostgreSQL keeps its connections and answers nothing, for longer than the stall timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from tests.support.gateways import Proxy
from tests.support.service_apps import app_of
from tests.support.services import make_topics, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.files import schemas_folder
from penstock.errors import SessionLost, Unavailable
from penstock.kafka.topology.services import SERVICES
from penstock.postgres.connection import open_pool

STALL_S = 4.0

# A topic of each service that reads one.
TOPICS = {name: service.reads[0].name for name, service in SERVICES.items() if service.reads}
EXAMPLES = {"callbacks": "callback", "heartbeats": "heartbeat"}


def example(topic: str) -> Any:
    """A valid record; its callback leads nowhere."""
    name = EXAMPLES.get(topic, topic.replace(".", "-"))
    record = orjson.loads((schemas_folder() / "messages" / f"{name}.example.json").read_bytes())
    return {**record, "target": "http://127.0.0.1:1/"} if "target" in record else record


@pytest.mark.parametrize("name", TOPICS)
async def test_a_frozen_postgresql_is_no_stall(
    kafka_servers: str, prefix: str, database: str, name: str
) -> None:
    """S11, O2a: PostgreSQL freezes while a record is in flight. The service does not end as
    stalled, and goes on with the record when PostgreSQL answers again."""
    topic = TOPICS[name]
    kafka = await make_topics(kafka_servers, prefix)
    proxy = Proxy()
    app = app_of(
        name,
        kafka=kafka_servers,
        prefix=prefix,
        postgres=await proxy.start(database),
        stall_timeout_s=STALL_S,
        metrics_port=0,
    )

    async def service(stopping: asyncio.Event, ready: Callable[[], None]) -> None:
        # As `process.run`: only a lost server lets it begin again.
        while not stopping.is_set():
            try:
                await app(stopping, ready)
            except (Unavailable, SessionLost):
                await asyncio.sleep(0.1)

    async with (
        AsyncExitStack() as stack,
        open_pool(database, "test") as pool,
        AIOKafkaConsumer(
            bootstrap_servers=kafka_servers, group_id=f"{prefix}{name}", enable_auto_commit=False
        ) as group,
    ):
        stack.push_async_callback(proxy.cut)
        running = await stack.enter_async_context(running_service(service))
        proxy.flowing.clear()
        stack.callback(proxy.flowing.set)
        await write(kafka.kafka, f"{prefix}{topic}", example(topic), partition=0)
        await asyncio.wait({running}, timeout=2.5 * STALL_S)
        assert not running.done()
        proxy.flowing.set()

        async def is_taken() -> bool:
            stored = await pool.fetchval(
                "SELECT next_offset FROM ingested WHERE topic = $1 AND partition = 0", f"{prefix}{topic}"
            )
            return 1 in (stored, await group.committed(TopicPartition(f"{prefix}{topic}", 0)))

        await wait_until(is_taken, what="the record is taken")
