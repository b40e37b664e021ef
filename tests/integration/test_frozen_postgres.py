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
from tests.support.services import make_topics, running_service, write
from tests.support.waiting import wait_until

from penstock import process
from penstock.callbacks.app import create_app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.files import schemas_folder
from penstock.errors import SessionLost, Unavailable
from penstock.flow_owner.app import create_app as flows
from penstock.flow_owner.settings import FlowsSettings
from penstock.heartbeats.app import create_app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.postgres.connection import open_pool
from penstock.stages.app import create_app as stages
from penstock.stages.settings import StagesSettings
from penstock.task_logs.app import create_app as task_logs
from penstock.task_logs.settings import TaskLogsSettings
from penstock.task_sync.app import create_app as task_sync
from penstock.task_sync.settings import TaskSyncSettings

STALL_S = 4.0

SERVICES: dict[str, tuple[Callable[[Any], process.Service], type[Any], str]] = {
    "stages": (stages, StagesSettings, "stage-results"),
    "heartbeats": (heartbeats, HeartbeatsSettings, "heartbeats"),
    "callbacks": (callbacks, CallbacksSettings, "callbacks"),
    "task-sync": (task_sync, TaskSyncSettings, "submitted"),
    "flows": (flows, FlowsSettings, "flows.submitted"),
    "tasklogs": (task_logs, TaskLogsSettings, "task-logs"),
}
EXAMPLES = {"callbacks": "callback", "heartbeats": "heartbeat"}


def example(topic: str) -> Any:
    """A valid record; its callback leads nowhere."""
    name = EXAMPLES.get(topic, topic.replace(".", "-"))
    record = orjson.loads((schemas_folder() / "messages" / f"{name}.example.json").read_bytes())
    return {**record, "target": "http://127.0.0.1:1/"} if "target" in record else record


@pytest.mark.parametrize("name", SERVICES)
async def test_a_frozen_postgresql_is_no_stall(
    kafka_servers: str, prefix: str, database: str, name: str
) -> None:
    """S11, O2a: PostgreSQL freezes while a record is in flight. The service does not end as
    stalled, and goes on with the record when PostgreSQL answers again."""
    create_app, settings_type, topic = SERVICES[name]
    kafka = await make_topics(kafka_servers, prefix)
    proxy = Proxy()
    settings = settings_type(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=await proxy.start(database),
        stall_timeout_s=STALL_S,
        metrics_port=0,
        **({} if name in {"stages", "heartbeats", "callbacks"} else {"objects": "memory:///"}),
    )

    async def service(stopping: asyncio.Event, ready: Callable[[], None]) -> None:
        # As `process.run`: only a lost server lets it begin again.
        while not stopping.is_set():
            try:
                await create_app(settings)(stopping, ready)
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
