"""A replica of a service freezes, or its host vanishes, without FIN or RST: another takes over."""

import random
import signal
import sys
import time
from contextlib import AsyncExitStack, ExitStack

import orjson
import pytest
from tests.chaos.link import link, missing
from tests.support.callback_targets import LOOPBACK, SECRET, bench, make_callback
from tests.support.replicas import linked_postgres, replica
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.context import Context
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.result import StageResult, encode_results
from penstock.contracts.submission import Submission
from penstock.contracts.task_log import partition_of
from penstock.core.completion import Outcome
from penstock.errors import KafkaUnavailable
from penstock.flow_owner import app as flow_owner
from penstock.flow_owner.settings import FlowsSettings
from penstock.heartbeats import app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology import group_members
from penstock.kafka.topology.topics import service_group
from penstock.postgres import flow_definitions, release, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session
from penstock.stages import app as stages
from penstock.stages.settings import StagesSettings
from penstock.task_logs import app as task_logs
from penstock.task_logs.settings import TaskLogsSettings

__all__ = ["linked_postgres"]

# The session timeout of a group is 7 s, and the others learn of it within one heartbeat of 1 s. The
# rest is for the new generation, which seeks and restores leases.
TAKEOVER_S = 10.0
TASKS = 60
LINE = [1785312000000, 20, "stdout", "a line"]
ENVIRONMENT = {
    "PENSTOCK_CALLBACK_SECRETS": SECRET,
    "PENSTOCK_CALLBACK_ALLOW": ",".join(LOOPBACK),
    "PENSTOCK_LOGS_SEGMENT_S": "0.5",
}


@pytest.fixture(autouse=True)
def _patient_sessions():
    """Sessions end as soon as in production."""


@pytest.fixture
async def common(kafka_servers, prefix, linked_postgres):
    await make_topics(kafka_servers, prefix)
    return {
        "kafka": kafka_servers,
        "prefix": prefix,
        "postgres": linked_postgres.url(),
        "objects": "memory:///",
    }


async def released(pool, postgres):
    """Fences of released tasks."""
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(None)) for _ in range(TASKS)])
    async with open_session(postgres, "test") as session:
        batch = (await release.release(session, types.TaskType(name="t"), TASKS, [])).batch
        return [task.fence for task in batch.tasks]


def numbers(total):
    """The numbers of the last of so many records."""
    return range(total - TASKS + 1, total + 1)


async def ended_by_results(common, pool, begin, total):
    """Results on every partition: each of their tasks succeeds once."""
    fences = await released(pool, common["postgres"])
    await begin()
    async with running(make_producer(StagesSettings(**common))) as producer:
        for number, fence in enumerate(fences):
            record = encode_results("w", [StageResult(fence=fence, outcome=Outcome.DONE)])
            await producer.send(f"{common['prefix']}stage-results", record, key=b"%d" % number)

    async def all_ended():
        return await pool.fetchval("SELECT count(*) FROM task WHERE state = 'succeeded'") == total

    await wait_until(all_ended, what="all tasks have succeeded")
    assert await pool.fetchval("SELECT count(*) FROM attempt") == total


async def begun_by_claims(common, pool, begin, total):
    """Claims on every partition: each of their tasks is running, and none expires."""
    fences = await released(pool, common["postgres"])
    await begin()
    async with running(make_producer(HeartbeatsSettings(**common))) as producer:
        for number, fence in enumerate(fences):
            record = Heartbeat(Kind.CLAIM, f"w{total + number}", 600_000, [fence.attempt_id]).encode()
            await producer.send(f"{common['prefix']}heartbeats", record, key=b"%d" % number)

    async def all_running():
        return await pool.fetchval("SELECT count(*) FROM task WHERE state = 'running'") == total

    await wait_until(all_running, what="all tasks are running")
    assert await pool.fetchval("SELECT count(*) FROM attempt") == 0


async def called(common, target, begin, total):
    """Callbacks of many targets, so on every partition: each is called once."""
    async with bench(common["kafka"], common["prefix"], common["postgres"]) as platform:
        await begin()
        await platform.enqueue(
            *(make_callback(f"{target.url}/{number}", number) for number in numbers(total))
        )
        await wait_until(platform.all_delivered, what="all callbacks are delivered")
    assert sorted(target.ids()) == sorted(set(target.ids()))
    assert len(target.ids()) == total


async def started_by_records(common, pool, begin, total):
    """Flows on every partition, so on every shard: each begins once, with its task."""
    node = {"kind": "task", "type": "t"}
    await flow_definitions.insert(pool, {"flow": "f", "version": total, "nodes": {"only": node}}, None)
    await begin()
    async with running(make_producer(FlowsSettings(**common))) as producer:
        for number in numbers(total):
            record = orjson.dumps({"flow": "f", "idempotency_key": f"{number}"})
            await producer.send(f"{common['prefix']}flows.submitted", record, key=b"%d" % number)

    async def all_begun():
        return await pool.fetchval("SELECT count(*) FROM task") == total

    await wait_until(all_begun, what="all flows have their task")
    assert await pool.fetchval("SELECT count(*) FROM flow") == total


