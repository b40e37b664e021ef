"""Middleware and dependencies of a worker on the real Kafka."""

import asyncio
import subprocess
import sys

import pytest
from tests.support.services import make_topics, producing, read, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.errors import SettingsError
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.worker import Done, Worker, WorkerSettings


@pytest.fixture
async def settings(kafka_servers, prefix):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 1)])
    return WorkerSettings(kafka=kafka_servers, prefix=prefix, objects="memory:///")


async def results(settings):
    records = await read(settings.kafka, f"{settings.prefix}stage-results")
    return {entry["id"]: entry for record in records for entry in record["results"]}


async def test_attempts_of_both_kinds_have_middleware_and_dependencies(settings):
    """W1: connections are opened once, sessions for each attempt, and all of them are closed."""
    worker = Worker(settings)
    opened, closed, around = [], [], []

    @worker.on_start
    async def connect():
        opened.append("db")
        worker.provide("db", "pool")

    @worker.on_stop
    async def disconnect():
        closed.append("db")

    @worker.provide
    async def session(db, task):
        opened.append(task.id)
        yield f"session of {db}"
        closed.append(task.id)

    @worker.middleware
    async def traced(task, call_next):
        around.append(task.id)
        return await call_next(task)

    @worker.stage("t.async")
    async def handles(task, session):
        return Done(session)

    @worker.stage("t.sync")
    def blocks(task, session):
        return Done(session)

    async with producing(settings.kafka) as producer:
        for id_ in range(1, 21):
            fence = Fence(id_, 0, "sync" if id_ % 2 else "async", 0)
            record = ReadyTask(fence, "t", Context.encode(None), 60_000)
            await producer.send(f"{settings.prefix}ready.t", record.encode())
        await producer.flush()

    async def ended():
        found = await results(settings)
        return found if len(found) == 20 else None

    async with running_service(worker.serve):
        found = await wait_until(ended)
        assert closed.count("db") == 0
    assert {entry["context"] for entry in found.values()} == {"session of pool"}
    assert sorted(around) == [*range(1, 21)]
    assert (opened[0], sorted(opened[1:])) == ("db", [*range(1, 21)])
    assert (closed[-1], sorted(closed[:-1])) == ("db", [*range(1, 21)])


async def test_a_worker_without_a_provider_takes_no_task(settings):
    """O8: it ends before it joins a group; as a process, in one line and with status 6."""
    worker = Worker(settings)

    @worker.stage("t.s")
    async def handler(task, mailer):
        return Done()

    with pytest.raises(SettingsError, match="no provider for 'mailer'"):
        async with running_service(worker.serve):
            pytest.fail("the worker has started")
    program = (
        "from penstock.worker import Worker\n"
        f"worker = Worker(kafka={settings.kafka!r}, prefix={settings.prefix!r}, objects='memory:///')\n"
        "worker.stage('t.s')(lambda task, mailer: None)\n"
        "worker.run()\n"
    )
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 6
    [line] = ended.stderr.splitlines()
    assert "no provider for 'mailer' (stage 't.s'); the worker has: none" in line
