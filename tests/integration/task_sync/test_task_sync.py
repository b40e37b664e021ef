"""Task-sync on the real Kafka and PostgreSQL: it ingests each record once, and one owner releases
tasks in order within a window."""

import asyncio
import base64
import dataclasses
import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import asyncpg
import orjson
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError
from tests.support.services import read, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.task import Priority
from penstock.errors import PostgresUnavailable, SessionLost
from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology.topics import workers_group
from penstock.postgres import release, tasks, types
from penstock.postgres.ownership import lock
from penstock.postgres.queries import query
from penstock.postgres.release import TYPES
from penstock.postgres.session import open_session
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = (types.TaskType(name="t", partitions=1),)


@pytest.fixture
def settings(where):
    return TaskSyncSettings(**where, own_retry_s=0.2)


def submission(**fields):
    return Submission(type="t", context=Context.encode(fields.pop("context", None)), **fields)


async def ready_ids(settings):
    return [record["id"] for record in await read(settings.kafka, f"{settings.prefix}ready.t")]


async def count(pool, where="true"):
    return await pool.fetchval(f"SELECT count(*) FROM task WHERE {where}")


async def test_a_submitted_record_becomes_a_task_and_a_ready_record(settings, pool):
    """T5, S1: a JSON record of any producer becomes a task in PostgreSQL and a record on the ready
    topic."""
    async with running_service(create_app(settings)):
        await write(
            settings.kafka,
            f"{settings.prefix}submitted",
            {"type": "t", "context": {"a": 1}, "priority": "LOW"},
        )
        await wait_until(lambda: ready_ids(settings))
    row = await pool.fetchrow("SELECT * FROM task")
    assert (row["state"], row["stage"], row["priority"]) == ("queued", "start", Priority.LOW)
    [record] = await read(settings.kafka, f"{settings.prefix}ready.t")
    assert record["context"] == {"a": 1}
    assert (record["id"], record["step"], record["attempt"], record["lease_ms"]) == (row["id"], 0, 0, 300_000)


BAD = {
    b"{": ("", "not JSON"),
    b"\xff\xfe{}": ("", "not UTF-8"),
    b"": ("", "not JSON"),
    b'{"type":"unknown"}': ("/type", "registered"),
    b'{"type":"t","priority":"URGENT"}': ("/priority", "URGENT"),
    b'{"type":"t","callbacks":["ftp://x"]}': ("/callbacks/0", "http"),
    b'{"type":"t","run_at":"2026-06-30T23:59:60Z"}': ("/run_at", ""),
    b'{"type":"t","labels":{"a":"\\u0000"}}': ("/labels/a", ""),
    b'{"type":"t","content_type":"bytes","context":"?"}': ("/context", "base64"),
    b'{"type":"t","context":"' + b"x" * 900_001 + b'"}': ("/context", "limit"),
    b'{"type":"t","context":' + b"[" * 500 + b"]" * 500 + b"}": ("/context", "deeper"),
    b'{"type":"t","context":123456789012345678901234567890}': ("", "more than 64 bits"),
}


async def test_malformed_records_are_rejected_and_delay_no_other(settings, pool):
    """T5: task-sync writes a malformed record to submitted.rejected, with reason, position and
    original bytes. The valid record after each malformed one becomes a task."""
    topic = f"{settings.prefix}submitted"
    async with running_service(create_app(settings)):
        for number, bad in enumerate(BAD):
            await write(settings.kafka, topic, bad, {"type": "t", "context": number}, partition=0)
        await wait_until(lambda: count(pool, f"true HAVING count(*) = {len(BAD)}"))
    rejected = await read(settings.kafka, f"{topic}.rejected")
    assert [base64.b64decode(r["original"]) for r in rejected] == list(BAD)
    assert [r["offset"] for r in rejected] == [2 * number for number in range(len(BAD))]
    for found, (bad, (pointer, reason)) in zip(rejected, BAD.items(), strict=True):
        assert found["pointer"] == pointer, bad[:60]
        assert reason in found["reason"], bad[:60]
        assert (found["topic"], found["partition"]) == (topic, 0)
        assert len(found["reason"]) < 500


