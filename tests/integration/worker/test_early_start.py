"""Records that a worker runs before it claims them, on the real Kafka."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from tests.support.services import make_topics, producing, read, read_records, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import MARKER, ReadyTask
from penstock.core.completion import Fence
from penstock.core.early_start import EARLY_START, EarlyStart
from penstock.core.suspects import Isolation
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready, workers_group
from penstock.worker import Done, Worker, WorkerSettings, pull


@pytest.fixture
async def settings(kafka_servers, prefix):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 1)])
    return WorkerSettings(kafka=kafka_servers, prefix=prefix, objects="memory:///")


def make_worker(settings, **policy):
    """A worker that takes its partitions for assigned long ago."""
    worker = Worker(settings)
    # A busy machine may be slow: records count as new for longer here.
    worker._early_start = EarlyStart(**{"after_assignment_s": 0.0, "old_s": 60.0, **policy})
    return worker


def one_at_a_time(settings):
    return WorkerSettings(**{**vars(settings), "pool": 1})


async def release(settings, *ids, stage="quick", isolation=None):
    async with producing(settings.kafka) as producer:
        for task in ids:
            record = ReadyTask(
                Fence(task, 0, stage, 0), "t", Context.encode(None), 60_000, isolation=isolation
            )
            await producer.send(f"{settings.prefix}ready.t", record.encode(), partition=0)
        await producer.flush()


async def results(settings):
    records = await read(settings.kafka, f"{settings.prefix}stage-results")
    return [(entry["id"], entry["outcome"]) for record in records for entry in record["results"]]


async def has_results(settings, count):
    return len(await results(settings)) >= count


async def heartbeats(settings):
    records = await read(settings.kafka, f"{settings.prefix}heartbeats")
    return [(record["kind"], task[0]) for record in records for task in record["tasks"]]


async def committed(settings):
    async with admin_client(settings) as admin:
        offsets = await admin.list_consumer_group_offsets(workers_group(settings.prefix, "t"))
    return sum(meta.offset for meta in offsets.values() if meta.offset > 0)


async def has_committed(settings, offset):
    return await committed(settings) == offset


async def test_a_short_task_has_no_claim_and_no_lease(settings):
    """W3: a task that ends soon needs no record on `heartbeats`. Its offset is committed once its
    result is on Kafka."""
    worker = make_worker(settings, claim_after_s=60.0)

    @worker.stage("t.quick")
    async def quick(_task):
        return Done()

    async with running_service(worker.serve):
        for task in range(1, 6):
            await release(settings, task)
            await wait_until(lambda task=task: has_results(settings, task))
        await wait_until(lambda: has_committed(settings, 5))
    assert await results(settings) == [(task, "done") for task in range(1, 6)]
    assert await heartbeats(settings) == []


async def test_a_task_that_lasts_is_claimed(settings):
    """W3, H5: a task that lasts is claimed while it runs, and its offset is committed. Its lease
    ends with it."""
    worker = make_worker(settings)
    finish = asyncio.Event()

    @worker.stage("t.quick")
    async def quick(_task):
        await finish.wait()
        return Done()

    await release(settings, 7)
    async with running_service(worker.serve):
        await wait_until(lambda: has_committed(settings, 1))
        assert await heartbeats(settings) == [("claim", 7)]
        finish.set()
        await wait_until(lambda: has_results(settings, 1))
    assert await heartbeats(settings) == [("claim", 7), ("release", 7)]


async def test_an_offset_is_committed_only_behind_settled_records(settings):
    """W3: while an attempt has neither result nor claim, its offset and all after it stay
    uncommitted."""
    worker = make_worker(settings, claim_after_s=60.0)
    finish = asyncio.Event()

    @worker.stage("t.quick")
    async def quick(task):
        if task.id == 2:
            await finish.wait()
        return Done()

    async with running_service(worker.serve):
        await release(settings, 1, 2, 3, 4)
        await wait_until(lambda: has_results(settings, 3))
        await wait_until(lambda: has_committed(settings, 1))
        finish.set()
        await wait_until(lambda: has_committed(settings, 4))
    assert sorted(await results(settings)) == [(task, "done") for task in range(1, 5)]
    assert await heartbeats(settings) == []


async def test_suspects_are_claimed_before_they_begin(settings):
    """W8: a suspect may kill its worker, so it is claimed, and its offset committed, before it
    begins."""
    worker, seen = make_worker(settings), []

    @worker.stage("t.quick")
    async def quick(_task):
        seen.extend([await heartbeats(settings), await committed(settings)])
        return Done()

    await release(settings, 7, isolation=Isolation.ONE)
    async with running_service(worker.serve):
        await wait_until(lambda: has_results(settings, 1))
    assert seen == [[("claim", 7), ("beat", 7)], 1]


async def test_an_attempt_is_claimed_before_its_partition_moves(settings):
    """W2, W3: when a second worker joins, what runs on the first is claimed and committed. So no
    attempt runs twice."""
    finish, ran = asyncio.Event(), []

    def make():
        worker = make_worker(settings, claim_after_s=60.0)

        @worker.stage("t.quick")
        async def quick(task):
            ran.append(task.id)
            await finish.wait()
            return Done()

        return worker

    async with running_service(make().serve):
        await release(settings, 1, 2)
        await wait_until(lambda: len(ran) == 2)
        assert await heartbeats(settings) == []
        async with running_service(make().serve):
            await wait_until(lambda: has_committed(settings, 2))
            await release(settings, 3)
            await wait_until(lambda: 3 in ran)
            finish.set()
            await wait_until(lambda: has_results(settings, 3))
    assert sorted(await results(settings)) == [(task, "done") for task in (1, 2, 3)]
    assert ran == [1, 2, 3]
    assert ("claim", 1) in await heartbeats(settings)


async def test_an_attempt_is_claimed_before_its_worker_drains(settings):
    """W1, W3: a worker that stops leaves its group at once. It has claimed what it still runs, so
    no other worker begins that, too."""
    worker, finish, began = make_worker(settings, claim_after_s=60.0), asyncio.Event(), asyncio.Event()

    @worker.stage("t.quick")
    async def quick(_task):
        began.set()
        await finish.wait()
        return Done()

    async def stop_and_finish():
        await wait_until(lambda: has_committed(settings, 1))
        finish.set()

    async with running_service(worker.serve):
        await release(settings, 1)
        await began.wait()
        finishing = asyncio.create_task(stop_and_finish())
    await finishing
    assert await results(settings) == [(1, "done")]
    assert await heartbeats(settings) == [("claim", 1), ("release", 1)]


@asynccontextmanager
async def process(settings):
    """The probe worker in a process of its own, with the settings of `settings`."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.worker_probe",
        stdout=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PENSTOCK_KAFKA": settings.kafka,
            "PENSTOCK_PREFIX": settings.prefix,
            "PENSTOCK_OBJECTS": "memory:///",
            "CLAIM_AFTER_S": "60",
        },
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def test_an_unclaimed_attempt_of_a_killed_worker_runs_on_the_next(settings):
    """W1, W3: a worker that is killed before it has claimed an attempt leaves its record unread.
    The next worker claims it first, so that a task that kills its workers is counted."""
    async with process(settings) as first:
        await release(settings, 1, stage="long")
        assert await first.stdout.readline() == b"began 1-0-0\n"
        first.kill()
        await first.wait()
    assert await heartbeats(settings) == []
    assert await committed(settings) == 0
    worker, seen = make_worker(settings, after_assignment_s=10.0), []

    @worker.stage("t.long")
    async def long(_task):
        seen.append(await heartbeats(settings))
        return Done()

    async with running_service(worker.serve):
        await wait_until(lambda: has_results(settings, 1))
    assert seen == [[("claim", 1)]]


