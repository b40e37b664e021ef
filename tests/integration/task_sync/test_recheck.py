"""Task-sync on the real Kafka and PostgreSQL: it releases exactly the tasks whose records are lost
again."""

from contextlib import AsyncExitStack

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata
from tests.support.pipeline import RECHECK_S
from tests.support.services import make_topics
from tests.support.state_faults import commit_offsets, expire_group_offsets, recreate_topic
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.position import Position, topic_of
from penstock.errors import KafkaUnavailable
from penstock.kafka.client.connection import admin_client, make_consumer, running
from penstock.kafka.topology.topics import HEARTBEATS, STAGE_RESULTS, ready, service_group, workers_group
from penstock.postgres import release, tasks, types
from penstock.postgres.session import open_session
from penstock.task_sync.recheck import CHECKS, Recheck


async def test_a_task_without_a_record_is_released_again(system):
    """T5: a task that is queued after a worker has read every record has no record, and is released
    again."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    await system.submit(20)
    await system.become(succeeded=20)
    async with system.pool.acquire() as connection, connection.transaction():
        submitted = await tasks.submit(connection, [Submission(type="t", context=Context.encode(0))])
        await connection.execute("UPDATE task SET state = 'queued' WHERE id = $1", submitted[0].id)
    # A recheck starts only after a release.
    await system.submit(1)
    await system.become(succeeded=22)
    assert set(system.executed.values()) == {1}


async def test_a_topic_that_does_not_answer_stops_the_recheck_of_no_other_type(system, monkeypatch):
    """S1, T5: one ready topic does not tell its offsets. Lost records of another type are found."""
    await types.register(system.pool, types.TaskType(name="broken", partitions=2))
    read = Recheck._read_offsets

    async def read_offsets(self, topic, group):
        if topic.name == "ready.broken":
            raise KafkaUnavailable("no leader")
        return await read(self, topic, group)

    monkeypatch.setattr(Recheck, "_read_offsets", read_offsets)
    await system.start("task-sync", "heartbeats", "stages")
    broken = [Submission(type="broken", context=Context.encode(0))] * 5
    await tasks.submit(system.pool, broken)
    await system.submit(30)
    await system.become(queued=35)
    await system.lose_records()
    await system.work()
    await system.become(queued=5, succeeded=30)


async def test_a_recreated_ready_topic_gets_its_records_again(system):
    """T5: a ready topic that is deleted and created again under running services gets its records
    again."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.submit(20)
    await system.become(queued=20)
    topic = f"{system.where['prefix']}ready.t"
    async with admin_client(system.settings()) as admin:
        await admin.delete_topics([topic])

    async def created():
        async with admin_client(system.settings()) as admin:
            return topic in await admin.list_topics()

    await wait_until(created, what="task-sync creates the topic again")
    await system.work()
    await system.become(succeeded=20)
    assert set(system.executed.values()) == {1}


async def test_a_new_kafka_gets_the_records_of_an_old_database(system, prefix):
    """T5: a new Kafka without records and offsets gets the records of the queued tasks again."""
    await system.start("task-sync")
    await system.submit(20)
    await system.become(queued=20)
    await system.stack.aclose()
    # Another prefix without topics stands for a new cluster.
    system.where["prefix"] = f"{prefix}new."
    await make_topics(system.where["kafka"], system.where["prefix"])
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    await system.become(succeeded=20)
    assert set(system.executed.values()) == {1}
    await system.stack.aclose()


async def test_tasks_of_a_slow_worker_are_not_released_again(system):
    """W4: over many rechecks, tasks of a slow worker with a full backlog run once, buffered and
    unread ones included."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.work(handler_s=RECHECK_S, pool=10, backlog=5)
    await system.submit(60)
    await system.become(succeeded=60)
    assert set(system.executed.values()) == {1}
    assert len(await system.records()) == 60, "a record was written twice"


async def test_buffered_tasks_survive_deleted_records(system):
    """W4: tasks in a consumer's buffer run once, even after Kafka deletes their records."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.work(handler_s=RECHECK_S * 2, pool=10, backlog=0)
    await system.submit(40)
    await wait_until(lambda: len(system.executed) == 10)
    await system.lose_records()
    await system.become(succeeded=40)
    assert set(system.executed.values()) == {1}


async def test_tasks_without_workers_are_not_rechecked(system):
    """S6: without workers, task-sync starts no recheck and sends no query."""
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

    await wait_until(quiet, what="task-sync sends no query during three rechecks")
    assert len(await system.records()) == 10
    async with admin_client(system.settings()) as admin:
        assert not await admin.list_consumer_group_offsets(workers_group(system.where["prefix"], "t"))