async def stored(common, pool, begin, total):
    """Task logs on every partition: each line is stored once."""
    await begin()
    async with running(make_producer(TaskLogsSettings(**common))) as producer:
        topic = f"{common['prefix']}task-logs"
        partitions = len(await producer.partitions_for(topic))
        for number in numbers(total):
            chunk = {"id": number, "step": 0, "attempt": 0, "run": "a", "first": 0, "lines": [LINE]}
            record = orjson.dumps({"worker": "w", "chunks": [chunk]})
            await producer.send(topic, record, partition=partition_of(number, partitions))

    async def all_stored():
        return await pool.fetchval("SELECT sum(lines) FROM log_segment") == total

    await wait_until(all_stored, what="all lines are stored")


WORK = {
    "stages": ended_by_results,
    "heartbeats": begun_by_claims,
    "flows": started_by_records,
    "tasklogs": stored,
}
# Counts of the work: a replica that is back has done none of it again.
COUNTS = {
    "stages": "SELECT count(*) FROM attempt",
    "flows": "SELECT count(*) FROM task",
    "tasklogs": "SELECT sum(lines) FROM log_segment",
}


async def ensure_nothing_repeated(pool, service, total):
    if service in COUNTS:
        assert await pool.fetchval(COUNTS[service]) == total, "the replica has repeated work"


APPS = {
    "stages": lambda common: stages.create_app(StagesSettings(**common)),
    "heartbeats": lambda common: heartbeats.create_app(HeartbeatsSettings(**common)),
    "callbacks": lambda common: callbacks.create_app(
        CallbacksSettings(**common, callback_secrets=(SECRET,), callback_allow=LOOPBACK)
    ),
    "flows": lambda common: flow_owner.create_app(FlowsSettings(**common)),
    "tasklogs": lambda common: task_logs.create_app(TaskLogsSettings(**common, logs_segment_s=0.5)),
}


# Each has the machine for itself for half a minute.
@pytest.mark.long
@pytest.mark.alone
# With all partitions, so that each replica has some.
@pytest.mark.declared_topics
@pytest.mark.parametrize("service", APPS)
async def test_another_replica_takes_over(common, target, service):
    """O1, S7: within ten seconds after a replica was stopped (SIGSTOP), or sends and receives no
    packet any more, another one does all work, and does nothing twice. When the replica is back, it
    joins its group again in the same process."""
    settings = StagesSettings(**common)
    group = service_group(common["prefix"], service)

    async def alone():
        return await members() == 1

    async def both():
        return await members() == 2

    async def members():
        try:
            return await group_members.count(settings, group)
        except KafkaUnavailable:
            return 0  # a new group has no coordinator for a moment

    with ExitStack() as stack:
        cable = stack.enter_context(link(random.Random(0))) if missing() is None else None
        async with (
            open_pool(common["postgres"], "test") as pool,
            replica(service, settings, *(cable.prefix if cable else ()), **ENVIRONMENT) as process,
            AsyncExitStack() as second,
        ):
            await types.register(pool, types.TaskType(name="t", partitions=1))
            await wait_until(alone, every=0.2, what="the first replica is in the group")
            # It is ready with its share of the partitions.
            await second.enter_async_context(running_service(APPS[service](common)))

            def freeze():
                process.send_signal(signal.SIGSTOP)

            def thaw():
                process.send_signal(signal.SIGCONT)

            faults = {"frozen": (freeze, thaw)}
            if cable:
                faults["vanished"] = (lambda: cable.drop(out=1.0, back=1.0), cable.drop)
            for total, (fault, (begin, end)) in enumerate(faults.items(), 1):
                await wait_until(both, every=0.2, what="both replicas are in the group")
                took_s = await worked_s(common, pool, target, service, begin, TASKS * total)
                end()
                await wait_until(both, every=0.2, what="the replica is back in the group")
                assert process.returncode is None
                await ensure_nothing_repeated(pool, service, TASKS * total)
                sys.stderr.write(f"\n{service}, {fault}: all work done after {took_s:.2f} s\n")
                assert took_s < TAKEOVER_S
    if cable is None:
        pytest.skip(f"frozen only: {missing()}")


async def worked_s(common, pool, target, service, fault, total):
    """Seconds from the fault until the other replica has done all work."""
    began_s = 0.0

    async def begin():
        nonlocal began_s
        fault()
        began_s = time.monotonic()

    if service == "callbacks":
        await called(common, target, begin, total)
    else:
        await WORK[service](common, pool, begin, total)
    return time.monotonic() - began_s
