"""`penstock check` with a real Kafka and PostgreSQL: each offender is named with its defect."""

import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from tests.support.services import producing, write
from tests.support.topics import use_writers_stamps

from penstock.checks import queued
from penstock.checks.app import Rule, check
from penstock.contracts.context import Context
from penstock.contracts.event import Callback, Event
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult, encode_results
from penstock.contracts.submission import Submission
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.core.target import TargetId
from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology import topic_plan
from penstock.kafka.topology.topics import service_group, workers_group
from penstock.postgres import release, tasks, types
from penstock.postgres.outbox import PendingEvent, enqueue
from penstock.postgres.ownership import lock
from penstock.postgres.release import TYPES
from penstock.postgres.session import open_session

LONG_AGO = "now() - interval '2 minutes'"


async def task(pool, **columns):
    """Submits a task, sets some of its columns to wrong values, and returns its id."""
    [found] = await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))])
    for name, value in columns.items():
        await pool.execute(f"UPDATE task SET {name} = {value} WHERE id = $1", found.id)
    return found.id


async def check_one(settings, **options):
    """Runs the check and returns its only offender."""
    report = await check(settings, **options)
    [offender] = report.offenders
    assert report.counts == {offender.rule: 1}
    assert not report.clean
    assert not report.well
    return offender


def full_name(settings, topic):
    return f"{settings.prefix}{topic}"


@asynccontextmanager
async def group_member(settings, group, topic):
    """Joins a consumer group and waits for partitions."""
    async with running(make_consumer(settings, group, full_name(settings, topic))) as consumer:
        await consumer.getmany(timeout_ms=100)
        while not consumer.assignment():
            await consumer.getmany(timeout_ms=100)
        yield consumer


async def read_all(settings, group, topic):
    async with group_member(settings, group, topic) as consumer:
        for partition, end in (await consumer.end_offsets(list(consumer.assignment()))).items():
            await consumer.commit({partition: end})


async def write_long_ago(settings, topic, value):
    """Writes a record that is two minutes old; the broker stamps the records after it."""
    await use_writers_stamps(settings, [full_name(settings, topic)])
    async with producing(settings.kafka) as producer:
        await producer.send_and_wait(
            full_name(settings, topic), value, partition=0, timestamp_ms=int((time.time() - 120) * 1000)
        )
    await topic_plan.apply(settings, await topic_plan.plan(settings))


def record(task_id, attempt=0):
    return ReadyTask(Fence(task_id, 0, "start", attempt), "t", Context.encode(1), 60_000).encode()


def claim(task_id):
    return Heartbeat(Kind.CLAIM, "w", 60_000, [AttemptId(task_id, 0, 0)]).encode()


def result(task_id):
    return encode_results("w", [StageResult(fence=Fence(task_id, 0, "start", 0), outcome=Outcome.DONE)])


async def test_a_ready_task_of_a_type_without_an_owner_is_an_offender(settings, pool):
    """The type has no owner, so no process releases its tasks; unread records do not matter."""
    waiting = await task(pool, updated_at=LONG_AGO)
    await write(settings.kafka, full_name(settings, "ready.t"), record(10**9), partition=0)
    found = await check_one(settings)
    assert (found.rule, found.id) == (Rule.UNRELEASED, waiting)
    assert "no task-sync releases that type" in found.lacks


async def test_a_ready_task_behind_an_empty_topic_is_an_offender(settings, pool):
    """The type has an owner and its workers wait, but the owner releases no task."""
    waiting = await task(pool, updated_at=LONG_AGO)
    async with open_session(settings.postgres, "owner") as session:
        assert await lock(session, TYPES, "t")
        found = await check_one(settings)
        assert (found.rule, found.id) == (Rule.UNRELEASED, waiting)
        assert "ready.t has no record left to read" in found.lacks
        await write(settings.kafka, full_name(settings, "ready.t"), record(10**9), partition=0)
        assert (await check(settings)).clean, "an unread record means that the task waits for workers"