async def test_a_record_is_ingested_once_without_committed_offsets(settings, pool):
    """T5: offsets are stored in the transaction of the tasks. A group whose commits are lost
    ingests no record again."""
    topic = f"{settings.prefix}submitted"
    await write(settings.kafka, topic, *({"type": "t", "context": n} for n in range(20)))
    async with running_service(create_app(settings)):
        await wait_until(lambda: count(pool, "true HAVING count(*) = 20"))
    # Kafka has no committed offsets: only those in PostgreSQL prevent a second ingest.
    async with running_service(create_app(settings)):
        await write(settings.kafka, topic, {"type": "t", "context": "last"})
        await wait_until(lambda: count(pool, "true HAVING count(*) > 20"))
    assert await count(pool) == 21


async def test_a_repeated_idempotency_key_returns_the_first_task(settings, pool):
    """T5: a repeated idempotency key creates no second task, by topic as by HTTP."""
    record = {"type": "t", "idempotency_key": "k"}
    async with running_service(create_app(settings)):
        await write(settings.kafka, f"{settings.prefix}submitted", record, record, {"type": "t"})
        await wait_until(lambda: count(pool, "true HAVING count(*) = 2"))
    assert await count(pool, "idempotency_key = 'k'") == 1


async def test_a_large_context_is_checked_in(settings, pool):
    """T4: a context above 4,096 bytes is stored as an object, and the record has its reference."""
    async with running_service(create_app(settings)):
        await write(settings.kafka, f"{settings.prefix}submitted", {"type": "t", "context": "x" * 5000})
        await wait_until(lambda: ready_ids(settings))
    [record] = await read(settings.kafka, f"{settings.prefix}ready.t")
    assert "context" not in record
    assert record["context_ref"]["size"] == 5002


async def test_an_outage_of_the_object_store_holds_only_partitions_with_large_contexts(
    settings, pool, tmp_path
):
    """S11: task-sync goes on while the object store is away. A record with a large context, and
    those behind it in its partition, become tasks when the store is back; each once."""

    def record(**fields):
        return {"type": "t", **fields}

    topic, large = f"{settings.prefix}submitted", {"n": "x" * 9_000}
    folder = tmp_path / "objects"
    async with running_service(create_app(settings)):
        await write(settings.kafka, topic, record(idempotency_key="first", context=large), partition=0)
        await wait_until(lambda: count(pool, "idempotency_key = 'first'"))
        folder.rename(tmp_path / "away")
        await write(
            settings.kafka,
            topic,
            record(idempotency_key="before"),
            record(idempotency_key="large", context=large),
            record(idempotency_key="behind"),
            partition=0,
        )
        await write(
            settings.kafka, topic, *(record(idempotency_key=f"other-{n}") for n in range(20)), partition=1
        )
        await wait_until(
            lambda: pool.fetchval("SELECT count(*) = 20 FROM task WHERE idempotency_key LIKE 'other%'")
        )
        await wait_until(lambda: count(pool, "idempotency_key = 'before'"))
        assert not await count(pool, "idempotency_key IN ('large', 'behind')")
        (tmp_path / "away").rename(folder)
        await wait_until(lambda: count(pool, "idempotency_key = 'behind'"))
    assert await count(pool) == 24


async def test_the_window_bounds_records_in_kafka(settings, pool):
    """S2: without consumers task-sync releases one window; the other tasks wait in PostgreSQL,
    where their order can change. Consumed records make room."""
    settings = TaskSyncSettings(**{**vars(settings), "window": 50, "release_batch": 20, "lag_poll_s": 0.02})
    await tasks.submit(pool, [submission(priority=Priority.LOWEST) for _ in range(120)])
    async with running_service(create_app(settings)):
        await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) = 50"))
        [urgent] = await tasks.submit(pool, [submission(priority=Priority.HIGHEST)])
        consumer = make_consumer(settings, workers_group(settings.prefix, "t"), f"{settings.prefix}ready.t")
        async with running(consumer):
            taken = []
            while len(taken) < 30:
                for records in (await consumer.getmany(timeout_ms=500, max_records=30 - len(taken))).values():
                    taken += records
            await consumer.commit()
            await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) >= 80"))
        assert await count(pool, "state = 'ready'") == 41
    ids = await ready_ids(settings)
    assert len(ids) == 80, "the release does not match the consumed records"
    assert ids.index(urgent.id) == 50, "the urgent task was not the first release after its submission"


