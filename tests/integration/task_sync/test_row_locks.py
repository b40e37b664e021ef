"""Locks that other transactions hold while task-sync releases, on the real Kafka and PostgreSQL."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import orjson
import pytest
from aiokafka.admin import NewPartitions
from tests.integration.task_sync.test_limits import become, in_state, register, settings, submit
from tests.support.replicas import replica
from tests.support.services import running_service

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.task import Priority
from penstock.errors import KafkaUnavailable
from penstock.ingest.reader import TRANSACTIONS
from penstock.kafka.client.connection import admin_client, make_producer, running
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import SUBMITTED
from penstock.postgres import limits, tasks, types
from penstock.postgres.session import open_session
from penstock.task_sync import key_scan, topic_opener
from penstock.task_sync.app import create_app
from penstock.task_sync.limits import PAGES_PER_RELEASE, ReleaseLimiter
from penstock.task_sync.settings import TaskSyncSettings

# Each test registers its types.
TASK_TYPES = ()

__all__ = ["settings"]  # fixtures

# Each way of a release.
TYPES = {
    "plain": {},
    "limited": {"max_in_flight": 1_000},
    "by rate": {"starts_per_s": 1_000.0},
    "ageing": {"ageing_s": 60.0},
    "by key": {"max_per_key": 1_000},
    "fair": {"fair": True},
    "ageing by key": {"ageing_s": 60.0, "fair": True, "max_per_key": 1_000},
}


@asynccontextmanager
async def other_transaction(database, statement, *arguments):
    """Holds the locks that a statement takes until the end of the block, and rolls back."""
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(statement, *arguments)
    try:
        yield
    finally:
        await transaction.rollback()
        await connection.close()


@pytest.mark.parametrize("fields", TYPES.values(), ids=TYPES)
async def test_locked_tasks_delay_no_other(settings, pool, database, fields):
    """S12: while another transaction locks ten ready tasks of a type, the other tasks of this type
    and those of another type are released. The ten follow when the locks end, without a
    notification and without a sweep."""
    await register(pool, **fields)
    await types.register(pool, types.TaskType(name="other", partitions=1))
    locked_ids = await submit(pool, 10)
    settings = TaskSyncSettings(**{**vars(settings), "sweep_s": 3600.0})
    locks = other_transaction(
        database, "SELECT FROM task WHERE id = ANY ($1::bigint[]) FOR UPDATE", locked_ids
    )
    async with AsyncExitStack() as holder:
        await holder.enter_async_context(locks)
        async with running_service(create_app(settings)):
            free_ids = await submit(pool, 5)
            await tasks.submit(pool, [Submission(type="other", context=Context.encode(None))])
            await become(pool, "queued", 5, "type = 't'")
            await become(pool, "queued", 1, "type = 'other'")
            assert await in_state(pool, "ready") == locked_ids
            assert await in_state(pool, "queued", "type = 't'") == free_ids
            await holder.aclose()
            await become(pool, "queued", 15, "type = 't'")


async def test_a_locked_type_delays_no_submission(settings, pool, database):
    """S12: while another transaction locks the row of a type against everything, submissions are
    inserted, and the tasks of this and of another type are released."""
    await register(pool)
    await types.register(pool, types.TaskType(name="other", partitions=1))
    async with (
        running_service(create_app(settings)),
        other_transaction(database, "SELECT FROM task_type WHERE name = 't' FOR UPDATE"),
    ):
        for name in ("t", "other"):
            await tasks.submit(pool, [Submission(type=name, context=Context.encode(None))])
            await become(pool, "queued", 1, f"type = '{name}'")


async def test_new_topics_do_not_delay_owned_types(settings, pool, monkeypatch):
    """S12: while Kafka creates the ready topics of new types, the types that are owned already are
    released. A topic that Kafka refuses delays only its own type."""
    await register(pool)
    permitted = asyncio.Event()

    async def create(settings, topics):
        names = [topic.name for topic in topics]
        if "ready.refused" in names:
            raise KafkaUnavailable("Kafka would not create it")
        if "ready.t" not in names:
            await permitted.wait()
        await create_topics(settings, topics)

    monkeypatch.setattr(topic_opener, "create_topics", create)
    async with running_service(create_app(settings)) as service:
        await submit(pool)
        await become(pool, "queued", 1)
        for name in ("refused", *(f"new{number}" for number in range(5))):
            await types.register(pool, types.TaskType(name=name, partitions=1))
            await tasks.submit(pool, [Submission(type=name, context=Context.encode(None))])
        await submit(pool)
        await become(pool, "queued", 2)
        permitted.set()
        await become(pool, "queued", 7)
        assert await in_state(pool, "ready", "type = 'refused'")
        assert not service.done()


@pytest.mark.parametrize("ageing_s", [None, 1e-6])
async def test_a_release_reads_a_bounded_number_of_keys(pool, database, monkeypatch, ageing_s):
    """S12: among many concurrency keys without room, each release reads a few pages of keys, so
    that other types have their turn. Together the releases find the one key with room, and come to
    an end."""
    monkeypatch.setattr(key_scan, "KEYS_PER_PAGE", 4)
    pages = []

    async def key_queues(*arguments):
        pages.append(arguments)
        return await really(*arguments)

    really = limits.key_queues
    monkeypatch.setattr(limits, "key_queues", key_queues)
    await register(pool, max_per_key=1, ageing_s=ageing_s)
    for number in range(100):
        await submit(pool, 1, key=f"k{number:03}")
    await pool.execute("UPDATE task SET state = 'queued', tracked = true")
    for number in range(100):
        await submit(pool, 1, key=f"k{number:03}")
    [free] = await submit(pool, 1, key="k070b")
    async with open_session(database, "owner") as session:
        limiter = ReleaseLimiter(session, lambda _name: None)
        await limiter.load()
        task_type = (await types.all_types(pool))["t"]
        released, more, turns = [], True, 0
        while more:
            pages.clear()
            result = await limiter.release(task_type, 10, list)
            assert len(pages) <= len(Priority) + PAGES_PER_RELEASE + 1
            released += [task.fence.id for task in result.batch.tasks] if result.batch else []
            more, turns = result.more, turns + 1
            assert turns < 50
        limiter.close()
    assert released == [free]


@asynccontextmanager
async def locked_submissions(settings, pool, database):
    """Submissions on several partitions, in each of which another transaction locks the second one.

    Yields the locked partitions, the task of the locked key, and a function that ends the locks.
    """
    await register(pool, paused=True)
    task = Submission(type="t", context=Context.encode(None), idempotency_key="k")
    [first] = await tasks.submit(pool, [task])
    topic = settings.prefix + SUBMITTED.name
    # More than ingest has transactions.
    locked = range(2 * TRANSACTIONS)
    keys = [(number, f"{key}{number}") for number in locked for key in ("before", "k", "behind")]
    keys += [(len(locked), f"free{number}") for number in range(20)]
    async with admin_client(settings) as admin:
        await admin.create_partitions({topic: NewPartitions(len(locked) + 1)})
    async with AsyncExitStack() as holder:
        await holder.enter_async_context(
            other_transaction(database, "DELETE FROM task WHERE id = $1", first.id)
        )
        async with running(make_producer(settings)) as producer:
            for number, key in keys:
                value = orjson.dumps({"type": "t", "idempotency_key": "k" if key[0] == "k" else key})
                await producer.send_and_wait(topic, value, partition=number)
        yield locked, first, holder.aclose


async def insert_all_but_locked(pool, locked):
    await become(pool, "ready", 20, "idempotency_key LIKE 'free%'")
    await become(pool, "ready", len(locked), "idempotency_key LIKE 'before%'")
    assert not await in_state(pool, "ready", "idempotency_key LIKE 'behind%'")


async def insert_locked(pool, locked, first):
    await become(pool, "ready", len(locked), "idempotency_key LIKE 'behind%'")
    assert await in_state(pool, "ready", "idempotency_key = 'k'") == [first.id]


async def test_a_locked_idempotency_key_delays_no_other_partition(settings, pool, database):
    """S12: while another transaction has deleted the task of an idempotency key, submissions of the
    key wait on their topic; those before them in the partition, and those of all other partitions,
    are inserted. The others follow when the transaction has ended, each once."""
    async with (
        locked_submissions(settings, pool, database) as (locked, first, end),
        running_service(create_app(settings)),
    ):
        await insert_all_but_locked(pool, locked)
        await end()
        await insert_locked(pool, locked, first)


async def test_a_killed_process_leaves_held_submissions_to_the_next_one(settings, pool, database, tmp_path):
    """S12, O1: kill -9 of task-sync while it holds partitions loses no submission, and inserts none
    twice."""
    settings = TaskSyncSettings(**{**vars(settings), "objects": f"file://{tmp_path}"})
    async with locked_submissions(settings, pool, database) as (locked, first, end):
        async with replica("task-sync", settings) as process:
            await insert_all_but_locked(pool, locked)
            process.kill()
        async with running_service(create_app(settings)):
            await end()
            await insert_locked(pool, locked, first)
    assert await pool.fetchval("SELECT count(*) FROM task") == 20 + 2 * len(locked) + 1
