"""Commands of handlers on the real Kafka: lines are shipped, and they end with the attempt."""

import asyncio
import os
import signal
import sys

import psutil
import pytest
from tests.support.services import make_topics, producing, read, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.worker import Done, Worker, WorkerSettings

# A program with a grandchild, both of which note their process ids and run until they are ended.
FAMILY = "sh -c 'echo $$; while :; do sleep 0.05; done' & echo $$; while :; do sleep 0.05; done"


@pytest.fixture
async def settings(kafka_servers, prefix):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 1)])
    return WorkerSettings(kafka=kafka_servers, prefix=prefix, objects="memory:///", drain_timeout_s=0.2)


async def release(settings, stage):
    async with producing(settings.kafka) as producer:
        record = ReadyTask(Fence(1, 0, stage, 0), "t", Context.encode(None), 60_000)
        await producer.send_and_wait(f"{settings.prefix}ready.t", record.encode())


async def pids(settings):
    """The process ids that the program has written to the task's log, once both are there."""
    found = []
    for record in await read(settings.kafka, f"{settings.prefix}task-logs"):
        found += [int(line[3]) for chunk in record["chunks"] for line in chunk["lines"] if line[2] == "sh"]
    return found if len(found) == 2 else None


def alive(ids):
    def is_alive(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in ids if is_alive(pid)]


@pytest.fixture(params=["async", "sync"])
def worker(request, settings):
    worker = Worker(settings)

    @worker.stage("t.async")
    async def waits(task):
        await task.run(["sh", "-c", FAMILY])
        return Done()

    @worker.stage("t.sync")
    def blocks(task):
        task.run(["sh", "-c", FAMILY])
        return Done()

    worker.kind = request.param
    return worker


async def test_a_cancelled_task_ends_its_command(settings, worker):
    """W1, W5: its lines are on Kafka while it runs; the revocation ends it and its child."""
    await release(settings, worker.kind)
    async with running_service(worker.serve):
        running = await wait_until(lambda: pids(settings))
        assert len(alive(running)) == 2

        async def ended():
            # Repeatedly: a new consumer reads only records written after it joins.
            await write(
                settings.kafka,
                f"{settings.prefix}revoked",
                Revocation("cancelled", [AttemptId(1, 0, 0)]).encode(),
            )
            return not alive(running)

        await wait_until(ended)


PROGRAM = f"""
from penstock.worker import Done, Worker
worker = Worker()

@worker.stage("t.sync")
def blocks(task):
    # Ignores SIGTERM, and so the first attempt to end it.
    task.run(["sh", "-c", "trap '' TERM;" + {FAMILY!r}])

@worker.stage("t.async")
async def waits(task):
    await task.run(["sh", "-c", "trap '' TERM;" + {FAMILY!r}])

worker.run()
"""


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_worker_that_stops_leaves_no_command(settings, kind):
    """W1: a command that ignores SIGTERM does not outlive its worker, whose exit it does not delay
    for long."""
    await release(settings, kind)
    environment = {
        **os.environ,
        "PENSTOCK_KAFKA": settings.kafka,
        "PENSTOCK_PREFIX": settings.prefix,
        "PENSTOCK_OBJECTS": "memory:///",
        "PENSTOCK_DRAIN_TIMEOUT_S": "0.2",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, env=environment)
    try:
        running = await wait_until(lambda: pids(settings))
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        await wait_until(lambda: not alive(running))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