async def test_a_ready_task_waits_only_for_a_limit_that_is_reached(settings, pool):
    """S5: a ready task of a type at its limit is no offender; one below the limit is."""
    waiting = await task(pool, updated_at=LONG_AGO)
    await pool.execute("UPDATE task_type SET max_in_flight = 1 WHERE name = 't'")
    async with open_session(settings.postgres, "owner") as session:
        assert await lock(session, TYPES, "t")
        found = await check_one(settings)
        assert (found.rule, found.id) == (Rule.UNRELEASED, waiting)
        await task(pool, state="'running'", worker="'w'", lease_partition="0", tracked="true")
        assert (await check(settings)).counts[Rule.UNRELEASED] == 0
        await pool.execute("UPDATE task SET tracked = false")
        await pool.execute("UPDATE task_type SET paused = true WHERE name = 't'")
        assert (await check(settings)).counts[Rule.UNRELEASED] == 0


async def test_a_queued_task_whose_record_is_committed_is_an_offender(settings, pool):
    """The workers have committed the task's record; a record of another attempt does not count."""
    lost = await task(pool, state="'queued'")
    await write(settings.kafka, full_name(settings, "ready.t"), record(lost), partition=0)
    assert (await check(settings)).clean
    await read_all(settings, workers_group(settings.prefix, "t"), "ready.t")
    await write(settings.kafka, full_name(settings, "ready.t"), record(lost, attempt=1), partition=0)
    assert (await check_one(settings)).id == lost


@pytest.mark.parametrize(
    ("topic", "make"), [("ready.t", record), ("heartbeats", claim), ("stage-results", result)]
)
async def test_a_task_with_an_unread_record_is_no_offender(settings, pool, topic, make):
    """A task with an unread record on such a topic is no offender; malformed ones are skipped."""
    found = await task(pool, state="'queued'")
    await write(settings.kafka, full_name(settings, topic), b"?", make(found), partition=1)
    assert (await check(settings)).clean


async def test_a_task_in_an_unconfirmed_release_is_no_offender(settings, pool):
    """Kafka has not confirmed the task's release yet."""
    await task(pool)
    async with open_session(settings.postgres, "owner") as session:
        await release.release(session, types.TaskType(name="t"), 10, [])
        assert (await check(settings)).clean


async def test_too_many_unread_records_leave_the_check_undecided(settings, pool, monkeypatch):
    """The check keeps a bounded number of unread records and reports that it is undecided."""
    monkeypatch.setattr(queued, "MAX_ATTEMPTS", 1)
    await task(pool, state="'queued'")
    await write(settings.kafka, full_name(settings, "ready.t"), record(10**9), record(10**9 + 1), partition=0)
    found = await check_one(settings)
    assert found.rule is Rule.UNPROVEN
    assert "which queued tasks have a record is unknown" in found.lacks


@pytest.mark.declared_topics
async def test_a_running_task_with_unread_heartbeats_is_an_offender(settings, pool):
    """The task's worker could be lost unnoticed; a processor on the partition prevents that."""
    lost = await task(pool, state="'running'", worker="'w'", lease_partition="3")
    found = await check_one(settings)
    assert (found.rule, found.id) == (Rule.UNHEARD, lost)
    assert f"{settings.prefix}heartbeats/3, which no process reads: is heartbeats running?" in found.lacks
    async with group_member(settings, service_group(settings.prefix, "heartbeats"), "heartbeats"):
        assert (await check(settings)).clean


async def test_a_waiting_task_without_a_signal_to_wait_for_is_an_offender(settings, pool):
    """PostgreSQL has nothing recorded that could end the task's wait."""
    lost = await task(pool, state="'waiting'")
    found = await check_one(settings)
    assert (found.rule, found.id) == (Rule.WAITING, lost)


async def test_a_paused_task_is_no_offender(settings, pool):
    """A paused task waits for an operator to resume it."""
    await task(pool, state="'paused'")
    assert (await check(settings)).clean


EVENT = Event(
    id="1-0-0-succeeded",
    name="task.succeeded",
    at=datetime(2026, 1, 1, tzinfo=UTC),
    task={"id": 1, "type": "t"},
    detail={},
)


async def enqueue_event(pool, target="http://127.0.0.1:9/x"):
    """Enqueues an event and a callback, as a transition does."""
    async with pool.acquire() as connection, connection.transaction():
        return await enqueue(connection, [PendingEvent(EVENT, [target], "final", None)])


