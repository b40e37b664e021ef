"""Typed contexts on the whole way of a task."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.pipeline import System
from tests.support.services import make_topics, running_service

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.worker import Done, Next, Task, Worker, WorkerSettings


@dataclass
class Video:
    file: Path
    seconds: float = 0.0


@pytest.fixture
async def system(kafka_servers, prefix, database):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=2, max_attempts=5, retry_base_ms=1))
        system = System(kafka_servers, prefix, database, stack, pool)
        await system.start("task-sync", "heartbeats", "stages")
        yield system


async def test_typed_contexts_pass_the_stages_and_a_wrong_one_fails_its_task_once(system):
    """W1: an object that one stage returns is the object that the next one receives. A context that
    does not fit fails its task at its first attempt, and costs no other task."""
    worker = Worker(WorkerSettings(**system.where, objects="memory:///"))
    seen = []

    @worker.stage("t.start")
    async def start(task: Task[Video]) -> Next:
        return Next("second", Video(task.context.file, 12.5))

    @worker.stage("t.second")
    def second(task: Task[Video]) -> Done:
        seen.append(task.context)
        return Done(task.context)

    good, bad = await tasks.submit(
        system.pool,
        [
            Submission(type="t", context=Context.encode(context))
            for context in ({"file": "a.mkv"}, {"file": "a.mkv", "seconds": "12"})
        ],
    )
    async with running_service(worker.serve):
        await system.become(succeeded=1, failed=1)
    assert seen == [Video(Path("a.mkv"), 12.5)]
    row = await tasks.get(system.pool, good.id)
    assert tasks.context_of(row, "result").decode() == {"file": "a.mkv", "seconds": 12.5}
    row = await tasks.get(system.pool, bad.id)
    assert len(row["attempts"]) == 1
    assert "fit Video: Expected `float`, got `str` - at `$.seconds`" in row["error"]
    assert '"kind":"InvalidContext"' in row["error"].replace(" ", "")