async def test_a_clock_that_is_set_back_makes_no_released_task_lost(system):
    """T5, W4: the clock of PostgreSQL is set back by two hours after a recheck has begun. A task
    that is released then seems to be queued before the recheck, but it has a record: it is not
    released again. Tasks that were queued before are, also when their clock was ahead."""
    [before, ahead, after] = await system.submit(3)
    async with open_session(system.database, "test") as session:

        async def queue(id_, updated_at):
            await system.pool.execute(
                f"UPDATE task SET state = 'queued', updated_at = {updated_at} WHERE id = $1", id_
            )

        await queue(before, "now()")
        await queue(ahead, "now() + interval '2 hours'")
        cutoffs = await release.queued_cutoffs(session, ["t"])
        await queue(after, "now() - interval '2 hours'")
        assert sorted(await release.make_lost_ready(system.pool, "t", cutoffs["t"], 10)) == [before, ahead]


async def test_a_batch_that_kafka_has_not_confirmed_is_not_lost(system):
    """T5: tasks of a release whose note is still there may get their records yet."""
    [before, noted] = await system.submit(2)
    await system.pool.execute("UPDATE task SET state = 'queued' WHERE id = $1", before)
    async with open_session(system.database, "test") as session:
        batch = (await release.release(session, types.TaskType(name="t", partitions=2), 10, [])).batch
        assert [task.fence.id for task in batch.tasks] == [noted]
        cutoffs = await release.queued_cutoffs(session, ["t"])
        assert await release.make_lost_ready(system.pool, "t", cutoffs["t"], 10) == [before]


async def test_expired_offsets_and_deleted_records_stop_no_type(system):
    """Offsets of a workers' group that expired, with records that were deleted, fill no window:
    tasks are released again, those whose records are gone as well."""
    await system.start("task-sync", "heartbeats", "stages")
    async with AsyncExitStack() as stack:
        here, system.stack = system.stack, stack
        await system.work()
        await system.submit(60)
        await system.become(succeeded=60)
    system.stack = here
    await system.submit(30)
    await system.become(succeeded=60, queued=30)
    await expire_group_offsets(system.settings(), workers_group(system.where["prefix"], "t"))
    await system.lose_records()
    await system.submit(10)
    await system.work()
    await system.become(succeeded=100)
    assert set(system.executed.values()) == {1}


async def test_a_commit_in_a_deleted_topic_proves_nothing_about_one_of_the_same_size(system, monkeypatch):
    """T5: the ready topic is deleted and created again, and has grown to the offsets that its group
    committed before. Its records are not read, so no task is released a second time."""
    group = workers_group(system.where["prefix"], "t")
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync", "heartbeats", "stages")
        await system.work()
        await system.submit(20)
        await system.become(succeeded=20)
    async with admin_client(system.settings()) as admin:
        committed = await admin.list_consumer_group_offsets(group)
    topic_ids = {topic_of(found.metadata) for found in committed.values()}
    assert len(topic_ids) == 1
    [topic_id] = topic_ids
    assert topic_id
    await recreate_topic(system.settings(), ready("t", 2))
    check, checks = Recheck._check, 0

    async def counted(self):
        nonlocal checks
        await check(self)
        checks += 1

    monkeypatch.setattr(Recheck, "_check", counted)
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync", "heartbeats", "stages")
        await system.submit(20)
        await system.become(succeeded=20, queued=20)
        partitions = [TopicPartition(f"{system.where['prefix']}ready.t", number) for number in range(2)]
        async with running(make_consumer(system.settings(), None)) as consumer:
            ends = await consumer.end_offsets(partitions)
        positions = {tp: Position(end, topic_id, 0) for tp, end in ends.items()}
        await commit_offsets(
            system.settings(),
            group,
            {
                tp: OffsetAndMetadata(position.offset, position.identity())
                for tp, position in positions.items()
            },
        )
        before = checks
        await wait_until(lambda: checks > before + 3 * CHECKS, what="the recheck had time for a proof")
        assert len(await system.records()) == 20
        await system.work()
        await system.become(succeeded=40)
        assert set(system.executed.values()) == {1}


async def test_a_recreated_heartbeats_topic_stops_no_recheck(system):
    """Committed offsets beyond the end of a topic stop neither its reader nor the recheck."""
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync", "heartbeats", "stages")
        await system.work()
        await system.submit(60)
        await system.become(succeeded=60)
    for topic in (HEARTBEATS, STAGE_RESULTS):
        offsets = {}
        async with admin_client(system.settings()) as admin:
            for service in ("heartbeats", "stages"):
                group = service_group(system.where["prefix"], service)
                offsets |= {group: await admin.list_consumer_group_offsets(group)}
        await recreate_topic(system.settings(), topic)
        for group, committed in offsets.items():
            await commit_offsets(system.settings(), group, committed)
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync", "heartbeats", "stages")
        await system.submit(20)
        await system.become(succeeded=60, queued=20)
        await system.lose_records()
        await system.work()
        await system.become(succeeded=80)