async def test_many_due_tasks_do_not_delay_a_task_of_another_type(settings, pool):
    """S12: thousands of tasks of one type are due. A task of another type that becomes due after
    them is ready after the next statement, and the statements together promote each task."""
    await types.register(pool, types.TaskType(name="quick", partitions=1))
    now = datetime.now(UTC)
    flood = Submission(type="t", context=Context.encode(None), run_at=now + timedelta(hours=1))
    await tasks.submit(pool, [flood] * 3_000)
    await tasks.submit(pool, [dataclasses.replace(flood, type="quick")])
    await pool.execute("UPDATE task SET due_at = now() - interval '1 minute' WHERE type = 't'")
    await pool.execute("UPDATE task SET due_at = now() WHERE type = 'quick'")
    async with open_session(settings.postgres, "test") as session:
        first = await release.promote(session, 100)
        assert first["quick"] == 1
        assert 100 <= first["t"] <= 200
        promoted = Counter(first)
        while more := await release.promote(session, 100):
            promoted.update(more)
    assert promoted == {"t": 3_000, "quick": 1}


@pytest.mark.parametrize("analyzed", [False, True])
async def test_tasks_due_at_one_instant_do_not_delay_another_type(settings, pool, analyzed):
    """S12: 20,000 tasks of one type and one of another are due at the same moment. The first
    statement promotes the one, with any statistics, and with current ones it reads few of the
    others."""
    await types.register(pool, types.TaskType(name="quick", partitions=1))
    await types.register(pool, types.TaskType(name="idle", partitions=1))
    flood = Submission(type="t", context=Context.encode(None), run_at=datetime.now(UTC) + timedelta(hours=1))
    await tasks.submit(pool, [flood] * 10_000)
    await tasks.submit(pool, [dataclasses.replace(flood, type="quick")])
    await tasks.submit(pool, [flood] * 10_000)
    await pool.execute("UPDATE task SET due_at = now() - interval '1 minute'")
    if analyzed:
        await pool.execute("ANALYZE task")
    async with pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        statement = query("release.promote").replace("$1", "500")
        plan = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
        await transaction.rollback()
    assert not analyzed or max(rows_of(json.loads(plan)[0]["Plan"])) <= 1_500
    async with open_session(settings.postgres, "test") as session:
        first = await release.promote(session, 500)
    assert first["quick"] == 1
    assert 500 <= first["t"] <= 1_000


def rows_of(plan):
    """Yields how many rows each node of a plan has read."""
    yield plan["Actual Loops"] * (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0))
    for child in plan.get("Plans", ()):
        yield from rows_of(child)


async def test_the_owner_releases_tasks_that_another_replica_promotes(settings, pool):
    """S7: when another replica promotes a due task, the owner of the type is notified and releases
    it."""
    async with running_service(create_app(settings)):
        await tasks.submit(pool, [submission()])
        await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) = 1"))
        # The owner has no timer for this task, so that only the promotion notifies it.
        await pool.execute(
            "UPDATE task SET state = 'scheduled', due_at = now(), attempt = 1 WHERE state = 'queued'"
        )
        async with open_session(settings.postgres, "another replica") as session:
            await release.promote(session)
        await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) = 1"))


async def test_an_unconfirmed_batch_is_sent_again_by_the_next_owner(settings, pool):
    """S7: a crash between the release statement and Kafka's acknowledgement loses no task."""
    await tasks.submit(pool, [submission() for _ in range(5)])
    async with open_session(settings.postgres, "crashed owner") as session:
        assert await lock(session, TYPES, "t")
        batch = await release.release(session, types.TaskType(name="t"), 3, [])
        assert batch is not None
    async with running_service(create_app(settings)):
        await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) = 5"))

        async def confirmed():
            return await pool.fetchval("SELECT count(*) = 0 FROM release")

        await wait_until(confirmed)
    assert sorted(await ready_ids(settings)) == sorted(
        row["id"] for row in await pool.fetch("SELECT id FROM task")
    )


