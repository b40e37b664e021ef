"""The worker on the real Kafka: claim, commit, run, batches, back-pressure and drain."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.services import make_topics, producing, read, read_records, running_service, write
from tests.support.state_faults import recreate_topic
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import ReadyTask
from penstock.contracts.revocation import Revocation
from penstock.contracts.submission import Submission
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence
from penstock.errors import KafkaUnavailable
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready, workers_group
from penstock.local.ports import choose_port
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.worker import Done, Next, Worker, WorkerSettings


@pytest.fixture
async def settings(kafka_servers, prefix):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    return WorkerSettings(kafka=kafka_servers, prefix=prefix, objects="memory:///")


async def release(settings, *ids, stage="quick", lease_ms=60_000, context=None):
    topic = f"{settings.prefix}ready.t"
    async with producing(settings.kafka) as producer:
        for task in ids:
            record = ReadyTask(Fence(task, 0, stage, 0), "t", Context.encode(context), lease_ms)
            await producer.send(topic, record.encode(), partition=task % 2)
        await producer.flush()


async def results(settings):
    records = await read(settings.kafka, f"{settings.prefix}stage-results")
    return {entry["id"]: entry for record in records for entry in record["results"]}


async def heartbeats_of(settings, kind):
    records = await read(settings.kafka, f"{settings.prefix}heartbeats")
    return [task[0] for record in records if record["kind"] == kind for task in record["tasks"]]


async def committed(settings):
    async with admin_client(settings) as admin:
        offsets = await admin.list_consumer_group_offsets(workers_group(settings.prefix, "t"))
    return sum(meta.offset for meta in offsets.values() if meta.offset > 0)


async def test_a_task_is_claimed_committed_run_reported_and_released(settings):
    """W3: the claim is on Kafka and the offset is committed before the handler runs. The result is
    written before the lease ends."""
    worker = Worker(settings)
    seen = {}

    @worker.stage("t.quick")
    async def quick(task):
        seen["claimed"] = await heartbeats_of(settings, "claim")
        seen["committed"] = await committed(settings)
        return Next("other", task.context)

    await release(settings, 7, context={"x": 1})
    async with running_service(worker.serve):
        await wait_until(lambda: heartbeats_of(settings, "release"))
    assert seen == {"claimed": [7], "committed": 1}
    entry = (await results(settings))[7]
    assert (entry["outcome"], entry["next_stage"], entry["context"]) == ("next", "other", {"x": 1})
    [result] = await read_records(settings.kafka, f"{settings.prefix}stage-results")
    [released] = [
        record
        for record in await read_records(settings.kafka, f"{settings.prefix}heartbeats")
        if b'"release"' in record.value
    ]
    assert result.timestamp <= released.timestamp
    assert result.key == released.key == worker.id.encode()


async def test_claims_and_results_are_batches(settings):
    """The worker writes claims and results in batches: 1,000 tasks need fewer than 100 records
    each."""
    worker = Worker(settings)

    @worker.stage("t.quick")
    async def quick(_task):
        return Done()

    await release(settings, *range(1, 1001))
    async with running_service(worker.serve):
        await wait_until(lambda: has_results(settings, 1000))
    records = await read(settings.kafka, f"{settings.prefix}stage-results")
    assert len(records) < 100
    assert max(len(record["results"]) for record in records) <= 500
    claims = [r for r in await read(settings.kafka, f"{settings.prefix}heartbeats") if r["kind"] == "claim"]
    assert len(claims) < 100
    assert sorted(task for task in await heartbeats_of(settings, "release")) == list(range(1, 1001))


async def has_results(settings, count):
    return len(await results(settings)) >= count


async def test_a_full_worker_claims_no_more_tasks(settings):
    """W2: a worker takes only what it can run soon. While its handlers last it leaves all other
    tasks unclaimed, also with room in its backlog."""
    worker = Worker(WorkerSettings(**{**vars(settings), "pool": 3, "backlog": 10}))
    open_gate = asyncio.Event()
    running = 0
    peak = 0

    @worker.stage("t.quick")
    async def quick(_task):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await open_gate.wait()
        running -= 1
        return Done()

    await release(settings, *range(1, 31))
    async with running_service(worker.serve):
        await wait_until(lambda: running == 3)
        await wait_until(lambda: has_claimed(settings, 3))
        assert len(await heartbeats_of(settings, "claim")) == 3
        open_gate.set()
        await wait_until(lambda: has_results(settings, 30))
    assert peak == 3
    assert sorted(await heartbeats_of(settings, "claim")) == list(range(1, 31))


async def test_an_idle_worker_notices_that_its_topic_was_replaced(settings):
    """S1, O2: a worker that only waits for records reads a topic that was created again from its
    beginning. Its client returns nothing from the old position."""
    worker = Worker(settings)

    @worker.stage("t.quick")
    async def quick(_task):
        return Done()

    await release(settings, 1, 2)
    async with running_service(worker.serve):
        await wait_until(lambda: has_results(settings, 2))
        await recreate_topic(settings, ready("t", 2))
        # More than were read: the old positions are within the new topic.
        await release(settings, *range(3, 21))
        await wait_until(lambda: has_results(settings, 20))


async def has_claimed(settings, count):
    return len(await heartbeats_of(settings, "claim")) >= count


async def test_a_long_task_gets_heartbeats(settings):
    """H5: the worker sends heartbeats for a task after a third of its lease."""
    worker = Worker(settings)
    finish = asyncio.Event()

    @worker.stage("t.quick")
    async def quick(_task):
        await finish.wait()
        return Done()

    await release(settings, 2, 4, lease_ms=3_000)
    async with running_service(worker.serve):
        await wait_until(lambda: both_beaten(settings))
        finish.set()
        await wait_until(lambda: has_results(settings, 2))


async def both_beaten(settings):
    beaten = await heartbeats_of(settings, "beat")
    return beaten.count(2) >= 2 and beaten.count(4) >= 2


async def test_an_invalid_record_is_skipped(settings):
    """The worker skips an invalid record and runs the next task."""
    worker = Worker(settings)

    @worker.stage("t.quick")
    async def quick(_task):
        return Done()

    async with producing(settings.kafka) as producer:
        await producer.send_and_wait(f"{settings.prefix}ready.t", b"{}", partition=1)
    await release(settings, 1)
    async with running_service(worker.serve):
        await wait_until(lambda: has_results(settings, 1))


async def test_a_worker_waits_for_its_type(kafka_servers, prefix, caplog):
    """T2: a worker may start before its type is registered. It warns, and names the command."""
    kafka = await make_topics(kafka_servers, prefix)
    settings = WorkerSettings(kafka=kafka_servers, prefix=prefix, objects="memory:///")
    worker = Worker(settings)

    @worker.stage("t.quick")
    async def quick(_task):
        return Done()

    def warnings():
        return [entry.message for entry in caplog.records if vars(entry).get("event") == "topic_missing"]

    async with running_service(worker.serve):
        await wait_until(warnings)
        await create_topics(kafka, [ready("t", 2)])
        await release(settings, 1)
        await wait_until(lambda: has_results(settings, 1))
    [warning] = warnings()
    assert "`penstock types add NAME`" in warning


@asynccontextmanager
async def process(settings, **environment):
    """Runs the probe worker in its own process."""
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
            **environment,
        },
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def test_sigterm_lets_handlers_finish(settings):
    """W1: a drain lets running handlers finish, reports their results, and ends with status 0."""
    await release(settings, 1, stage="second")
    async with process(settings) as worker:
        assert await worker.stdout.readline() == b"began 1-0-0\n"
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
    assert (await results(settings))[1]["outcome"] == "done"
    assert await heartbeats_of(settings, "release") == [1]


async def test_a_handler_may_fork(settings):
    """W1: a signal for the child of a handler ends the child and not the worker, which goes on. The
    child has no connection to Kafka, and no other of the worker."""
    await release(settings, 1, stage="forks")
    async with process(settings, PENSTOCK_WORKER_METRICS_PORT=str(choose_port())) as worker:
        assert await worker.stdout.readline() == b"child -15 0\n"
        await release(settings, 2)
        assert await worker.stdout.readline() == b"ran 2-0-0\n"
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
    assert {number: result["outcome"] for number, result in (await results(settings)).items()} == {
        1: "done",
        2: "done",
    }


async def test_a_drain_requeues_a_task_that_exceeds_its_time(settings):
    """W1: a drain cancels a handler after its time limit and requeues the task at once, without
    counting the attempt."""
    await release(settings, 1, stage="long")
    async with process(settings, DRAIN_S="0.2") as worker:
        assert await worker.stdout.readline() == b"began 1-0-0\n"
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
    entry = (await results(settings))[1]
    assert (entry["outcome"], entry["error"]["kind"]) == ("retry", "HandedBack")
    assert "delay_ms" not in entry


async def test_a_killed_worker_leaves_unclaimed_tasks_to_the_next(settings):
    """W3: a killed worker leaves its claim on Kafka, where the lease will expire. The next worker
    receives the unclaimed tasks."""
    await release(settings, 1, stage="long")
    async with process(settings) as worker:
        assert await worker.stdout.readline() == b"began 1-0-0\n"
        worker.kill()
        await worker.wait()
    assert await heartbeats_of(settings, "claim") == [1]
    assert await results(settings) == {}
    await release(settings, 2)
    async with process(settings) as worker:
        assert await worker.stdout.readline() == b"ran 2-0-0\n"
        await wait_until(lambda: has_results(settings, 1))


async def test_a_stage_with_one_attempt_fails_when_its_worker_is_killed(settings, database):
    """W1, H10: a stage with one attempt fails when its worker is killed, while another stage runs
    again. The worker claims stages with different limits in separate records."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=2, lease_ms=6_000, retry_base_ms=0))
        system = System(settings.kafka, settings.prefix, database, stack, pool)
        await system.start("task-sync", "heartbeats", "stages")
        context = Context.encode(None)
        made = await tasks.submit(
            pool, [Submission(type="t", stage=stage, context=context) for stage in ("once", "long")]
        )
        once, retried = (found.id for found in made)
        async with process(settings) as worker:
            began = {(await worker.stdout.readline()).decode().strip() for _ in made}
            assert began == {f"began {once}-0-0", f"began {retried}-0-0"}
            await system.become(running=2)
            worker.kill()
            await worker.wait()
        async with process(settings) as worker:
            assert await worker.stdout.readline() == f"began {retried}-0-1\n".encode()
            found = await wait_until(
                lambda: pool.fetchrow("SELECT * FROM task WHERE id = $1 AND state = 'failed'", once)
            )
        assert (found["attempt"], found["losses"]) == (0, 1)
    claims = await read(settings.kafka, f"{settings.prefix}heartbeats")
    limits = {
        task[0]: record.get("max_attempts")
        for record in claims
        for task in record["tasks"]
        if record["kind"] in ("claim", "beat")
    }
    assert limits == {once: 1, retried: None}


