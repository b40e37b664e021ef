"""Progress of attempts, from a handler to the API and the command line."""

import asyncio
import json
import sys
import threading
from datetime import UTC, datetime

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner
from tests.support.gateways import running_gateway
from tests.support.services import read_records, running_service
from tests.support.waiting import wait_until

from penstock.cli.main import cli
from penstock.client import Client
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.progress import HEADER, Progress
from penstock.contracts.validation import conform
from penstock.core.attempt import AttemptId
from penstock.heartbeats import progress_writer
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.postgres import progress, types
from penstock.worker import Done, RetryAfter, Worker, WorkerSettings

TASK_TYPES = (types.TaskType(name="t", partitions=2, max_attempts=3, retry_base_ms=1),)


@pytest.fixture
async def system(system, where):
    await create_topics(system.settings(), [ready("t", 2)])
    system.gateway = await system.stack.enter_async_context(running_gateway(**where))
    system.client = await system.stack.enter_async_context(Client(system.gateway.url))
    await wait_until(system.gateway.is_ready)
    await system.start("task-sync", "heartbeats", "stages")
    return system


def worker_of(system, over):
    if over == "http":
        return Worker(WorkerSettings(kafka="127.0.0.1:1", objects="", worker_gateway=system.gateway.url))
    return Worker(WorkerSettings(**system.where, objects="memory:///"))


@pytest.mark.parametrize("over", ["kafka", "http"])
async def test_a_handler_reports_and_everybody_sees_it(system, over, monkeypatch):
    """W1, H5: progress reaches the API, `penstock get` and `penstock tasks watch` while the handler
    runs, and is gone once the attempt is over."""
    worker = worker_of(system, over)
    go_on, end = asyncio.Event(), asyncio.Event()

    @worker.stage("t.start")
    async def start(task):
        task.progress(0.4, "frame 1,200 of 3,000")
        await go_on.wait()
        if task.attempt == 0:
            task.progress(0.9, "nearly [done]")
            await end.wait()
            return RetryAfter(0)
        return Done()

    async with running_service(worker.serve):
        submitted = await system.client.submit("t", {})

        async def shown():
            found = (await system.client.get(submitted.id)).progress
            return found and (found.fraction, found.message)

        await wait_until(shown)
        assert await shown() == (0.4, "frame 1,200 of 3,000")
        found = (await system.client.get(submitted.id)).progress
        assert abs((datetime.now(UTC) - found.reported_at).total_seconds()) < 120
        [listed] = [task async for task in system.client.list(type="t")]
        assert listed.progress == found
        assert await system.client.progress([submitted.id]) == {submitted.id: found}

        monkeypatch.setenv("PENSTOCK_GATEWAY", system.gateway.url)
        invoke = CliRunner().invoke
        printed = await asyncio.to_thread(invoke, cli, ["get", str(submitted.id)])
        [line] = [line for line in printed.stdout.splitlines() if line.startswith("progress")]
        assert line.split(maxsplit=1)[1].strip() == "40 %, frame 1,200 of 3,000"
        watching = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", "watch", str(submitted.id), "--json"),
            stdout=asyncio.subprocess.PIPE,
        )
        go_on.set()
        newer = {"id": submitted.id, "fraction": 0.9, "message": "nearly [done]"}
        while newer not in json.loads(await watching.stdout.readline()).get("progress", ()):
            pass
        assert await shown() == (0.9, "nearly [done]")
        end.set()
        printed, _errors = await watching.communicate()
        assert json.loads(printed.splitlines()[-1]) == {"states": {"succeeded": 1}}
        assert watching.returncode == 0
        assert (await system.client.get(submitted.id)).progress is None
        assert await system.client.progress([submitted.id]) == {}


async def test_a_thread_reports_and_keeps_its_lease_by_it(system):
    """H5: a synchronous handler reports from its thread, and a report renews the lease."""
    worker = worker_of(system, "kafka")
    end = threading.Event()

    @worker.stage("t.start")
    def start(task):
        number = 0
        while not end.wait(0.01):
            number += 1
            task.progress(message=f"item {number}")
        return Done()

    async with running_service(worker.serve):
        submitted = await system.client.submit("t", {})

        async def beats():
            records = await read_records(system.where["kafka"], f"{system.where['prefix']}heartbeats")
            return [record for record in records if record.headers]

        async def has_several():
            return len(await beats()) >= 3

        await wait_until(has_several)
        end.set()
        assert await system.client.wait([submitted.id]) == {"succeeded": 1}
    for record in await beats():
        # Without its header the record is a heartbeat.
        value = orjson.loads(record.value)
        conform(value, "heartbeat")
        assert (value["kind"], value["tasks"]) == ("beat", [[submitted.id, 0, 0]])
        assert dict(record.headers).keys() == {HEADER}


