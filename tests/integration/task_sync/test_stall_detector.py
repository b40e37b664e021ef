"""A stalled task-sync ends itself, and the next process continues, on the real Kafka and
PostgreSQL."""

import asyncio
from contextlib import asynccontextmanager

import asyncpg
import pytest
from tests.support.services import read, running_service, write
from tests.support.waiting import in_time, wait_until

from penstock import process
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.errors import CannotStart, SettingsError, Stalled
from penstock.ingest import reader
from penstock.postgres import ownership, release, tasks, types
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = (types.TaskType(name="t", partitions=1),)

# Longer than joining a group takes on a busy machine.
STALL_S = 5.0


@pytest.fixture
def settings(where):
    return TaskSyncSettings(**where, window=2, release_batch=2, stall_timeout_s=STALL_S)


@asynccontextmanager
async def locked(dsn, table, statement="LOCK TABLE penstock.{} IN EXCLUSIVE MODE"):
    """Blocks writers of the table, or of its rows, until the end of the block."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute(statement.format(table))
            yield
    finally:
        await connection.close()


def start(settings):
    return asyncio.create_task(create_app(settings)(asyncio.Event(), lambda: None))


async def contexts(pool):
    """Returns the contexts of all tasks in order of id."""
    return [bytes(row["context"]) for row in await pool.fetch("SELECT context FROM task ORDER BY id")]


async def all_ingested(pool, count):
    """Returns when there are so many tasks."""

    async def reached():
        return len(await contexts(pool)) >= count

    await wait_until(reached)


async def states(pool):
    rows = await pool.fetch("SELECT state, count(*) AS tasks FROM task GROUP BY state")
    return {row["state"]: row["tasks"] for row in rows}


async def submitted(settings, *numbers):
    records = ({"type": "t", "context": number} for number in numbers)
    await write(settings.kafka, f"{settings.prefix}submitted", *records, partition=0)


async def test_an_unresponsive_ingest_statement_ends_the_process_without_loss(settings, pool):
    """O2a, T5: the process ends when an ingest statement hangs for the limit. The next process
    turns every record into one task."""
    service = start(settings)
    await submitted(settings, 1)
    await wait_until(lambda: contexts(pool))
    # A statement waits for its table before it can limit its waits for rows.
    async with locked(settings.postgres, "ingested"):
        await submitted(settings, 2, 3)
        with pytest.raises(Stalled, match=r"inserting submitted/0 from 1: no progress for 5 s") as ended:
            await in_time(service)
    assert process.exit_status(ended.value) == process.EXIT_FAILED

    async with running_service(create_app(settings)):
        await submitted(settings, 4)
        await all_ingested(pool, 4)
    assert await contexts(pool) == [b"1", b"2", b"3", b"4"]


async def test_an_ingest_that_waits_for_a_row_does_not_stall(settings, pool):
    """S12, O2a: while another transaction locks the position of a partition for longer than the
    stall timeout, the process waits, and then inserts each record once."""
    async with running_service(create_app(settings)) as service:
        await submitted(settings, 1)
        await wait_until(lambda: contexts(pool))
        async with locked(settings.postgres, "ingested", "SELECT FROM penstock.{} FOR UPDATE"):
            await submitted(settings, 2, 3)
            await asyncio.wait({service}, timeout=2 * STALL_S)
            assert not service.done()
            assert await contexts(pool) == [b"1"]
        await all_ingested(pool, 3)
    assert await contexts(pool) == [b"1", b"2", b"3"]


async def test_an_ingest_without_stored_offsets_ends_the_process(settings, pool):
    """O2a: the process ends when PostgreSQL does not return the stored offsets of an assigned
    partition."""
    async with locked(settings.postgres, "ingested"):
        with pytest.raises(Stalled, match="seeking to the stored offsets of submitted: no progress"):
            await in_time(start(settings))


async def test_a_failed_read_of_offsets_ends_the_process(settings, pool):
    """O2, T5: PostgreSQL's error for an assignment ends the process; aiokafka alone would ignore
    the error."""
    await pool.execute("ALTER TABLE ingested RENAME TO renamed")
    with pytest.raises(CannotStart, match="ingested"):
        await in_time(start(settings))


async def test_an_unresponsive_release_ends_the_process_without_loss(settings, pool, monkeypatch):
    """O2a, S7: the process ends when a release hangs. Its end neither loses a task nor releases one
    twice."""
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(None))])

    async def hang(*_arguments, **_options):
        await asyncio.Event().wait()

    with monkeypatch.context() as stuck:
        stuck.setattr(release, "release", hang)
        with pytest.raises(Stalled, match="releasing t: no progress for 5 s"):
            await in_time(start(settings))
    assert await states(pool) == {"ready": 1}

    async def queued():
        return await states(pool) == {"queued": 1}

    async with running_service(create_app(settings)):
        await wait_until(queued)
    assert len(await read(settings.kafka, f"{settings.prefix}ready.t")) == 1


async def test_acquiring_many_types_does_not_stall(settings, pool, monkeypatch):
    """S7, O2a: each lock is progress, also when all of them take longer than the stall timeout. The
    process would end, and the next one would begin anew, without end."""
    for number in range(14):
        await types.register(pool, types.TaskType(name=f"t{number}", partitions=1))
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(None))])
    lock = ownership.lock

    async def slow_lock(*arguments):
        await asyncio.sleep(STALL_S / 10)
        return await lock(*arguments)

    monkeypatch.setattr(ownership, "lock", slow_lock)

    async def queued():
        return await states(pool) == {"queued": 1}

    async with running_service(create_app(settings)):
        await wait_until(queued)


async def test_a_release_that_waits_for_a_lock_does_not_stall(settings, pool):
    """S12, O2a: while another transaction locks the table of releases for longer than the stall
    timeout, the process waits and keeps its types. It releases when the lock ends."""
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(None))])
    async with running_service(create_app(settings)) as service:

        async def queued():
            return await states(pool) == {"queued": 1}

        await wait_until(queued)
        async with locked(settings.postgres, "release"):
            await tasks.submit(pool, [Submission(type="t", context=Context.encode(None))])
            await asyncio.wait({service}, timeout=2 * STALL_S)
            assert not service.done()
            assert await states(pool) == {"queued": 1, "ready": 1}

        async def both_queued():
            return await states(pool) == {"queued": 2}

        await wait_until(both_queued)
        assert not service.done()


async def test_unread_records_end_the_process(settings, pool, monkeypatch):
    """O2a: lag without progress ends the process, even with no record in flight, because the broker
    reports the lag."""
    consumers = []
    make_consumer = reader.make_consumer

    def make(*arguments, **options):
        consumers.append(make_consumer(*arguments, **options))
        return consumers[-1]

    monkeypatch.setattr(reader, "make_consumer", make)
    service = start(settings)
    await wait_until(lambda: consumers and consumers[0].assignment())
    # Looks like a fetcher that has lost its partitions: ingest resumes only those that it sees
    # paused.
    monkeypatch.setattr(consumers[0], "paused", set)
    consumers[0].pause(*consumers[0].assignment())
    await submitted(settings, 1)
    with pytest.raises(Stalled, match="reading submitted/0 from 0: no progress"):
        await in_time(service)
    assert await contexts(pool) == []


async def test_an_idle_task_sync_does_not_stall(settings, pool):
    """O2a: task-sync does not stall when it has no records, no task of one type to release, and a
    full window of another."""
    await types.register(pool, types.TaskType(name="other", partitions=1))
    async with running_service(create_app(settings)) as service:
        await tasks.submit(pool, [Submission(type="t", context=Context.encode(n)) for n in range(5)])
        await tasks.submit(pool, [Submission(type="other", context=Context.encode(None))])

        async def reached():
            return await states(pool) == {"queued": 3, "ready": 3}

        await wait_until(reached)
        await asyncio.wait({service}, timeout=2 * STALL_S)
        assert not service.done()


def test_a_limit_that_a_rebalance_could_reach_is_refused():
    """O2a: a stall timeout that a rebalance could reach raises a SettingsError, as for the
    processors."""
    with pytest.raises(
        SettingsError,
        match=r"PENSTOCK_STALL_TIMEOUT_S=13\.0 must be at least twice PENSTOCK_SESSION_TIMEOUT_S=7\.0",
    ):
        TaskSyncSettings.load({}, stall_timeout_s=13.0)