@pytest.mark.parametrize("over_http", [False, True], ids=["kafka", "http"])
async def test_a_worker_stopped_beyond_its_lease_reports_no_old_result(settings, database, over_http):
    """W6: a worker that was stopped for longer than its lease discards the old attempt, even if its
    handler ends at the same moment. The next attempt succeeds."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=2, lease_ms=3_000, retry_base_ms=0))
        system = System(settings.kafka, settings.prefix, database, stack, pool)
        await system.start("task-sync", "heartbeats", "stages")
        slow_s = 4.0
        environment = {"SLOW_S": str(slow_s)}
        if over_http:
            gateway = await stack.enter_async_context(
                running_gateway(**system.where, postgres=database, objects="memory:///")
            )
            await wait_until(gateway.is_ready)
            environment["PENSTOCK_WORKER_GATEWAY"] = gateway.url
        worker = await stack.enter_async_context(process(settings, **environment))
        context = Context.encode(None)
        [made] = await tasks.submit(pool, [Submission(type="t", stage="slow", context=context)])
        assert await worker.stdout.readline() == f"began {made.id}-0-0\n".encode()
        due_s = time.monotonic() + slow_s
        worker.send_signal(signal.SIGSTOP)
        await wait_until(lambda: pool.fetchval("SELECT attempt FROM task"), what="the lease expires")
        await wait_until(lambda: time.monotonic() > due_s, what="the handler's sleep is over")
        worker.send_signal(signal.SIGCONT)
        await system.become(succeeded=1)
        attempts = await pool.fetch("SELECT attempt, outcome FROM attempt ORDER BY attempt")
    # A busy machine may let the lease of the next attempt expire, too.
    *expired, last = [tuple(row) for row in attempts]
    assert [outcome for _, outcome in expired] == ["expired"] * max(1, len(expired))
    assert last == (len(expired), "done")
    records = await read(settings.kafka, f"{settings.prefix}stage-results")
    assert [entry["attempt"] for record in records for entry in record["results"]] == [last[0]]


async def listen(worker, lines):
    """Collects the lines that a process prints until it ends."""
    async for line in worker.stdout:
        lines.append(line.decode().strip())


async def members(settings):
    """Returns the partitions of each member of the workers' group, by member id."""
    try:
        async with admin_client(settings) as admin:
            [answer] = await admin.describe_consumer_groups([workers_group(settings.prefix, "t")])
    except KafkaUnavailable:
        return {}  # no coordinator yet
    found = answer.to_object()["groups"][0]["members"]
    return {member["member_id"]: member["member_assignment"] for member in found}


