"""The metrics port of each service: metrics, liveness and readiness (S8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import asyncpg
import pytest
from tests.support.callback_targets import Target
from tests.support.gateways import Proxy, running_gateway
from tests.support.http_requests import raw_request
from tests.support.scraping import Scraped, scrape
from tests.support.service_apps import app_of
from tests.support.services import make_topics, running_service, write
from tests.support.waiting import in_time, wait_until

from penstock import metrics
from penstock.errors import PostgresUnavailable
from penstock.kafka.topology.services import SERVICES
from penstock.local.ports import choose_port
from penstock.metrics.log_counter import LogCounter
from penstock.metrics.serving import stand_in
from penstock.settings import Kafka
from penstock.stages.settings import StagesSettings
from penstock.worker import Done, Fail, Worker, WorkerSettings

# Services other than the gateway, by what keeps their positions; the gateway's port has more pages.
INGESTING = [name for name, service in SERVICES.items() if service.ingests]
PROCESSING = [name for name in SERVICES if name not in {*INGESTING, "gateway"}]
SOONER = {"heartbeats": {"settle_s": 0.2, "tick_s": 0.2}}


@pytest.fixture
async def kafka(kafka_servers: str, prefix: str) -> Kafka:
    return await make_topics(kafka_servers, prefix)


def service_of(name: str, kafka: Kafka, postgres: str, port: int, **overrides: Any) -> Any:
    return app_of(
        name,
        kafka=kafka.kafka,
        prefix=kafka.prefix,
        postgres=postgres,
        metrics_port=port,
        **{**SOONER.get(name, {}), **overrides},
    )


@asynccontextmanager
async def json_client(port: int) -> AsyncIterator[Callable[[str], Any]]:
    """Yields a coroutine function that gets the JSON of a path, or (0, None) while the port is
    closed."""
    async with aiohttp.ClientSession() as session:

        async def get(path: str) -> tuple[int, Any]:
            try:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    return answer.status, await answer.json()
            except aiohttp.ClientConnectionError:
                return 0, None

        yield get


async def statuses(port: int) -> list[int]:
    """The statuses of each path: for a foreign name, an allowed one and an address."""
    return [
        (await raw_request(port, f"GET {path} HTTP/1.1\r\nHost: {host}")).status
        for path in ("/metrics", "/livez", "/readyz")
        for host in ("evil.example", f"scraper:{port}", f"127.0.0.1:{port}")
    ]


NAMED = {"allowed_hosts": ("scraper",)}


@pytest.mark.parametrize("name", PROCESSING)
async def test_a_processor_is_ready_once_it_has_joined_its_group(
    name: str, kafka: Kafka, database: str
) -> None:
    """O4, O5: a processor that joins its group is alive but not ready, and says why. A processor
    that serves is ready, and answers only to its own names."""
    port = choose_port()
    stopping, ready = asyncio.Event(), asyncio.Event()
    async with json_client(port) as get:
        running = asyncio.ensure_future(service_of(name, kafka, database, port, **NAMED)(stopping, ready.set))
        try:

            async def first_answer() -> Any:
                assert not running.done() or running.result()
                status, document = await get("/readyz")
                return status and (status, document)

            status, document = await wait_until(first_answer)
            assert not ready.is_set()
            assert status == 503
            assert document["status"] == "not ready"
            assert document["checks"].pop("group") == f"joining the group {kafka.prefix}{name}"
            assert set(document["checks"].values()) == {"ok"}
            assert await get("/livez") == (200, {"status": "ok"})
            await in_time(ready.wait())

            async def is_ready() -> bool:
                return (await get("/readyz"))[0] == 200

            await wait_until(is_ready)
            assert (await statuses(port))[:6] == [421, 200, 200, 421, 200, 200]
        finally:
            stopping.set()
            await running


@pytest.mark.parametrize("name", INGESTING)
async def test_a_service_with_ingest_is_ready_once_it_has_joined_its_groups(
    name: str, kafka: Kafka, database: str
) -> None:
    """O4, O5: these services are ready once they have joined their groups and can take in
    submissions. They answer only to their own names."""
    port = choose_port()
    service = service_of(name, kafka, database, port, **NAMED)
    async with running_service(service), json_client(port) as get:

        async def is_ready() -> Any:
            status, document = await get("/readyz")
            return status == 200 and document

        document = await wait_until(is_ready)
        session = () if name == "tasklogs" else ("session",)
        checks = ("postgres", *session, "kafka", "writes", "group", "objects")
        assert document["checks"] == dict.fromkeys(checks, "ok")
        assert (await statuses(port))[:6] == [421, 200, 200, 421, 200, 200]


async def test_readiness_names_an_unreachable_server(kafka: Kafka, database: str) -> None:
    """O4: a service without PostgreSQL stays alive but is not ready, and names the missing
    server."""
    proxy = Proxy()
    proxied = await proxy.start(database)
    port = choose_port()
    async with running_service(service_of("heartbeats", kafka, proxied, port)), json_client(port) as get:

        async def is_ready() -> bool:
            return (await get("/readyz"))[0] == 200

        await wait_until(is_ready)
        await proxy.cut()
        status, document = await get("/readyz")
        assert status == 503
        assert document["checks"].pop("postgres").startswith("PostgreSQL: ")
        assert document["checks"] == {"kafka": "ok", "writes": "ok", "group": "ok"}
        assert (await get("/livez"))[0] == 200


async def test_a_stalled_loop_does_not_answer_livez(kafka: Kafka, database: str) -> None:
    """O2a: the event loop of the service answers /livez, so a stalled loop gives no answer."""
    port = choose_port()
    async with running_service(service_of("stages", kafka, database, port)):

        def probe_liveness() -> str:
            import socket  # noqa: PLC0415 (blocks on purpose, which stalls this loop)

            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.settimeout(1)
                connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                try:
                    return connection.recv(100).decode()
                except TimeoutError:
                    return "silent"

        # This call blocks the thread of the service's loop until its timeout.
        assert probe_liveness() == "silent"
        assert (await asyncio.to_thread(probe_liveness)).startswith("HTTP/1.1 200")


async def test_a_waiting_service_answers_only_to_its_own_names(kafka: Kafka, database: str) -> None:
    """O5: a page of another site cannot read metrics by DNS rebinding while the service waits for a
    server, nor afterwards."""
    port = choose_port()
    settings = StagesSettings.load({}, metrics_port=port, **NAMED)
    await stand_in(settings, "stages", PostgresUnavailable("away"))
    assert await statuses(port) == [421, 200, 200, 421, 200, 200, 421, 503, 503]
    async with running_service(service_of("stages", kafka, database, port, **NAMED)):
        assert (await statuses(port))[:6] == [421, 200, 200, 421, 200, 200]


async def test_every_metric_is_exported_with_its_count(
    kafka: Kafka, database: str, target: Target, tmp_path: Any
) -> None:
    """O4: in a deployment where each event occurs, the services export every metric of
    `penstock.metrics`. The counts of heartbeats, stages, the gateway and the worker match the
    events."""
    kafka_settings = {"kafka": kafka.kafka, "prefix": kafka.prefix}
    ports = {name: choose_port() for name in (*SERVICES, "worker")}
    objects = f"file://{tmp_path}"
    worker = Worker(WorkerSettings(**kafka_settings, objects=objects, worker_metrics_port=ports["worker"]))

    @worker.stage("t.start")
    async def start(task: Any) -> Any:
        return Fail("as requested", permanent=True) if task.context == "fail" else Done()

    async with AsyncExitStack() as stack:
        for name in (*INGESTING, *PROCESSING):
            overrides = {"objects": objects} if SERVICES[name].objects else {}
            await stack.enter_async_context(
                running_service(service_of(name, kafka, database, ports[name], **overrides))
            )
        gateway = await stack.enter_async_context(
            running_gateway(
                **kafka_settings, postgres=database, objects=objects, metrics_port=ports["gateway"]
            )
        )
        await gateway.post("/types", {"name": "t", "max_in_flight": 100, "callbacks": [target.url]})
        # This task waits, because its type is paused.
        await gateway.post("/types", {"name": "u", "paused": True})
        await gateway.post("/tasks", {"type": "u"})
        for context in ("well", "well", "fail"):
            assert (
                await gateway.post("/tasks", {"type": "t", "context": context, "callbacks": [target.url]})
            ).status == 201
        assert (await gateway.post("/tasks", {"type": "unknown"})).status >= 400
        # Before the worker starts, a claim without further heartbeats makes one lease expire.
        connection = await stack.enter_async_context(connected(database))

        async def queued() -> Any:
            return await connection.fetchval("SELECT min(id) FROM task WHERE state = 'queued'")

        claimed_id = await wait_until(queued)
        claim = {"kind": "claim", "worker": "w", "lease_ms": 1000, "tasks": [[claimed_id, 0, 0]]}
        await write(kafka.kafka, f"{kafka.prefix}heartbeats", claim, b"not json")
        await write(kafka.kafka, f"{kafka.prefix}submitted", b"not json", {"type": "t"})

        async def expired() -> bool:
            return ("penstock_leases_lost_total", "t") in await scrape(ports["heartbeats"])

        await wait_until(expired)
        await stack.enter_async_context(running_service(worker.serve))

        async def ended() -> bool:
            rows = await connection.fetch("SELECT state, count(*) AS n FROM task GROUP BY state")
            return {row["state"]: row["n"] for row in rows} == {"succeeded": 3, "failed": 1, "ready": 1}

        # The expired attempt is retried after its back-off.
        await wait_until(ended)

        # Each service counts an effect some time after it is visible in PostgreSQL.
        exact = {
            "heartbeats": {
                ("penstock_leases_lost_total", "t"): 1,
                ("penstock_attempts_ended_total", "expired", "scheduled"): 1,
                ("penstock_rejected_total", "heartbeats"): 1,
            },
            "task-sync": {("penstock_rejected_total", "submitted"): 1},
            "stages": {
                ("penstock_attempts_ended_total", "done", "succeeded"): 3,
                ("penstock_attempts_ended_total", "fail", "failed"): 1,
                ("penstock_attempt_seconds_count", "start"): 4,
            },
            "worker": {("penstock_worker_attempts_total", "fail", "start", "t"): 1},
            "gateway": {
                ("penstock_http_requests_total", "POST", "/tasks", "201"): 4,
                ("penstock_http_request_seconds_count", "POST", "/tasks"): 5,
            },
        }
        # These counts depend on the batches of records.
        at_least = {
            "heartbeats": {("penstock_heartbeats_total", "claim"): 5},
            # The worker also runs the record of the expired attempt.
            "worker": {("penstock_worker_attempts_total", "done", "start", "t"): 3},
            "stages": {("penstock_commit_seconds_count",): 1, ("penstock_generations_total",): 1},
        }
        expected = {one.name + ("_sum" if one.kind == "histogram" else "") for one in metrics.ALL}

        async def counted() -> dict[str, Scraped] | None:
            found = {name: await scrape(port) for name, port in ports.items()}
            names = {key[0] for one in found.values() for key in one}
            reached = all(
                found[service].get(key, 0) >= count
                for counts in (exact, at_least)
                for service, of_service in counts.items()
                for key, count in of_service.items()
            )
            return found if expected <= names and reached else None

        found = await wait_until(counted, what="every metric is exported with its expected count")
        for name, one in found.items():
            assert one["penstock_build_info", name, penstock_version()] == 1
            assert one["process_cpu_seconds_total",] > 0
    for service, counts in exact.items():
        assert {key: found[service][key] for key in counts} == counts


def test_warnings_and_errors_are_counted() -> None:
    """The counter counts warnings and errors, but no entries of lower levels."""
    import logging  # noqa: PLC0415 (needed here alone)

    counter = LogCounter()
    logger = logging.Logger("alone")  # noqa: LOG001 (outside the tree: no other handler gets its records)
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


async def test_metrics_need_the_token_and_probes_do_not(kafka: Kafka, database: str) -> None:
    """O4, O5: with PENSTOCK_METRICS_TOKEN, /metrics answers 401 without the token and with another
    one. Probes answer everyone."""
    port = choose_port()
    service = service_of("stages", kafka, database, port, metrics_token="a-token")

    async def status(path: str, authorization: str | None = None) -> int:
        headers = {} if authorization is None else {"Authorization": authorization}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer,
        ):
            return answer.status

    async with running_service(service):
        for wrong in (None, "Bearer other", "Basic a-token", "a-token", "Bearer ", "Bearer a-tok\u00e9n"):
            assert await status("/metrics", wrong) == 401
        assert await status("/metrics", "Bearer a-token") == 200
        assert await status("/metrics", "bearer  a-token") == 200
        assert await status("/livez") == 200
        assert await status("/readyz") in (200, 503)