async def test_what_waits_behind_long_tasks_goes_back(settings):
    """W2: attempts that wait while no handler becomes free are handed back, once each. The full
    worker takes no others, so nothing goes round and round."""
    # The attempts before the long one suggest that handlers become free soon.
    worker, finish, began = (
        make_worker(one_at_a_time(settings), horizon_s=5.0),
        asyncio.Event(),
        [],
    )

    @worker.stage("t.quick")
    async def quick(_task):
        return Done()

    @worker.stage("t.long")
    async def long(task):
        began.append(task.id)
        await finish.wait()
        return Done()

    async def handed_back():
        return [task for task, outcome in await results(settings) if outcome == "retry"]

    async with running_service(worker.serve):
        await release(settings, *range(1, 41))
        await wait_until(lambda: has_results(settings, 40))
        await release(settings, 41, stage="long")
        await release(settings, *range(42, 52))
        await wait_until(handed_back)
        returned = await handed_back()
        assert began == [41]
        assert set(returned) <= set(range(42, 52))
        finish.set()
        await wait_until(lambda: has_results(settings, 51))
    assert sorted(task for task, _outcome in await results(settings)) == list(range(1, 52))


async def test_a_full_worker_runs_no_record_that_was_withdrawn(settings, caplog):
    """W2: records that are deleted while a worker is full are not run, though it had fetched them.
    It goes on with the oldest record that is left, without an alarm."""
    caplog.set_level("INFO")
    worker, finish, ran = make_worker(one_at_a_time(settings), old_s=EARLY_START.old_s), asyncio.Event(), []

    @worker.stage("t.quick")
    async def quick(task):
        ran.append(task.id)
        if task.id == 1:
            await finish.wait()
        return Done()

    topic = f"{settings.prefix}ready.t"
    async with running_service(worker.serve):
        # In one batch, so that the client fetches all at once.
        await release(settings, *range(1, 11))
        await wait_until(lambda: has_committed(settings, 1))
        async with admin_client(settings) as admin:
            await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=10)})
        await write(settings.kafka, topic, MARKER)
        await release(settings, 11)
        began_s = asyncio.get_running_loop().time()
        await wait_until(lambda: asyncio.get_running_loop().time() > began_s + pull.FULL_S)
        finish.set()
        await wait_until(lambda: 11 in ran)
        await wait_until(lambda: has_committed(settings, 12))
    assert ran == [1, 11]
    events = {getattr(record, "event", "") for record in caplog.records}
    assert not events & {"log_replaced", "position_moved"}
    starts = [record for record in caplog.records if getattr(record, "event", "") == "pull_started"]
    assert len(starts) == 1, "no other consumer was needed"


