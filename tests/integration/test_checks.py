"""`penstock check` on the real Kafka and PostgreSQL: each kind of offender is named with what it lacks."""

import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from tests.running import make_topics, producing, write

from penstock.checks import moving, queued
from penstock.checks.app import Rule, check
from penstock.contracts.context import Context
from penstock.contracts.event import Callback, Event
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult, encode_results
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome
from penstock.core.target import TargetId
from penstock.kafka.connection import create_topics, make_consumer, running
from penstock.kafka.topics import ready, service_group, workers_group
from penstock.postgres import release, tasks, types
from penstock.postgres.advance import owe
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session
from penstock.settings import Platform

LONG_AGO = "now() - interval '2 minutes'"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(moving, "SETTLE_S", 1.0)
    monkeypatch.setattr(moving, "LOOK_EVERY_S", 0.2)


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 2)])
    return Platform(kafka=kafka_servers, prefix=prefix, postgres=database)


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=2, max_attempts=5, events="all"))
        yield pool


async def task(pool, **columns):
    """A task with some columns as they should not be; returns its id."""
    [found] = await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))])
    for name, value in columns.items():
        await pool.execute(f"UPDATE task SET {name} = {value} WHERE id = $1", found.id)
    return found.id


async def only(settings, **options):
    """The one offender there is."""
    report = await check(settings, **options)
    [offender] = report.offenders
    assert report.counts == {offender.rule: 1}
    assert not report.clean
    assert not report.well
    return offender


def of(settings, topic):
    return f"{settings.prefix}{topic}"


@asynccontextmanager
async def reading(settings, group, topic):
    """Somebody who is a member of a group and has its partitions."""
    async with running(make_consumer(settings, group, of(settings, topic))) as consumer:
        await consumer.getmany(timeout_ms=100)
        while not consumer.assignment():
            await consumer.getmany(timeout_ms=100)
        yield consumer


async def read_all(settings, group, topic):
    async with reading(settings, group, topic) as consumer:
        for partition, end in (await consumer.end_offsets(list(consumer.assignment()))).items():
            await consumer.commit({partition: end})


async def write_long_ago(settings, topic, value):
    async with producing(settings.kafka) as producer:
        await producer.send_and_wait(
            of(settings, topic), value, partition=0, timestamp_ms=int((time.time() - 120) * 1000)
        )


def record(task_id, attempt=0):
    return ReadyTask(Fence(task_id, 0, "start", attempt), "t", Context.encode(1), 60_000).encode()


def claim(task_id):
    return Heartbeat(Kind.CLAIM, "w", 60_000, [(task_id, 0, 0)]).encode()


def result(task_id):
    return encode_results("w", [StageResult(fence=Fence(task_id, 0, "start", 0), outcome=Outcome.DONE)])


async def test_an_empty_system_is_clean(settings, pool):
    """O2b: nothing there, nothing amiss."""
    report = await check(settings)
    assert (report.clean, report.well, report.to_wire()["offenders"]) == (True, True, [])


async def test_overdue(settings, pool):
    """A timer that nobody watches."""
    late = await task(pool, due_at=LONG_AGO, state="'scheduled'")
    await task(pool, due_at="now() - interval '5 seconds'", state="'scheduled'")
    found = await only(settings)
    assert (found.rule, found.what, found.id) == (Rule.OVERDUE, "task", late)
    assert "is task-sync running?" in found.lacks


async def test_ready_without_anybody_who_releases_the_type(settings, pool):
    """A type without an owner of its gate, whatever is on its topic."""
    waiting = await task(pool, updated_at=LONG_AGO)
    await write(settings.kafka, of(settings, "ready.t"), record(10**9), partition=0)
    found = await only(settings)
    assert (found.rule, found.id) == (Rule.UNRELEASED, waiting)
    assert "no task-sync releases that type" in found.lacks


async def test_ready_although_all_that_was_released_is_read(settings, pool):
    """The type has an owner, its workers wait, and nothing comes."""
    waiting = await task(pool, updated_at=LONG_AGO)
    async with open_session(settings.postgres, "owner") as session:
        assert await release.own(session, "t")
        found = await only(settings)
        assert (found.rule, found.id) == (Rule.UNRELEASED, waiting)
        assert "ready.t has no record left to read" in found.lacks
        await write(settings.kafka, of(settings, "ready.t"), record(10**9), partition=0)
        assert (await check(settings)).clean, "while the window is full, what is ready waits for workers"


