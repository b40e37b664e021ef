"""What each service tells of itself on its metrics port: figures, liveness and readiness (S8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import asyncpg
import pytest
from tests.callback_targets import LOOPBACK, SECRET, Target
from tests.gateways import Proxy, running_gateway
from tests.running import make_topics, running_service, write
from tests.scraping import Scraped, scrape
from tests.waiting import wait_until

from penstock import metrics
from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.heartbeats import app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.local.ports import choose_port
from penstock.metrics.page import LogCounter
from penstock.settings import Kafka
from penstock.stages import app as stages
from penstock.stages.settings import StagesSettings
from penstock.task_sync import app as task_sync
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Done, Fail, Worker, WorkerSettings

SERVICES: dict[str, tuple[Callable[[Any], Any], type, dict[str, Any]]] = {
    "task-sync": (task_sync.create_app, TaskSyncSettings, {"objects": "memory:///"}),
    "heartbeats": (heartbeats.create_app, HeartbeatsSettings, {"settle_s": 0.2, "tick_s": 0.2}),
    "stages": (stages.create_app, StagesSettings, {}),
    "callbacks": (
        callbacks.create_app,
        CallbacksSettings,
        {"callback_secrets": (SECRET,), "callback_allow": LOOPBACK},
    ),
}


@pytest.fixture
async def kafka(kafka_servers: str, prefix: str) -> Kafka:
    return await make_topics(kafka_servers, prefix)


def service_of(name: str, kafka: Kafka, postgres: str, port: int, **given: Any) -> Any:
    create, settings, defaults = SERVICES[name]
    return create(
        settings.load(
            {},
            kafka=kafka.kafka,
            prefix=kafka.prefix,
            postgres=postgres,
            metrics_port=port,
            **{**defaults, **given},
        )
    )


@asynccontextmanager
async def asking(port: int) -> AsyncIterator[Callable[[str], Any]]:
    """Asks for the JSON of a path; (0, None) while nothing listens."""
    async with aiohttp.ClientSession() as session:

        async def ask(path: str) -> tuple[int, Any]:
            try:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.json()
            except aiohttp.ClientConnectionError:
                return 0, None

        yield ask


@pytest.mark.parametrize("name", ["heartbeats", "stages", "callbacks"])
async def test_a_processor_is_ready_once_it_is_in_its_group(name: str, kafka: Kafka, database: str) -> None:
    """O4: while it joins, it lives and is not ready, and says why; once it serves it is ready."""
    port = choose_port()
    stopping, ready = asyncio.Event(), asyncio.Event()
    async with asking(port) as ask:
        running = asyncio.ensure_future(service_of(name, kafka, database, port)(stopping, ready.set))
        try:

            async def listens() -> Any:
                assert not running.done() or running.result()
                status, document = await ask("/readyz")
                return status and (status, document)

            status, document = await wait_until(listens)
            assert not ready.is_set()
            assert status == 503
            assert document["status"] == "not ready"
            assert document["checks"].pop("group") == f"joining the group {kafka.prefix}{name}"
            assert set(document["checks"].values()) == {"ok"}
            assert await ask("/livez") == (200, {"status": "ok"})
            await asyncio.wait_for(ready.wait(), 60)

            async def is_ready() -> bool:
                return (await ask("/readyz"))[0] == 200

            await wait_until(is_ready)
        finally:
            stopping.set()
            await running


async def test_task_sync_is_ready_once_it_is_in_its_group(kafka: Kafka, database: str) -> None:
    """O4: it takes in submissions only then."""
    port = choose_port()
    async with running_service(service_of("task-sync", kafka, database, port)), asking(port) as ask:

        async def is_ready() -> Any:
            status, document = await ask("/readyz")
            return status == 200 and document

        document = await wait_until(is_ready)
        assert document["checks"] == dict.fromkeys(("postgres", "session", "kafka", "group"), "ok")


async def test_what_cannot_be_reached_is_named(kafka: Kafka, database: str) -> None:
    """O4: without PostgreSQL a service that can wait for it lives on, not ready, and names the server that is away."""
    proxy = Proxy()
    away = await proxy.start(database)
    port = choose_port()
    async with running_service(service_of("heartbeats", kafka, away, port)), asking(port) as ask:

        async def is_ready() -> bool:
            return (await ask("/readyz"))[0] == 200

        await wait_until(is_ready)
        await proxy.cut()
        status, document = await ask("/readyz")
        assert status == 503
        assert document["checks"].pop("postgres").startswith("PostgreSQL: ")
        assert document["checks"] == {"kafka": "ok", "group": "ok"}
        assert (await ask("/livez"))[0] == 200


async def test_a_loop_that_stands_still_is_not_alive(kafka: Kafka, database: str) -> None:
    """O2a: /livez is answered by the loop that does the work, and by nothing else."""
    port = choose_port()
    async with running_service(service_of("stages", kafka, database, port)):

        def asked_from_outside() -> str:
            import socket  # noqa: PLC0415 (blocking on purpose, while this very loop stands still)

            with socket.create_connection(("127.0.0.1", port), 5) as there:
                there.settimeout(1)
                there.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                try:
                    return there.recv(100).decode()
                except TimeoutError:
                    return "silent"

        # In the loop's own thread: it does not turn until this has its answer, or none.
        assert asked_from_outside() == "silent"
        assert (await asyncio.to_thread(asked_from_outside)).startswith("HTTP/1.1 200")


async def test_every_metric_is_told_by_some_service_and_tells_what_was_done(
    kafka: Kafka, database: str, target: Target, tmp_path: Any
) -> None:
    """Issue 7: one deployment in which everything happens once: no name of `penstock.metrics` is missing, and what
    heartbeats, stages and the gateway count is what was done."""
    where = {"kafka": kafka.kafka, "prefix": kafka.prefix}
    ports = {name: choose_port() for name in (*SERVICES, "gateway")}
    objects = f"file://{tmp_path}"
    worker = Worker(WorkerSettings(**where, objects=objects))

    @worker.stage("t.start")
    async def start(task: Any) -> Any:
        return Fail("as told", permanent=True) if task.context == "fail" else Done()

    async with AsyncExitStack() as stack:
        for name in SERVICES:
            given = {"objects": objects} if name == "task-sync" else {}
            await stack.enter_async_context(
                running_service(service_of(name, kafka, database, ports[name], **given))
            )
        gateway = await stack.enter_async_context(
            running_gateway(**where, postgres=database, objects=objects, metrics_port=ports["gateway"])
        )
        await gateway.post("/types", {"name": "t", "max_in_flight": 100, "callbacks": [target.url]})
        # What waits: nobody works on this type.
        await gateway.post("/types", {"name": "u", "paused": True})
        await gateway.post("/tasks", {"type": "u"})
        for context in ("well", "well", "fail"):
            assert (
                await gateway.post("/tasks", {"type": "t", "context": context, "callbacks": [target.url]})
            ).status == 201
        assert (await gateway.post("/tasks", {"type": "nobody"})).status >= 400
        # The worker is not there yet: one task is claimed by somebody who says nothing more.
        connection = await stack.enter_async_context(connected(database))

        async def queued() -> Any:
            return await connection.fetchval("SELECT min(id) FROM task WHERE state = 'queued'")

        lost = await wait_until(queued)
        claim = {"kind": "claim", "worker": "w", "lease_ms": 1000, "tasks": [[lost, 0, 0]]}
        await write(kafka.kafka, f"{kafka.prefix}heartbeats", claim, b"not json")
        await write(kafka.kafka, f"{kafka.prefix}submitted", b"not json", {"type": "t"})

        async def expired() -> bool:
            return ("penstock_leases_lost_total", "t") in await scrape(ports["heartbeats"])

        await wait_until(expired)
        await stack.enter_async_context(running_service(worker.serve))

        async def ended() -> bool:
            rows = await connection.fetch("SELECT state, count(*) AS n FROM task GROUP BY state")
            return {row["state"]: row["n"] for row in rows} == {"succeeded": 3, "failed": 1, "ready": 1}

        # The expired attempt comes again after its back-off.
        await wait_until(ended, timeout=90)

        async def told() -> dict[str, Scraped] | None:
            found = {name: await scrape(port) for name, port in ports.items()}
            names = {key[0] for one in found.values() for key in one}
            expected = {one.name + ("_sum" if one.kind == "histogram" else "") for one in metrics.ALL}
            return found if expected <= names else None

        found = await wait_until(told, what="every metric is told")
        for name, one in found.items():
            assert one["penstock_build_info", name, penstock_version()] == 1
            assert one["process_cpu_seconds_total",] > 0
    hearts, ends = found["heartbeats"], found["stages"]
    assert hearts["penstock_leases_lost_total", "t"] == 1
    assert hearts["penstock_attempts_ended_total", "expired", "scheduled"] == 1
    assert hearts["penstock_heartbeats_total", "claim"] >= 5
    assert hearts["penstock_rejected_total", "heartbeats"] == 1
    assert found["task-sync"]["penstock_rejected_total", "submitted"] == 1
    assert ends["penstock_attempts_ended_total", "done", "succeeded"] == 3
    assert ends["penstock_attempts_ended_total", "fail", "failed"] == 1
    assert ends["penstock_attempt_seconds_count", "start"] == 4
    assert ends["penstock_commit_seconds_count",] >= 1
    assert ends["penstock_generations_total",] >= 1
    assert found["gateway"]["penstock_http_requests_total", "POST", "/tasks", "201"] == 4
    assert found["gateway"]["penstock_http_request_seconds_count", "POST", "/tasks"] == 5


def test_what_is_logged_is_counted_by_level() -> None:
    """Warnings and errors; what is merely told is not counted."""
    import logging  # noqa: PLC0415 (needed here alone)

    counter = LogCounter()
    logger = logging.Logger("alone")  # noqa: LOG001 (outside the tree: nothing else hears it)
    logger.addHandler(counter)
    for level in (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logger.log(level, "x")
    assert (counter.warnings, counter.errors) == (1, 2)


def penstock_version() -> str:
    import penstock  # noqa: PLC0415 (needed here alone)

    return penstock.__version__


@asynccontextmanager
async def connected(database: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    try:
        yield connection
    finally:
        await connection.close()