async def test_a_handler_that_holds_the_interpreter_keeps_lease_and_partition(settings, database):
    """W7: a handler that holds the interpreter for three times four seconds, and blocks its event
    loop in between, keeps its lease of eight seconds. The task runs once, the worker keeps its
    partition, and other tasks continue. A lost worker's lease expires meanwhile."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=2, lease_ms=8_000, retry_base_ms=0))
        system = System(settings.kafka, settings.prefix, database, stack, pool)
        await system.start("task-sync", "heartbeats", "stages")
        lines = [], []
        processes = [await stack.enter_async_context(process(settings)) for _ in lines]
        listening = asyncio.gather(*map(listen, processes, lines))

        async def both_have_a_partition():
            found = await members(settings)
            return len(set(found.values()) - {b""}) == 2 and found

        before = await wait_until(both_have_a_partition)
        context = Context.encode(None)
        [held] = await tasks.submit(pool, [Submission(type="t", stage="holds", context=context)])
        began, ended = f"began {held.id}-0-0", f"ended {held.id}-0-0"
        await wait_until(lambda: began in [*lines[0], *lines[1]])
        holder, other = lines if began in lines[0] else reversed(lines)
        # A task due later has no record, so that no worker runs its first attempt.
        later = datetime.now(UTC) + timedelta(hours=1)
        [lost] = await tasks.submit(
            pool, [Submission(type="t", stage="quick", context=context, run_at=later)]
        )
        await pool.execute("UPDATE task SET state = 'queued' WHERE id = $1", lost.id)
        claim = Heartbeat(Kind.CLAIM, "gone", 8_000, [AttemptId(lost.id, 0, 0)]).encode()
        await write(settings.kafka, f"{settings.prefix}heartbeats", claim, key=b"gone")
        await tasks.submit(pool, [Submission(type="t", stage="quick", context=context)] * 20)
        await wait_until(lambda: other)
        await wait_until(lambda: pool.fetchval("SELECT attempt FROM task WHERE id = $1", lost.id))
        assert ended not in holder, (
            "another lease of the same length expired while the handler held the interpreter"
        )
        await system.become(succeeded=22)
        assert await members(settings) == before
        attempts = await pool.fetch("SELECT task_id, attempt, outcome, worker FROM attempt ORDER BY 1, 2")
        assert [tuple(row) for row in attempts if row["outcome"] == "expired"] == [
            (lost.id, 0, "expired", "gone")
        ]
        assert [row["attempt"] for row in attempts if row["task_id"] == held.id] == [0]
    await listening
    assert (holder.count(began), holder.count(ended)) == (1, 1)
    assert Counter([*holder, *other]).most_common(1)[0][1] == 1, "no attempt ran twice"
    # Records that the worker does not take are withdrawn. It may still run old attempts of them.
    assert len(holder) + len(other) >= 23


@pytest.mark.parametrize("sync", [False, True])
async def test_a_revoked_attempt_ends_without_a_result(settings, sync):
    """W5: a revocation cancels an async handler and sets the flag of a synchronous one. The worker
    reports no result and has room again."""
    worker = Worker(WorkerSettings(**{**vars(settings), "pool": 1, "backlog": 0}))
    began, ended = threading.Event(), threading.Event()

    def on_thread(task):
        if task.id == 1:
            began.set()
            while not task.cancelled:
                ended.wait(0.01)
            ended.set()
        return Done(task.id)

    async def in_loop(task):
        if task.id == 1:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return Done(task.id)

    worker.stage("t.quick")(on_thread if sync else in_loop)
    await release(settings, 1)
    async with running_service(worker.serve):
        await wait_until(began.is_set)
        # Write the revocation repeatedly: a new consumer reads only records written after it joins.
        revocation = Revocation("cancelled", [AttemptId(1, 0, 0), AttemptId(99, 0, 0)]).encode()

        async def revoked():
            await write(settings.kafka, f"{settings.prefix}revoked", b"nonsense", revocation)
            return ended.is_set()

        await wait_until(revoked)
        await release(settings, 2)
        await wait_until(lambda: has_results(settings, 1))
    assert list(await results(settings)) == [2]
