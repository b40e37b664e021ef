"""A worker over HTTP, with a real gateway, Kafka and PostgreSQL."""

import asyncio
import json
import logging
from collections import defaultdict
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.support.gateways import Caller, pump, running_gateway
from tests.support.services import make_topics, producing, read, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.errors import SettingsError
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.worker import Done, Next, Worker, WorkerSettings

# One limit for the longest body and for all queued bodies: one longest body fills the gateway.
BODY_BYTES = 1_000_000


@pytest.fixture
async def gateway(kafka_servers, prefix, database, tmp_path):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    async with running_gateway(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=database,
        objects=f"file://{tmp_path}",
        gateway_body_limit_bytes=BODY_BYTES,
        gateway_queue_bytes=BODY_BYTES,
    ) as caller:
        await caller.post("/types", {"name": "t", "partitions": 2})
        await wait_until(caller.is_ready)
        yield caller


async def released(gateway, kafka, prefix, database, count, lease_ms=60_000):
    """Submits tasks and writes their records to Kafka, as task-sync releases them."""
    response = await gateway.post("/tasks", [{"type": "t", "context": {"n": n}} for n in range(count)])
    ids = [task["id"] for task in response.body["tasks"]]
    connection = await asyncpg.connect(database)
    await connection.execute("UPDATE penstock.task SET state = 'queued'")
    await connection.close()
    async with producing(kafka) as producer:
        for task in ids:
            record = ReadyTask(Fence(task, 0, "start", 0), "t", Context.encode({"n": task}), lease_ms)
            await producer.send(f"{prefix}ready.t", record.encode(), partition=task % 2)
        await producer.flush()
    return ids


async def results(kafka, prefix):
    records = await read(kafka, f"{prefix}stage-results")
    return {entry["id"]: entry for record in records for entry in record["results"]}


@asynccontextmanager
async def full(gateway: Caller, database):
    """Keeps the gateway's queue full until the end of the block."""
    connection = await asyncpg.connect(database)
    beat = {"id": 1, "step": 0, "stage": "-", "attempt": 0, "outcome": "progress"}
    try:
        async with connection.transaction():
            # The gateway reads the state of an attempt with a heartbeat from this table.
            await connection.execute("LOCK TABLE penstock.task IN ACCESS EXCLUSIVE MODE")
            long_body = {"worker": "another", "results": [beat, ""]}
            # Leave fewer bytes than any other body needs.
            long_body["results"][1] = "x" * (BODY_BYTES - 20 - len(json.dumps(long_body)))
            queued_request = asyncio.create_task(gateway.post("/set_task", long_body))

            async def refused():
                return (
                    await gateway.post("/hold_task", {"worker": "w", "type": "t", "wait_s": 0})
                ).status == 429

            await wait_until(refused)
            yield
        # The gateway completes the request that it has already queued.
        assert (await queued_request).status == 200
    finally:
        await connection.close()


def worker_of(gateway, **more):
    # The worker can reach neither a broker nor an object store.
    return Worker(WorkerSettings(kafka="127.0.0.1:1", objects="", worker_gateway=gateway.url, **more))


async def test_a_worker_needs_only_a_gateway(gateway, kafka_servers, prefix, database):
    """T6: a worker over HTTP claims tasks, reads small and large contexts, reports results and
    drains."""
    worker = worker_of(gateway)

    @worker.stage("t.start")
    async def start(task):
        return Next("two", {"pad": "x" * 9_000}) if task.id % 2 else Done(task.context)

    ids = await released(gateway, kafka_servers, prefix, database, 20)

    async def all_reported():
        return len(await results(kafka_servers, prefix)) == len(ids)

    async with running_service(worker.serve):
        await wait_until(all_reported)
    found = await results(kafka_servers, prefix)
    assert all("context_ref" in found[task] for task in ids if task % 2)
    assert all(found[task]["context"] == {"n": task} for task in ids if not task % 2)


@asynccontextmanager
async def losing_proxy(url):
    """The URL of a gateway behind a proxy that takes the first answer with tasks and ends; what it
    lost."""
    parts, lost = urlsplit(url), []

    async def serve(reader, writer):
        there, back = await asyncio.open_connection(parts.hostname, parts.port)
        sending = asyncio.create_task(pump(reader, back))
        while data := await there.read(1_000_000):
            if b"claimed_ms_ago" in data and not lost:
                lost.append(data)
                writer.transport.abort()
                break
            writer.write(data)
        writer.close()
        await sending

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", lost


async def test_the_tasks_of_a_lost_answer_reach_their_worker(gateway, kafka_servers, prefix, database):
    """T6, S11: an answer with tasks is lost behind the gateway. The worker asks again and gets the
    same attempts, long before their leases expire."""
    ids = await released(gateway, kafka_servers, prefix, database, 6, lease_ms=600_000)
    runs = defaultdict(int)
    async with losing_proxy(gateway.url) as (url, lost):
        worker = Worker(WorkerSettings(worker_gateway=url, pool=4, backlog=0))

        @worker.stage("t.start")
        async def start(task):
            runs[task.id] += 1
            return Done()

        async with running_service(worker.serve):
            await wait_until(lambda: runs.keys() == set(ids))
    assert len(lost) == 1
    assert set(runs.values()) == {1}
    found = await results(kafka_servers, prefix)
    assert {(entry["attempt"], entry["outcome"]) for entry in found.values()} == {(0, "done")}


