"""Task-sync on the real Kafka and PostgreSQL: what loses its record is released again, and nothing else is."""

from contextlib import AsyncExitStack

import pytest
from tests.running import make_topics
from tests.system import RECHECK_S, System
from tests.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.kafka.connection import admin_client
from penstock.kafka.topics import workers_group
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool


@pytest.fixture
async def system(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        yield System(kafka_servers, prefix, database, stack, pool)


async def test_records_deleted_from_a_ready_topic_are_released_again(system):
    """T5: lost by retention before any worker came, the tasks are run all the same, each once."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.submit(30)
    await system.become(queued=30)
    await system.lose_records()
    await system.work()
    await system.become(succeeded=30)
    assert set(system.executed.values()) == {1}


async def test_what_never_had_a_record_is_released_again(system):
    """T5: a worker has read everything there was; what is queued all the same was never written."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    await system.submit(20)
    await system.become(succeeded=20)
    async with system.pool.acquire() as connection, connection.transaction():
        submitted = await tasks.submit(connection, [Submission(type="t", context=Context.encode(0))])
        await connection.execute("UPDATE task SET state = 'queued' WHERE id = $1", submitted[0].id)
    # Something to begin proofs for: the gate asks nothing as long as it has released nothing.
    await system.submit(1)
    await system.become(succeeded=22)
    assert set(system.executed.values()) == {1}


async def test_a_ready_topic_made_anew_gets_its_records_again(system):
    """T5: deleted and created by somebody, under a running task-sync and worker."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.submit(20)
    await system.become(queued=20)
    topic = f"{system.where['prefix']}ready.t"
    async with admin_client(system.settings()) as admin:
        await admin.delete_topics([topic])

    async def anew():
        async with admin_client(system.settings()) as admin:
            return topic in await admin.list_topics()

    await wait_until(anew, what="task-sync has made the topic again")
    await system.work()
    await system.become(succeeded=20)
    assert set(system.executed.values()) == {1}


async def test_a_new_kafka_beside_an_old_database_gets_the_records_again(system, prefix):
    """T5: nothing of the old cluster is left, no group has ever committed anything."""
    await system.start("task-sync")
    await system.submit(20)
    await system.become(queued=20)
    await system.stack.aclose()
    # Under another prefix there is nothing, as on another cluster.
    system.where["prefix"] = f"{prefix}anew."
    await make_topics(system.where["kafka"], system.where["prefix"])
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    await system.become(succeeded=20)
    assert set(system.executed.values()) == {1}
    await system.stack.aclose()


async def test_tasks_of_a_slow_worker_are_not_released_again(system):
    """W4: full worker, full backlog, the rest unread or in its consumer's buffer over many proofs: each runs once."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.work(handler_s=RECHECK_S, pool=10, backlog=5)
    await system.submit(60)
    await system.become(succeeded=60)
    assert set(system.executed.values()) == {1}
    assert len(await system.records()) == 60, "no record was written twice"


async def test_records_deleted_while_a_full_worker_has_them_in_its_buffer_are_not_lost(system):
    """W4: fetched and not yet claimed, they run once although Kafka has them no more."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.work(handler_s=RECHECK_S * 2, pool=10, backlog=0)
    await system.submit(40)
    await wait_until(lambda: len(system.executed) == 10)
    await system.lose_records()
    await system.become(succeeded=40)
    assert set(system.executed.values()) == {1}


async def test_tasks_that_nobody_takes_stay_where_they_are(system):
    """S6: without workers there is nothing to prove and nothing to ask the database."""
    await system.start("task-sync")
    await system.submit(10)
    await system.become(queued=10)
    activity = (
        "SELECT clock_timestamp() - max(query_start) > interval '3 seconds' FROM pg_stat_activity"
        " WHERE application_name LIKE 'penstock task-sync%' AND datname = current_database()"
    )

    async def quiet():
        async with system.pool.acquire() as connection:
            await connection.execute("SET stats_fetch_consistency = 'none'")
            return await connection.fetchval(activity)

    await wait_until(quiet, what="task-sync asks nothing over three proofs' time")
    assert len(await system.records()) == 10
    async with admin_client(system.settings()) as admin:
        assert not await admin.list_consumer_group_offsets(workers_group(system.where["prefix"], "t"))
