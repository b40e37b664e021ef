"""Lines of task logs on the real Kafka: what was logged, in order, once."""

import logging

import pytest
from tests.support.services import make_topics, producing, read, read_records, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.worker import Done, Worker, WorkerSettings

log = logging.getLogger("app")


@pytest.fixture
async def settings(kafka_servers, prefix):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    return WorkerSettings(kafka=kafka_servers, prefix=prefix, objects="memory:///")


async def release(settings, *ids):
    async with producing(settings.kafka) as producer:
        for task in ids:
            record = ReadyTask(Fence(task, 0, "s", 0), "t", Context.encode(None), 60_000)
            await producer.send(f"{settings.prefix}ready.t", record.encode(), partition=task % 2)
        await producer.flush()


async def chunks_of(settings):
    """By task: its chunks in the order of their partition."""
    found = {}
    for record in await read(settings.kafka, f"{settings.prefix}task-logs"):
        for chunk in record["chunks"]:
            found.setdefault(chunk["id"], []).append(chunk)
    return found


async def ended(settings, *ids):
    chunks = await chunks_of(settings)
    return chunks if all("end" in chunks.get(id_, [{}])[-1] for id_ in ids) else None


async def test_lines_are_on_kafka_in_order_and_once(settings):
    """L2: each line of many tasks at once is on the partition of its task, in order."""
    worker = Worker(settings)

    @worker.stage("t.s")
    async def stage(task):
        for n in range(20):
            log.warning("line %s", n)
        return Done()

    ids = range(1, 201)
    await release(settings, *ids)
    async with running_service(worker.serve):
        chunks = await wait_until(lambda: ended(settings, *ids))
    for id_ in ids:
        lines = [line for chunk in chunks[id_] for line in chunk["lines"]]
        assert [line[1:] for line in lines] == [[30, "app", f"line {n}"] for n in range(20)]
        assert len({chunk["run"] for chunk in chunks[id_]}) == 1
    records = await read_records(settings.kafka, f"{settings.prefix}task-logs")
    # One record carries the lines of many tasks.
    assert len(records) < 100


async def test_a_line_is_on_kafka_while_its_handler_runs(settings):
    """L2: after 200 ms a line is readable, and a worker that is stopped loses none. What the worker
    logs meanwhile, and all else in its process, is not in the log (L1)."""
    worker = Worker(settings)
    seen = []

    @worker.stage("t.s")
    async def stage(task):
        print("begun")
        seen.append(await wait_until(lambda: chunks_of(settings)))
        print("last")
        return Done()

    await release(settings, 4)
    async with running_service(worker.serve):
        log.warning("outside of handlers")
        print("outside of handlers")
        logging.getLogger("penstock.worker").warning("of the worker")
        await wait_until(lambda: seen)
    assert [line[3] for line in seen[0][4][0]["lines"]] == ["begun"]
    chunks = (await chunks_of(settings))[4]
    assert [line[3] for chunk in chunks for line in chunk["lines"]] == ["begun", "last"]
    assert [chunk["first"] for chunk in chunks] == [0, 1]
    assert chunks[-1]["end"] == "done"


async def test_a_worker_without_task_logs_ships_nothing(settings, capsys):
    """L1: `off` leaves the output of handlers in the worker's own."""
    worker = Worker(kafka=settings.kafka, prefix=settings.prefix, objects="memory:///", task_logs="off")
    done = []

    @worker.stage("t.s")
    async def stage(task):
        print("printed")
        task.log.info("structured")
        done.append(task.id)
        return Done()

    await release(settings, 1)
    async with running_service(worker.serve):
        await wait_until(lambda: done)
    assert await chunks_of(settings) == {}
    assert "printed" in capsys.readouterr().out