async def test_claims_and_heartbeats_carry_the_limit_of_the_stage(gateway, kafka_servers, prefix, database):
    """W1: the gateway claims with the stage's own limit, which the worker sends in its request and
    its heartbeats."""
    # The handler never ends, so a drain would take its whole time.
    worker = worker_of(gateway, drain_timeout_s=0.2)

    @worker.stage("t.start", max_attempts=1)
    async def start(_task):
        await asyncio.Event().wait()
        return Done()

    await released(gateway, kafka_servers, prefix, database, 2, lease_ms=6_000)

    async def beats():
        found = await read(kafka_servers, f"{prefix}heartbeats")
        return {(record["kind"], record.get("max_attempts")) for record in found}

    async with running_service(worker.serve):
        await wait_until(lambda: has_beaten(beats))
        assert await beats() == {("claim", 1), ("beat", 1)}


async def has_beaten(beats):
    return "beat" in {kind for kind, _limit in await beats()}


async def test_the_answer_to_a_heartbeat_cancels_a_handler(gateway, kafka_servers, prefix, database):
    """W5, H3: the answer to a heartbeat cancels the handler of a cancelled task. The worker reports
    no result for it, and the other task succeeds."""
    worker = worker_of(gateway)
    began, ended, finish = [], [], asyncio.Event()

    @worker.stage("t.start")
    async def start(task):
        began.append(task.id)
        try:
            await finish.wait()
        except asyncio.CancelledError:
            ended.append(task.id)
            raise
        return Done(task.id)

    # No lease expires on a busy machine.
    first, second = await released(gateway, kafka_servers, prefix, database, 2, lease_ms=15_000)
    async with running_service(worker.serve):
        await wait_until(lambda: len(began) == 2)
        await gateway.post(f"/tasks/{first}/cancel")
        await wait_until(lambda: ended == [first])
        finish.set()
        await wait_until(lambda: results(kafka_servers, prefix))
    assert list(await results(kafka_servers, prefix)) == [second]
    beats = [r for r in await read(kafka_servers, f"{prefix}heartbeats") if r["kind"] == "beat"]
    assert {task[0] for record in beats for task in record["tasks"]} >= {second}


async def test_a_full_gateway_answers_429_with_a_delay(gateway, database):
    """T6, H3: a full gateway answers 429 with Retry-After and a problem document."""
    async with full(gateway, database):
        for path, body in (
            ("/set_task", {"worker": "w", "results": []}),
            ("/hold_task", {"worker": "w", "type": "t", "wait_s": 30}),
        ):
            answer = await gateway.post(path, body)
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            assert answer.body["type"] == "urn:penstock:problem:throttled"
    assert (await gateway.post("/set_task", {"worker": "w", "results": []})).status == 200


def retries(caplog: pytest.LogCaptureFixture) -> set[tuple[str, float]]:
    """Returns (operation, delay in seconds) of each logged retry."""
    fields = [vars(record) for record in caplog.records]
    return {
        (entry["waiting_for"], entry["delay_s"])
        for entry in fields
        if entry.get("event") == "retry_scheduled"
    }


async def test_the_worker_repeats_throttled_requests(gateway, kafka_servers, prefix, database, caplog):
    """H3: the worker sends throttled heartbeats and reports again. No lease and no report is
    lost."""
    worker = worker_of(gateway)
    finish = defaultdict(asyncio.Event)
    began, lost = [], []

    @worker.stage("t.start")
    async def start(task):
        began.append(task.id)
        try:
            await finish[task.id].wait()
        except asyncio.CancelledError:
            lost.append(task.id)
            raise
        return Done()

    async def beaten():
        records = await read(kafka_servers, f"{prefix}heartbeats")
        return {task[0] for record in records if record["kind"] == "beat" for task in record["tasks"]}

    first, second = await released(gateway, kafka_servers, prefix, database, 2, lease_ms=10_000)
    with caplog.at_level(logging.WARNING):
        async with running_service(worker.serve):
            await wait_until(lambda: len(began) == 2)
            async with full(gateway, database):
                assert await beaten() == set()
                await wait_until(
                    lambda: any(
                        getattr(r, "event", "") == "heartbeats_throttled" and r.delay_s == 1
                        for r in caplog.records
                    )
                )
                finish[first].set()
                delays = {("report of results", 1.0)}
                await wait_until(lambda: delays <= retries(caplog))
                assert await results(kafka_servers, prefix) == {}
            await wait_until(lambda: results(kafka_servers, prefix))

            async def second_beaten():
                return second in await beaten()

            await wait_until(second_beaten)
            finish[second].set()

            async def all_reported():
                return set(await results(kafka_servers, prefix)) == {first, second}

            await wait_until(all_reported)
    assert lost == []


def test_an_invalid_gateway_address_is_refused():
    """The error for an invalid address names the setting."""
    with pytest.raises(SettingsError, match="PENSTOCK_WORKER_GATEWAY='nowhere'"):
        WorkerSettings.load({}, objects="memory:///", worker_gateway="nowhere")