async def test_a_limit_excuses_what_is_ready_only_when_it_is_reached(settings, pool):
    """S5: what waits for room in a full type is well; with room left and nobody who releases it is not."""
    waiting = await task(pool, updated_at=LONG_AGO)
    await pool.execute("UPDATE task_type SET max_in_flight = 1 WHERE name = 't'")
    async with open_session(settings.postgres, "owner") as session:
        assert await release.own(session, "t")
        found = await only(settings)
        assert (found.rule, found.id) == (Rule.UNRELEASED, waiting)
        await task(pool, state="'running'", worker="'w'", lease_partition="0", tracked="true")
        assert (await check(settings)).counts[Rule.UNRELEASED] == 0
        await pool.execute("UPDATE task SET tracked = false")
        await pool.execute("UPDATE task_type SET paused = true WHERE name = 't'")
        assert (await check(settings)).counts[Rule.UNRELEASED] == 0


async def test_queued_without_a_record(settings, pool):
    """Neither on the ready topic, nor claimed, nor reported."""
    lost = await task(pool, state="'queued'")
    found = await only(settings)
    assert (found.rule, found.what, found.id) == (Rule.RECORDLESS, "task", lost)
    assert found.lacks == "is queued, but ready.t has no record of it left to read"


async def test_queued_with_a_record_that_everybody_has_read(settings, pool):
    """A record behind which the workers have committed is as good as none; one of another attempt is none."""
    lost = await task(pool, state="'queued'")
    await write(settings.kafka, of(settings, "ready.t"), record(lost), partition=0)
    assert (await check(settings)).clean
    await read_all(settings, workers_group(settings.prefix, "t"), "ready.t")
    await write(settings.kafka, of(settings, "ready.t"), record(lost, attempt=1), partition=0)
    assert (await only(settings)).id == lost


@pytest.mark.parametrize(
    ("topic", "make"), [("ready.t", record), ("heartbeats", claim), ("stage-results", result)]
)
async def test_what_a_record_carries_is_under_way(settings, pool, topic, make):
    """Unread on any of the topics it passes: no offender. Records that break their contract carry nothing."""
    found = await task(pool, state="'queued'")
    await write(settings.kafka, of(settings, topic), b"?", make(found), partition=1)
    assert (await check(settings)).clean


async def test_what_is_being_released_is_under_way(settings, pool):
    """The gate is open and Kafka has not confirmed yet."""
    await task(pool)
    async with open_session(settings.postgres, "owner") as session:
        await release.release(session, types.TaskType(name="t"), 10, [])
        assert (await check(settings)).clean


async def test_more_is_unread_than_can_be_kept_in_mind(settings, pool, monkeypatch):
    """Bounded memory: then it cannot be told, and that is said."""
    monkeypatch.setattr(queued, "MOST_KEYS", 1)
    await task(pool, state="'queued'")
    await write(settings.kafka, of(settings, "ready.t"), record(10**9), record(10**9 + 1), partition=0)
    found = await only(settings)
    assert found.rule is Rule.UNPROVEN
    assert "it cannot be told" in found.lacks


@pytest.mark.parametrize("partition", ["NULL", "99", "-1"])
async def test_running_and_heard_over_no_partition(settings, pool, partition):
    """A lease that no heartbeat processor will ever restore."""
    lost = await task(pool, state="'running'", worker="'w'", lease_partition=partition)
    found = await only(settings)
    assert (found.rule, found.id) == (Rule.UNWATCHED, lost)
    assert "nobody watches that" in found.lacks


async def test_running_while_nobody_reads_its_heartbeats(settings, pool):
    """Its worker may die unnoticed; with a processor on the partition all is well."""
    lost = await task(pool, state="'running'", worker="'w'", lease_partition="3")
    found = await only(settings)
    assert (found.rule, found.id) == (Rule.UNHEARD, lost)
    assert f"{settings.prefix}heartbeats/3, which nobody reads: is heartbeats running?" in found.lacks
    async with reading(settings, service_group(settings.prefix, "heartbeats"), "heartbeats"):
        assert (await check(settings)).clean


async def test_waiting_for_nothing(settings, pool):
    """Nothing is written down that could wake it."""
    lost = await task(pool, state="'waiting'")
    found = await only(settings)
    assert (found.rule, found.id) == (Rule.WAITING, lost)