async def send(system, attempt_id, reports, worker="w"):
    """Writes a heartbeat with a header."""
    producer = AIOKafkaProducer(bootstrap_servers=system.where["kafka"])
    await producer.start()
    try:
        heartbeat = Heartbeat(Kind.BEAT, worker, 60_000, [attempt_id])
        await producer.send_and_wait(
            f"{system.where['prefix']}heartbeats",
            heartbeat.encode(),
            key=worker.encode(),
            headers=[(HEADER, reports)],
        )
    finally:
        await producer.stop()


async def test_a_faulty_report_costs_neither_the_heartbeat_nor_other_reports(system):
    """Each report of a record is judged alone; the attempt of a faulty one keeps its lease."""
    [task_id] = await system.submit(1)
    await wait_until(lambda: system.pool.fetchval("SELECT true FROM task WHERE state = 'queued'"))
    attempt_id = AttemptId(task_id, 0, 0)
    good = {"task": list(attempt_id), "fraction": 0.5}
    for faulty in (
        b"no JSON",
        b"{}",
        orjson.dumps([{"task": list(attempt_id), "fraction": 1.5}, good]),
        orjson.dumps(
            [{"task": list(attempt_id), "message": "a\nb"}, {"task": [2**63 - 1, 0, 0], "fraction": 1.0}]
        ),
    ):
        await send(system, attempt_id, faulty)

    async def held():
        return await system.pool.fetchval("SELECT worker FROM task WHERE id = $1", task_id) == "w"

    await wait_until(held)

    async def written():
        return (await progress.of_tasks(system.pool, [task_id])).get(task_id, {}).get("fraction") == 0.5

    await wait_until(written)

    async def rejected():
        records = await read_records(system.where["kafka"], f"{system.where['prefix']}heartbeats.rejected")
        return sorted(orjson.loads(record.value)["pointer"] for record in records)

    async def all_rejected():
        return len(await rejected()) == 4

    await wait_until(all_rejected)
    pointer = f"/headers/{HEADER}"
    assert await rejected() == [pointer, pointer, f"{pointer}/0/fraction", f"{pointer}/0/message"]


async def test_only_the_holder_of_the_current_attempt_writes_its_progress(system):
    """W4: the report of a worker that has lost an attempt, or of an earlier attempt, shows
    nothing."""
    [task_id] = await system.submit(1)
    await wait_until(lambda: system.pool.fetchval("SELECT true FROM task WHERE state = 'queued'"))
    now = datetime.now(UTC)

    async def write(attempt, worker, fraction):
        report = progress.Report(AttemptId(task_id, 0, attempt), worker, Progress(fraction), now)
        return await progress.write(system.pool, [report])

    assert await write(1, "w", 0.1) == 0
    await system.pool.execute("UPDATE task SET state = 'running', worker = 'w'")
    assert await write(0, "other", 0.2) == 0
    assert await write(0, "w", 0.3) == 1
    assert (await progress.of_tasks(system.pool, [task_id]))[task_id]["fraction"] == 0.3
    # The next attempt begins without the progress of the one before, and replaces it.
    await system.pool.execute("UPDATE task SET attempt = 1, worker = NULL, state = 'queued'")
    assert await progress.of_tasks(system.pool, [task_id]) == {}
    assert await write(1, "x", 0.05) == 1
    assert (await progress.of_tasks(system.pool, [task_id]))[task_id]["fraction"] == 0.05
    await progress.sweep(system.pool)
    assert await system.pool.fetchval("SELECT count(*) FROM task_progress") == 1
    await system.pool.execute("UPDATE task SET attempt = 2")
    await progress.sweep(system.pool)
    assert await system.pool.fetchval("SELECT count(*) FROM task_progress") == 0


async def test_writes_do_not_grow_with_reports(system, monkeypatch):
    """PostgreSQL gets one statement a second, with the last report of each attempt."""
    ids = await system.submit(3)

    async def all_queued():
        return await system.states() == {"queued": 3}

    await wait_until(all_queued)
    writer = progress_writer.ProgressWriter(system.pool)
    written = []

    async def write(_pool, reports):
        written.append([(report.attempt_id.task_id, report.progress.fraction) for report in reports])
        return len(reports)

    monkeypatch.setattr(progress_writer.progress, "write", write)
    monkeypatch.setattr(progress_writer, "ROWS_PER_WRITE", 2)
    for number in range(1_000):
        for task_id in ids:
            attempt_id = AttemptId(task_id, 0, 0)
            reports = {attempt_id: Progress(number / 1_000)}
            writer.add(Heartbeat(Kind.BEAT, "w", 60_000, [attempt_id], progress=reports), 0.0)
    await writer._write()
    await writer._write()
    assert written == [[(ids[0], 0.999), (ids[1], 0.999)], [(ids[2], 0.999)]]
