"""The heartbeat processor on the real Kafka and PostgreSQL: leases are granted, kept, restored and ended."""

import asyncio
import dataclasses

import pytest
from aiokafka import TopicPartition
from tests.running import make_topics, read, running_service, write
from tests.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.submission import Submission
from penstock.heartbeats.app import create_app
from penstock.heartbeats.recount import Recount
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka.connection import admin_client, make_consumer, running
from penstock.kafka.topics import service_group
from penstock.postgres import release, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    return HeartbeatsSettings(kafka=kafka_servers, prefix=prefix, postgres=database, tick_s=0.2, settle_s=0.3)


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(
            pool, types.TaskType(name="t", partitions=1, max_attempts=2, retry_base_ms=60_000)
        )
        yield pool


async def queued(pool, settings, count=1):
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(n)) for n in range(count)])
    async with open_session(settings.postgres, "test") as session:
        batch = await release.release(session, types.TaskType(name="t"), count, [])
        return [(ready.fence.id, ready.fence.step, ready.fence.attempt) for ready in batch.tasks]


async def say(settings, kind, keys, worker="w", lease_ms=60_000, max_attempts=None, behind=None):
    value = Heartbeat(kind, worker, lease_ms, keys, max_attempts).encode()
    # By the key of another, behind whose records it is read then.
    await write(settings.kafka, f"{settings.prefix}heartbeats", value, key=(behind or worker).encode())


async def state(pool, key):
    return await pool.fetchval("SELECT state FROM task WHERE id = $1", key[0])


async def committed(settings):
    async with admin_client(settings) as admin:
        offsets = await admin.list_consumer_group_offsets(service_group(settings.prefix, "heartbeats"))
    return sum(meta.offset for meta in offsets.values() if meta.offset > 0)


async def test_a_claim_that_lives_becomes_running_and_is_acknowledged_then(settings, pool):
    """H8: a lease is in PostgreSQL before its claim is acknowledged, so that a crash loses none."""
    [key] = await queued(pool, settings)
    async with running_service(create_app(settings)):
        await say(settings, Kind.CLAIM, [key])
        row = await wait_until(lambda: pool.fetchrow("SELECT * FROM task WHERE state = 'running'"))
        assert (row["worker"], row["lease_partition"]) == ("w", row["lease_partition"])
        await wait_until(lambda: committed(settings), what="the claim is acknowledged")


async def test_a_claim_released_at_once_never_touches_the_row(settings, pool):
    """The hot path: a stage shorter than the settling time costs no update."""
    quick, lasting = await queued(pool, settings, 2)
    async with running_service(create_app(settings)):
        await say(settings, Kind.CLAIM, [quick])
        await say(settings, Kind.RELEASE, [quick])
        await say(settings, Kind.CLAIM, [lasting])
        await wait_until(
            lambda: pool.fetchval("SELECT true FROM task WHERE id = $1 AND state = 'running'", lasting[0])
        )
    assert await state(pool, quick) == "queued"


async def test_silence_ends_a_lease_and_signs_of_life_keep_it(settings, pool):
    """H8, H10: the silent worker's task is scheduled again as attempt 1; the one that is beaten stays."""
    silent, beaten = await queued(pool, settings, 2)
    async with running_service(create_app(settings)):
        await say(settings, Kind.CLAIM, [silent], worker="a", lease_ms=2_000)
        await say(settings, Kind.CLAIM, [beaten], worker="b", lease_ms=2_000)

        async def expired():
            await say(settings, Kind.BEAT, [beaten], worker="b", lease_ms=2_000)
            return await state(pool, silent) == "scheduled"

        await wait_until(expired, every=0.3)
        assert await state(pool, beaten) == "running"
    found = await tasks.get(pool, silent[0])
    assert (found["attempt"], found["losses"], found["failures"]) == (1, 1, 0)
    assert [(a["outcome"], a["worker"]) for a in found["attempts"]] == [("expired", "a")]
    assert "no sign of life from worker a" in found["attempts"][0]["error"]


async def test_many_that_fall_silent_at_once_expire_after_a_second_look(settings, pool, caplog):
    """H8, H10: more than a tenth at once is suspicious; it asks the broker again, and those who were
    really silent expire then."""
    *silent, other = await queued(pool, settings, 6)
    async with running_service(create_app(settings)):
        await say(settings, Kind.CLAIM, silent, worker="a", lease_ms=2_000)
        await say(settings, Kind.CLAIM, [other], worker="b", lease_ms=60_000)
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 5 FROM task WHERE state = 'scheduled'"))
        assert await state(pool, other) == "running"
    said = [record.getMessage() for record in caplog.records if record.name == "penstock.heartbeats.handlers"]
    suspicion = said.index(
        "5 of 6 leases would expire at once: making sure that it is not us who do not hear"
    )
    assert said[suspicion + 1] == "5 leases expire: everything that was said before was read"
    assert not any("lease expired" in line for line in said[:suspicion])


