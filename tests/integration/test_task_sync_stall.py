"""Task-sync that is alive and does not move, on the real Kafka and PostgreSQL: it ends, and the next one goes on."""

import asyncio
from contextlib import asynccontextmanager

import asyncpg
import pytest
from tests.running import make_topics, read, running_service, write
from tests.waiting import wait_until

from penstock import process
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.errors import CannotStart, SettingsError, Stalled
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.task_sync import ingest
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

STALL_S = 2.0


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    return TaskSyncSettings(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=database,
        objects="memory:///",
        window=2,
        release_batch=2,
        stall_timeout_s=STALL_S,
    )


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=1))
        yield pool


@asynccontextmanager
async def locked(dsn, table):
    """Whoever writes to the table waits for the end of the block."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE penstock.{table} IN EXCLUSIVE MODE")
            yield
    finally:
        await connection.close()


def started(settings):
    return asyncio.create_task(create_app(settings)(asyncio.Event(), lambda: None))


async def contexts(pool):
    """Which submissions have become tasks."""
    return [bytes(row["context"]) for row in await pool.fetch("SELECT context FROM task ORDER BY id")]


async def states(pool):
    rows = await pool.fetch("SELECT state, count(*) AS tasks FROM task GROUP BY state")
    return {row["state"]: row["tasks"] for row in rows}


async def submitted(settings, *numbers):
    records = ({"type": "t", "context": number} for number in numbers)
    await write(settings.kafka, f"{settings.prefix}submitted", *records, partition=0)


async def test_ingest_whose_statement_hangs_ends_the_process_and_the_next_loses_nothing(settings, pool):
    """O2a, T5: records at hand and no commit for the limit; every record becomes a task once after all."""
    service = started(settings)
    await submitted(settings, 1)
    await wait_until(lambda: contexts(pool))
    async with locked(settings.postgres, "ingested"):
        await submitted(settings, 2, 3)
        with pytest.raises(Stalled, match=r"taking in submitted/0 from 1: no progress for 2 s") as ended:
            await asyncio.wait_for(service, 30)
    assert process.exit_status(ended.value) == process.EXIT_FAILED

    async def all_taken_in():
        return len(await contexts(pool)) >= 4

    async with running_service(create_app(settings)):
        await submitted(settings, 4)
        await wait_until(all_taken_in)
    assert await contexts(pool) == [b"1", b"2", b"3", b"4"]


async def test_ingest_that_cannot_learn_where_to_read_on_ends_the_process(settings, pool):
    """O2a: a partition was assigned, and what PostgreSQL knows of it is not to be had."""
    async with locked(settings.postgres, "ingested"):
        with pytest.raises(Stalled, match="asking where to read on: no progress"):
            await asyncio.wait_for(started(settings), 30)


async def test_an_ingest_that_was_not_told_where_to_read_on_does_not_go_deaf(settings, pool):
    """O2, T5: what PostgreSQL answers to an assignment ends the process; aiokafka alone would swallow it."""
    await pool.execute("ALTER TABLE ingested RENAME TO mislaid")
    with pytest.raises(CannotStart, match="ingested"):
        await asyncio.wait_for(started(settings), 30)


async def test_a_release_whose_statement_hangs_ends_the_process_and_the_next_goes_on(settings, pool):
    """O2a, S7: tasks are ready and the gate does not move; nothing is released twice or lost by its end."""
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(None))])
    async with locked(settings.postgres, "release"):
        with pytest.raises(Stalled, match="releasing t: no progress for 2 s"):
            await asyncio.wait_for(started(settings), 30)
    assert await states(pool) == {"ready": 1}

    async def queued():
        return await states(pool) == {"queued": 1}

    async with running_service(create_app(settings)):
        await wait_until(queued)
    assert len(await read(settings.kafka, f"{settings.prefix}ready.t")) == 1


async def test_records_that_are_there_and_not_read_end_the_process(settings, pool, monkeypatch):
    """O2a: lag without progress, though nothing is at hand; the broker tells, not the consumer."""
    consumers = []
    make_consumer = ingest.make_consumer

    def make(*arguments, **options):
        consumers.append(make_consumer(*arguments, **options))
        return consumers[-1]

    monkeypatch.setattr(ingest, "make_consumer", make)
    service = started(settings)
    await wait_until(lambda: consumers and consumers[0].assignment())
    # What a fetcher that has lost its partitions looks like from outside.
    consumers[0].pause(*consumers[0].assignment())
    await submitted(settings, 1)
    with pytest.raises(Stalled, match="reading submitted/0 from 0: no progress"):
        await asyncio.wait_for(service, 30)
    assert await contexts(pool) == []


@pytest.mark.parametrize(
    ("count", "then"),
    [
        pytest.param(1, {"queued": 1}, id="nothing left"),
        pytest.param(5, {"queued": 2, "ready": 3}, id="a full window"),
    ],
)
async def test_who_has_nothing_to_do_does_not_stall(settings, pool, count, then):
    """O2a: at rest are an ingest without records, and a gate with nothing to release, or whose workers do not take."""
    async with running_service(create_app(settings)) as service:
        await tasks.submit(pool, [Submission(type="t", context=Context.encode(n)) for n in range(count)])

        async def so():
            return await states(pool) == then

        await wait_until(so)
        await asyncio.wait({service}, timeout=2 * STALL_S)
        assert not service.done()


def test_a_limit_that_a_rebalance_could_reach_is_refused():
    """O2a: the same setting as that of the processors, refused for the same reason."""
    with pytest.raises(
        SettingsError, match=r"stall_timeout_s=15.0 must be at least twice session_timeout_s=10.0"
    ):
        TaskSyncSettings.load({}, stall_timeout_s=15.0)