async def test_paused_waits_for_somebody_to_resume_it(settings, pool):
    """That is what paused means."""
    await task(pool, state="'paused'")
    assert (await check(settings)).clean


async def test_a_release_that_kafka_never_confirmed(settings, pool):
    """Its owner has died, and there is no next one."""
    await task(pool)
    async with open_session(settings.postgres, "dying owner") as session:
        await release.release(session, types.TaskType(name="t"), 10, [])
    await pool.execute(f"UPDATE release SET created_at = {LONG_AGO}")
    found = await only(settings)
    assert (found.rule, found.what) == (Rule.UNSENT, "release")
    assert found.lacks.startswith("1 tasks of t not confirmed by Kafka")


EVENT = Event(
    id="1-0-0-succeeded",
    name="task.succeeded",
    at=datetime(2026, 1, 1, tzinfo=UTC),
    task={"id": 1, "type": "t"},
    detail={},
)


async def owed(pool, target="http://127.0.0.1:9/x"):
    """An event and a callback, as a transition leaves them."""
    async with pool.acquire() as connection, connection.transaction():
        return await owe(connection, [(EVENT, [target], "final", None)])


async def test_an_event_nobody_published(settings, pool):
    """Owed, and the sweeper does not come."""
    event = await owed(pool)
    assert (await check(settings)).clean
    await pool.execute(f"UPDATE outbox SET created_at = {LONG_AGO}")
    found = await only(settings)
    assert (found.rule, found.what, found.id) == (Rule.UNPUBLISHED, "event", event.outbox_id)


async def test_a_callback_nobody_delivers(settings, pool):
    """Pending and long due; scheduled, delivered and dead ones are where they should be."""
    [callback] = (await owed(pool)).callbacks
    await pool.execute("DELETE FROM outbox")
    await pool.execute(f"UPDATE callback SET due_at = {LONG_AGO}")
    found = await only(settings)
    assert (found.rule, found.what, found.id) == (Rule.UNDELIVERED, "callback", callback.id)
    for state in ("delivered", "dead"):
        await pool.execute("UPDATE callback SET state = $1", state)
        assert (await check(settings)).clean


async def test_a_callback_that_is_held_for_a_target_that_is_well(settings, pool):
    """O2b, C3: for an abnormal or disabled target it is where it should be; for a normal one somebody must let it go."""
    [callback] = (await owed(pool)).callbacks
    await pool.execute("DELETE FROM outbox")
    await pool.execute("UPDATE callback SET state = 'held'")
    found = await only(settings)
    assert (found.rule, found.what, found.id) == (Rule.HELD, "callback", callback.id)
    for state in ("abnormal", "disabled"):
        await pool.execute(
            "INSERT INTO callback_target (url, state) VALUES ($1, $2) ON CONFLICT (namespace, url) DO UPDATE SET state = $2",
            callback.target.url,
            state,
        )
        assert (await check(settings)).clean
    # It has only just become normal: those who let it go are about to.
    await pool.execute("UPDATE callback_target SET state = 'normal', changed_at = now()")
    assert (await check(settings)).clean
    await pool.execute(f"UPDATE callback_target SET changed_at = {LONG_AGO}")
    assert (await only(settings)).rule is Rule.HELD


CARRIED = {
    "submitted": ("task-sync", b"{}"),
    "heartbeats": ("heartbeats", claim(1)),
    "stage-results": ("stages", result(1)),
    "callbacks": (
        "callbacks",
        Callback(id="c", target=TargetId("default", "http://x"), task_id=1, attempt=0, body=b"{}").encode(),
    ),
}


@pytest.mark.parametrize("topic", CARRIED)
async def test_records_that_nobody_reads_on(settings, pool, topic):
    """What carries something on lies there for long; while its readers move, it is only late."""
    service, value = CARRIED[topic]
    await write_long_ago(settings, topic, value)
    found = await only(settings)
    assert (found.rule, found.id) == (Rule.UNREAD, f"{of(settings, topic)}/0")
    assert f"is {service} running?" in found.lacks
    if topic == "submitted":
        await pool.execute("INSERT INTO ingested VALUES ($1, 0, 1)", of(settings, topic))
    else:
        await read_all(settings, service_group(settings.prefix, service), topic)
    assert (await check(settings)).clean


async def test_very_many_offenders_are_counted_and_the_first_are_named(settings, pool):
    """Bounded: a broken system is described, not copied."""
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