async def test_the_last_try_lost_fails_the_task(settings, pool):
    """H10: when the tries are used up, failed, with an event."""
    [key] = await queued(pool, settings)
    await pool.execute("UPDATE task SET losses = 1, attempt = 1 WHERE id = $1", key[0])
    async with running_service(create_app(settings)):
        await say(settings, Kind.CLAIM, [(key[0], 0, 1)], lease_ms=1_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'failed'"))
        [event] = await wait_until(lambda: read(settings.kafka, f"{settings.prefix}events"))
    assert (event["event"], event["error"]["kind"]) == ("task.failed", "LeaseExpired")


@pytest.mark.parametrize(
    ("limit", "failures", "kind", "meanwhile", "becomes"),
    [
        pytest.param(1, 0, Kind.CLAIM, "", "failed", id="once-and-no-more"),
        pytest.param(1, 0, Kind.BEAT, "", "failed", id="whose-claim-was-lost"),
        pytest.param(1, 0, Kind.CLAIM, "restart", "failed", id="after-a-restart"),
        pytest.param(1, 0, Kind.CLAIM, "unwritten", "failed", id="known-in-memory-only"),
        pytest.param(10, 3, Kind.CLAIM, "", "scheduled", id="more-often-than-its-type"),
        pytest.param(None, 3, Kind.CLAIM, "", "failed", id="as-its-type"),
    ],
)
async def test_the_stages_own_limit_counts_when_its_worker_is_lost(
    settings, pool, limit, failures, kind, meanwhile, becomes
):
    """W1, H10: what a stage may be tried is said with its claim, since a lost worker says nothing any more."""
    await pool.execute("UPDATE task_type SET max_attempts = 3")
    [(task_id, *_)] = await queued(pool, settings)
    await pool.execute("UPDATE task SET failures = $2, attempt = $2 WHERE id = $1", task_id, failures)
    key = (task_id, 0, failures)

    async def over():
        return await state(pool, key) in ("failed", "scheduled")

    async with running_service(create_app(settings)):
        await say(settings, kind, [key], lease_ms=1_500, max_attempts=limit)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'running'"))
        if meanwhile == "unwritten":
            await pool.execute("UPDATE task SET state = 'queued', max_attempts = NULL")
        if meanwhile != "restart":
            await wait_until(over)
    if meanwhile == "restart":
        async with running_service(create_app(settings)):
            await wait_until(over)
    row = await pool.fetchrow("SELECT state, failures, losses, max_attempts FROM task")
    assert tuple(row) == (becomes, failures, 1, None)


async def test_a_task_that_loses_its_workers_is_quarantined(settings, pool):
    """W8: counted apart from failures; and whoever may still run it is told to stop."""
    [key] = await queued(pool, settings)
    await pool.execute("UPDATE task_type SET max_attempts = 100, max_losses = 2")
    await pool.execute("UPDATE task SET losses = 1, failures = 7, attempt = 8 WHERE id = $1", key[0])
    async with running_service(create_app(settings)):
        await say(settings, Kind.CLAIM, [(key[0], 0, 8)], lease_ms=1_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'quarantined'"))
        [event] = await wait_until(lambda: read(settings.kafka, f"{settings.prefix}events"))
        [revoked] = await wait_until(lambda: read(settings.kafka, f"{settings.prefix}revoked"))
    assert (event["event"], event["error"]["kind"]) == ("task.quarantined", "LeaseExpired")
    assert revoked == {"why": "expired", "tasks": [[key[0], 0, 8]]}


async def test_a_running_task_whose_result_was_lost_is_watched_again(settings, pool):
    """H10: released, but nothing ended it: it gets another lease, which expires."""
    [key] = await queued(pool, settings)
    hasty = dataclasses.replace(settings, recount_s=0.3)
    async with running_service(create_app(hasty)):
        await say(settings, Kind.CLAIM, [key], lease_ms=2_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'running'"))
        await say(settings, Kind.RELEASE, [key])
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'scheduled'"))


async def test_nobody_is_lost_whose_result_may_still_be_committed(settings, pool):
    """H8: while stages is away, what was released waits for it, however long; then what it left is found."""
    [key] = await queued(pool, settings)
    await pool.execute(
        "UPDATE task SET state = 'running', worker = 'w', lease_partition = 3 WHERE id = $1", key[0]
    )
    topic = f"{settings.prefix}stage-results"
    await write(settings.kafka, topic, {"worker": "w", "results": []}, partition=2)
    recount = Recount(settings, pool)

    async def look():
        return [lease.key for lease in await recount.look({3}, lambda _key: False, 0.0)]

    assert [await look(), await look(), await look()] == [[], [], []]
    # What stages does when it is back.
    async with running(make_consumer(settings, service_group(settings.prefix, "stages"))) as consumer:
        consumer.assign([TopicPartition(topic, 2)])
        await consumer.commit({TopicPartition(topic, 2): 1})
    assert await look() == [key]


@pytest.mark.parametrize("type_lease_ms", [300, 3_000_000])
async def test_leases_are_restored_after_a_restart(settings, pool, type_lease_ms):
    """H8: a processor that starts anew knows the leases it has never read of, and gives each its whole timeout: the one
    that it was claimed with, by which its worker beats, and not what its type says by then."""
    [key] = await queued(pool, settings)
    async with running_service(create_app(settings)):
        await say(settings, Kind.CLAIM, [key], lease_ms=2_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'running'"))
        await wait_until(lambda: committed(settings))
    await pool.execute("UPDATE task_type SET lease_ms = $1", type_lease_ms)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with running_service(create_app(settings)):
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'scheduled'"))
    assert loop.time() - began >= 2.0, "expired before its timeout had passed anew"
    assert "for 2 s" in (await tasks.get(pool, key[0]))["attempts"][0]["error"]


async def test_the_last_worker_to_claim_holds_the_lease(settings, pool):
    """W4: a record delivered twice is claimed twice; the first worker's silence does not end the second's attempt."""
    [key] = await queued(pool, settings)
    async with running_service(create_app(settings)):
        await say(settings, Kind.CLAIM, [key], worker="first", lease_ms=1_500)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE worker = 'first'"))
        await say(settings, Kind.CLAIM, [key], worker="second", lease_ms=60_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE worker = 'second'"))
        # A third lease with the first one's timeout, granted later: when it has expired, so would the first.
        [other] = await queued(pool, settings)
        await say(settings, Kind.CLAIM, [other], worker="first", lease_ms=1_500)
        await wait_until(
            lambda: pool.fetchval("SELECT true FROM task WHERE id = $1 AND state = 'scheduled'", other[0])
        )
        assert await state(pool, key) == "running"


@pytest.mark.parametrize("known", ["young", "written", "to PostgreSQL only"])
async def test_a_beat_takes_nothing_from_the_worker_that_holds_it(settings, pool, known):
    """W4: who was too late still beats; the holder keeps its lease, whose length is its own, and hears no word of an end."""
    taken, free, over = await queued(pool, settings, 3)
    # So long that a claim stays in memory until everything here was read.
    patient = dataclasses.replace(settings, settle_s=3.0 if known == "young" else settings.settle_s)
    if known == "to PostgreSQL only":
        # Heard over a partition of another processor, or before this one restarted.
        await pool.execute(
            "UPDATE task SET state = 'running', worker = 'holder', lease_partition = 99, lease_ms = 60000 WHERE id = $1",
            taken[0],
        )
    await pool.execute("UPDATE task SET state = 'cancelled', finished_at = now() WHERE id = $1", over[0])
    async with running_service(create_app(patient)):
        if known != "to PostgreSQL only":
            await say(settings, Kind.CLAIM, [taken], worker="holder")
        if known == "written":
            await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE worker = 'holder'"))
        # Of one record, so that the second tells that the first was read, too.
        await say(settings, Kind.BEAT, [taken, free, over], worker="late", lease_ms=1_000, behind="holder")
        # It has got what was free, and its lease has run out; with it would have gone what else it had taken.
        await wait_until(lambda: is_scheduled(pool, free))
        assert await pool.fetchval("SELECT worker FROM task WHERE id = $1", taken[0]) == "holder"
        assert await state(pool, taken) == "running"
        revoked = await wait_until(lambda: told(settings, [over, free]))
    assert list(taken) not in revoked


async def is_scheduled(pool, key):
    return await state(pool, key) == "scheduled"


async def told(settings, keys):
    """What was taken back, once all of `keys` were."""
    records = await read(settings.kafka, f"{settings.prefix}revoked")
    found = [key for record in records for key in record["tasks"]]
    return all(list(key) in found for key in keys) and found


async def test_a_malformed_heartbeat_is_parked_and_delays_nothing(settings, pool):
    """Bad input never blocks what is behind it."""
    [key] = await queued(pool, settings)
    topic = f"{settings.prefix}heartbeats"
    async with running_service(create_app(settings)):
        await write(settings.kafka, topic, b'{"kind":"wave"}', key=b"w")
        await say(settings, Kind.CLAIM, [key])
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'running'"))
    [rejected] = await read(settings.kafka, f"{topic}.rejected")
    assert rejected["reason"]