async def test_another_owner_takes_over_a_lost_session(settings, pool):
    """S7, O2: a replica that loses its session ends with an error, and another takes over."""
    first = asyncio.create_task(create_app(settings)(asyncio.Event(), lambda: None))
    lock = (
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND database ="
        " (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    owner = await wait_until(lambda: pool.fetchval(lock))
    async with running_service(create_app(settings)):
        await tasks.submit(pool, [submission()])
        await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) = 1"))
        assert await pool.fetchval(lock) == owner
        await pool.execute("SELECT pg_terminate_backend($1)", owner)
        # The second error occurs when a query was running.
        with pytest.raises((SessionLost, PostgresUnavailable)):
            await first
        assert await wait_until(lambda: pool.fetchval(lock)) != owner
        await tasks.submit(pool, [submission()])
        await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) = 2"))
    # An unconfirmed release may be written twice; the fence rejects the duplicate.
    assert len(set(await ready_ids(settings))) == 2


async def test_an_idle_system_makes_no_queries(settings, pool):
    """S6, S7: an idle task-sync that owns all types sends no queries to PostgreSQL, neither for
    work nor to own more."""
    async with running_service(create_app(TaskSyncSettings(**{**vars(settings), "own_retry_s": 0.1}))):
        await tasks.submit(pool, [submission()])
        await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) = 1"))
        async with asyncio.timeout(120):
            observer = await asyncpg.connect(settings.postgres)
            await observer.execute("SET stats_fetch_consistency = 'none'")
            activity = (
                "SELECT max(query_start) FROM pg_stat_activity WHERE application_name LIKE 'penstock task-sync%'"
                " AND datname = current_database()"
            )
            # No query during three seconds, by the server's clock.
            quiet = f"SELECT clock_timestamp() - ({activity}) > interval '3 seconds'"
            await wait_until(lambda: observer.fetchval(quiet))
            await observer.close()


async def test_task_sync_waits_for_a_coordinator(settings, pool, monkeypatch):
    """O1: task-sync retries until a new Kafka has a coordinator for the group."""
    polled_groups = []
    list_offsets = AIOKafkaAdminClient.list_consumer_group_offsets

    async def fail_three_times(admin, group, coordinator):
        polled_groups.append(group)
        if len(polled_groups) < 4:
            raise GroupCoordinatorNotAvailableError
        return await list_offsets(admin, group, coordinator)

    monkeypatch.setattr(AIOKafkaAdminClient, "list_consumer_group_offsets", fail_three_times)
    # A full window makes task-sync poll the lag repeatedly.
    settings = TaskSyncSettings(**{**vars(settings), "window": 2, "release_batch": 2})
    await tasks.submit(pool, [submission() for _ in range(5)])
    async with running_service(create_app(settings)):
        await wait_until(lambda: len(polled_groups) >= 5)
        assert await count(pool, "state = 'queued'") == 2


async def test_a_new_type_needs_no_restart(settings, pool):
    """T2: registering a type inserts one row; task-sync creates its topic and owns it."""
    async with running_service(create_app(settings)):
        await types.register(pool, types.TaskType(name="later", partitions=2))
        await write(settings.kafka, f"{settings.prefix}submitted", {"type": "later"})
        await wait_until(lambda: read(settings.kafka, f"{settings.prefix}ready.later"))


async def test_every_content_type_arrives_unchanged(settings, pool):
    """T1: JSON, text, URLs and bytes arrive unchanged."""
    sent = [
        ("text", "grün"),
        ("url", "https://a.example/x"),
        ("bytes", base64.b64encode(b"\x00\xff").decode()),
    ]
    async with running_service(create_app(settings)):
        for kind, value in sent:
            record = {"type": "t", "content_type": kind, "context": value}
            await write(settings.kafka, f"{settings.prefix}submitted", orjson.dumps(record), partition=0)
        await wait_until(lambda: count(pool, "state = 'queued' HAVING count(*) = 3"))
    records = await read(settings.kafka, f"{settings.prefix}ready.t")
    assert [(r["content_type"], r["context"]) for r in records] == sent