async def test_a_worker_that_takes_records_runs_few_that_were_withdrawn(settings):
    """W2: records that are deleted while a worker runs others are not run, though it had fetched
    them: what it has had for a quarter of a second is fetched again."""
    worker, ran = make_worker(one_at_a_time(settings), old_s=EARLY_START.old_s), []

    @worker.stage("t.quick")
    async def quick(task):
        ran.append(task.id)
        # Too short for a worker that counts as full.
        await asyncio.sleep(0.1)
        return Done()

    topic = f"{settings.prefix}ready.t"
    async with running_service(worker.serve):
        # In one batch, so that the client fetches all at once.
        await release(settings, *range(1, 101))
        await wait_until(lambda: len(ran) >= 12)
        async with admin_client(settings) as admin:
            await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=100)})
        before = len(ran)
        await write(settings.kafka, topic, MARKER)
        await release(settings, 101)
        await wait_until(lambda: 101 in ran)
    # Those of a quarter of a second, and as many while the records are fetched.
    assert len(ran) <= before + 10


async def test_a_worker_starts_behind_withdrawn_records_without_an_alarm(settings, caplog):
    """W2: a worker that is assigned a partition whose oldest records were deleted begins at the
    oldest one that is left. Task-sync has deleted them, so this is no fault."""
    worker, ran = make_worker(settings), []

    @worker.stage("t.quick")
    async def quick(task):
        ran.append(task.id)
        return Done()

    async with running_service(worker.serve):
        await release(settings, 1)
        await wait_until(lambda: has_committed(settings, 1))
    await release(settings, 2, 3, 4)
    async with admin_client(settings) as admin:
        await admin.delete_records(
            {TopicPartition(f"{settings.prefix}ready.t", 0): RecordsToDelete(before_offset=3)}
        )
    async with running_service(worker.serve):
        await wait_until(lambda: has_results(settings, 2))
    assert ran == [1, 4]
    assert not any(getattr(record, "event", "") == "position_moved" for record in caplog.records)
    assert await read_records(settings.kafka, f"{settings.prefix}heartbeats") == []