async def test_an_undelivered_callback_is_an_offender(settings, pool):
    """The callback is pending and overdue; a scheduled, delivered or dead one is no offender."""
    [callback] = (await enqueue_event(pool)).callbacks
    await pool.execute("DELETE FROM outbox")
    await pool.execute(f"UPDATE callback SET due_at = {LONG_AGO}")
    found = await check_one(settings)
    assert (found.rule, found.what, found.id) == (Rule.UNDELIVERED, "callback", callback.id)
    for state in ("delivered", "dead"):
        await pool.execute("UPDATE callback SET state = $1", state)
        assert (await check(settings)).clean


async def test_a_callback_held_for_a_normal_target_is_an_offender(settings, pool):
    """O2b, C3: a callback held for a normal target is an offender.

    Callbacks of an abnormal or disabled target are held on purpose.
    """
    [callback] = (await enqueue_event(pool)).callbacks
    await pool.execute("DELETE FROM outbox")
    await pool.execute("UPDATE callback SET state = 'held'")
    found = await check_one(settings)
    assert (found.rule, found.what, found.id) == (Rule.HELD, "callback", callback.id)
    for state in ("abnormal", "disabled"):
        await pool.execute(
            "INSERT INTO callback_target (url, state) VALUES ($1, $2) ON CONFLICT (namespace, url) DO UPDATE SET state = $2",
            callback.target.url,
            state,
        )
        assert (await check(settings)).clean
    # The target has just become normal, so the service is about to drain the callback.
    await pool.execute("UPDATE callback_target SET state = 'normal', changed_at = now()")
    assert (await check(settings)).clean
    await pool.execute(f"UPDATE callback_target SET changed_at = {LONG_AGO}")
    assert (await check_one(settings)).rule is Rule.HELD


async def test_a_callback_held_for_a_host_that_hangs_is_no_offender(settings, pool):
    """O2b, C5: the callbacks of all targets of a host are held while it hangs, although each target
    is normal; another host, and another port of it, tell nothing."""
    await enqueue_event(pool)
    await pool.execute("DELETE FROM outbox")
    await pool.execute("UPDATE callback SET state = 'held', target = 'http://hangs:8080/cb?n=1'")
    await pool.execute(
        "INSERT INTO callback_target (url, slow_at) VALUES ('http://hangs:80/', now()), ('http://other:8080/', now())"
    )
    assert (await check_one(settings)).rule is Rule.HELD
    await pool.execute(
        "INSERT INTO callback_target (url, slow_at) VALUES ('http://HANGS:8080/cb?n=2', now())"
    )
    assert (await check(settings)).clean
    await pool.execute("UPDATE callback_target SET slow_at = now() - interval '11 minutes'")
    assert (await check_one(settings)).rule is Rule.HELD


READERS = {
    "submitted": ("task-sync", b"{}"),
    "flows.submitted": ("flows", b"{}"),
    "flow-events.submitted": ("flows", b"{}"),
    "heartbeats": ("heartbeats", claim(1)),
    "stage-results": ("stages", result(1)),
    "callbacks": (
        "callbacks",
        Callback(id="c", target=TargetId("default", "http://x"), task_id=1, attempt=0, body=b"{}").encode(),
    ),
}


@pytest.mark.parametrize("topic", READERS)
async def test_old_unread_records_are_an_offender(settings, pool, topic):
    """An old unread record is an offender; a lag of readers that make progress is none."""
    service, value = READERS[topic]
    await write_long_ago(settings, topic, value)
    found = await check_one(settings)
    assert (found.rule, found.id) == (Rule.UNREAD, f"{full_name(settings, topic)}/0")
    assert f"is {service} running?" in found.lacks
    if topic.endswith("submitted"):
        await pool.execute("INSERT INTO ingested VALUES ($1, 0, 1)", full_name(settings, topic))
    else:
        await read_all(settings, service_group(settings.prefix, service), topic)
    assert (await check(settings)).clean


async def test_many_offenders_are_counted_and_the_first_are_named(settings, pool):
    """The report of a broken system has a bounded size."""
    count = 100_000
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context, due_at, updated_at, worker)"
        f" SELECT 't', CASE WHEN n % 2 = 0 THEN 'queued' ELSE 'scheduled' END, 'start', 'json', '1', {LONG_AGO},"
        f" {LONG_AGO}, NULL FROM generate_series(1, $1) AS n",
        count,
    )
    report = await check(settings, show=3)
    assert report.counts == {Rule.OVERDUE: count // 2, Rule.RECORDLESS: count // 2}
    assert len(report.offenders) == 6
