"""A callback target on loopback that answers as a test chooses, and a callbacks service that
calls it."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import orjson
from aiohttp import web
from aiokafka import AIOKafkaProducer, TopicPartition

from penstock.callbacks.app import create_app
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.signing import SymmetricKey
from penstock.contracts.event import Callback
from penstock.core.target import TargetId, target_of
from penstock.kafka.client.connection import make_consumer, make_producer, running
from penstock.kafka.processing.outbox import send_callbacks
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import CALLBACKS, PLATFORM
from penstock.postgres.outbox import callback_columns
from penstock.postgres.queries import bound
from penstock.settings import Kafka
from tests.support.waiting import in_time, wait_until

SECRET = "whsec_" + base64.b64encode(b"new" * 10).decode()
OLD_SECRET = "whsec_" + base64.b64encode(b"old" * 10).decode()
# The targets listen here; the service refuses every other address that is not public.
LOOPBACK = ("127.0.0.0/8", "::1/128")

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Call:
    """One call that the target received."""

    id: str
    path: str
    headers: dict[str, str]
    body: bytes
    at_s: float


@dataclass
class Target:
    """A server; `answer` makes the response to each call."""

    url: str = ""
    calls: list[Call] = field(default_factory=list)
    ended: int = 0
    under_way: Counter[str] = field(default_factory=Counter)
    most_under_way: Counter[str] = field(default_factory=Counter)
    answer: Answer | None = None

    def ids(self, path: str | None = None) -> list[str]:
        return [call.id for call in self.calls if path is None or call.path == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.calls.append(
            Call(request.headers["webhook-id"], request.path, dict(request.headers), body, time.monotonic())
        )
        self.under_way[request.path] += 1
        self.most_under_way[request.path] = max(
            self.most_under_way[request.path], self.under_way[request.path]
        )
        try:
            return await self.answer(request) if self.answer else web.Response()
        finally:
            self.under_way[request.path] -= 1
            self.ended += 1


async def keys_of(_target: TargetId) -> list[SymmetricKey]:
    """The keys that sign in tests without a database."""
    return [SymmetricKey(SECRET)]


def answering(*statuses: int, **headers: str) -> Answer:
    """Answers with each status in turn, and then always with the last one."""
    left = list(statuses)

    async def answer(_request: web.Request) -> web.Response:
        status = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, headers=headers, text=f"this is {status}")

    return answer


@asynccontextmanager
async def target_server(address: str = "127.0.0.1") -> AsyncIterator[Target]:
    target = Target()
    app = web.Application()
    app.router.add_post("/{path:.*}", target.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, address, 0)
    await site.start()
    target.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield target
    finally:
        await runner.cleanup()


@dataclass
class Bench:
    """A broker and a database, with methods that enqueue and publish callbacks."""

    kafka: Kafka
    postgres: str
    producer: AIOKafkaProducer
    connection: asyncpg.Connection[asyncpg.Record]

    async def enqueue(self, *callbacks: Callback, publish: bool = True, due_in_s: float = 60.0) -> None:
        """Enqueues callbacks as the stage processor does: rows first, then records."""
        await self.connection.execute(
            *bound("outbox.enqueue_callbacks", **callback_columns(callbacks, due_in_s))
        )
        if publish:
            await self.publish(*callbacks)

    async def publish(self, *callbacks: Callback) -> None:
        await send_callbacks(self.producer, self.kafka.prefix + CALLBACKS.name, callbacks)

    async def send(self, value: bytes, key: bytes | None = None) -> None:
        await self.producer.send(self.kafka.prefix + CALLBACKS.name, value, key=key)

    async def rows(self) -> dict[str, Any]:
        rows = await self.connection.fetch(
            "SELECT *, extract(epoch FROM due_at - now()) AS due_in_s FROM callback"
        )
        return {row["id"]: row for row in rows}

    async def states(self) -> Counter[str]:
        return Counter(row["state"] for row in (await self.rows()).values())

    async def all_delivered(self) -> bool:
        return set(await self.states()) == {"delivered"}

    async def records(self, topic: str, count: int) -> list[Any]:
        """The first `count` records of a topic, as JSON."""
        found: list[Any] = []
        async with running(make_consumer(self.kafka, None, self.kafka.prefix + topic)) as consumer:
            while len(found) < count:
                batch = await in_time(consumer.getone())
                found.append(orjson.loads(batch.value))
        return found

    async def count(self, topic: str) -> int:
        """How many records a topic has."""
        async with running(make_consumer(self.kafka, None)) as consumer:
            name = self.kafka.prefix + topic
            partitions = [TopicPartition(name, 0)]
            return sum((await consumer.end_offsets(partitions)).values())

    def settings(self, **given: Any) -> CallbacksSettings:
        defaults: dict[str, Any] = {
            "kafka": self.kafka.kafka,
            "prefix": self.kafka.prefix,
            "postgres": self.postgres,
            "callback_secrets": (SECRET,),
            "callback_allow": LOOPBACK,
            "callback_schedule_s": ("0.3", "0.3"),
            "callback_timeout_s": 3.0,
            "session_timeout_s": 6.0,
            "stall_timeout_s": 30.0,
        }
        return CallbacksSettings.load({}, **{**defaults, **given})

    @asynccontextmanager
    async def service(self, **given: Any) -> AsyncIterator[None]:
        """The service inside this process, from ready to stopped."""
        stopping, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(create_app(self.settings(**given))(stopping, ready.set))
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=30)
            if task.done():
                task.result()
            assert ready.is_set(), "the service does not come up"
            yield
        finally:
            waiting.cancel()
            stopping.set()
            await task

    @asynccontextmanager
    async def process(self, folder: Path, **given: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """The service as a process of its own, killed at the end if it still runs; its log is
        `folder`/service.log."""
        mark = folder / f"ready-{time.monotonic_ns()}"
        environ = {
            **os.environ,
            "PENSTOCK_KAFKA": self.kafka.kafka,
            "PENSTOCK_PREFIX": self.kafka.prefix,
            "PENSTOCK_POSTGRES": self.postgres,
            "PENSTOCK_CALLBACK_SECRETS": SECRET,
            "PENSTOCK_CALLBACK_ALLOW": ",".join(LOOPBACK),
            "PENSTOCK_SESSION_TIMEOUT_S": "6",
            "PENSTOCK_READY_FILE": str(mark),
            **{f"PENSTOCK_{name.upper()}": value for name, value in given.items()},
        }
        log = (folder / "service.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from penstock.callbacks.app import main; raise SystemExit(main())",
            env=environ,
            stderr=log.fileno(),
        )
        try:
            await wait_until(lambda: mark.exists() or process.returncode is not None, what="ready")
            assert process.returncode is None
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()
            log.close()
            # Shown when the test fails.
            sys.stderr.write((folder / "service.log").read_text()[-4000:])


@asynccontextmanager
async def bench(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[Bench]:
    kafka = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(kafka, [topic for topic in PLATFORM if topic.name.startswith(CALLBACKS.name)])
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    try:
        async with running(make_producer(kafka)) as producer:
            yield Bench(kafka, database, producer, connection)
    finally:
        await connection.close()


def make_callback(target: str, number: int = 1, *, type_name: str = "t", **fields: Any) -> Callback:
    """A callback of a task of this type as the stage processor makes it."""
    task = {"id": number, "type": type_name}
    body = orjson.dumps({"id": f"{number}-0-0-succeeded", "event": "task.succeeded", "task": task})
    return Callback(
        **{
            "id": f"msg_{number}-0-0-succeeded-0",
            "target": target_of(type_name, target),
            "task_id": number,
            "attempt": 0,
            "body": body,
            **fields,
        }
    )
