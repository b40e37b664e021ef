"""The heartbeat processor with a real Kafka and PostgreSQL grants, keeps and ends leases."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import pytest
from aiokafka import TopicPartition
from tests.support.scraping import scrape
from tests.support.services import producing, read, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.going_on import headers_of_going_on
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.result import StageResult, encode_results
from penstock.contracts.submission import Submission
from penstock.core.attempt import CHOSEN
from penstock.core.completion import Fence, Outcome
from penstock.heartbeats import lost_follows
from penstock.heartbeats.app import create_app
from penstock.heartbeats.results_progress import results_progress
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.heartbeats.unwatched import UnwatchedAttempts
from penstock.kafka.client.connection import admin_client, make_consumer, running
from penstock.kafka.topology.group_members import describe
from penstock.kafka.topology.topics import service_group
from penstock.local.ports import choose_port
from penstock.postgres import release, tasks, types
from penstock.postgres.session import open_session
from penstock.stages.app import create_app as create_stages
from penstock.stages.settings import StagesSettings

TASK_TYPES = (types.TaskType(name="t", partitions=1, max_attempts=2, retry_base_ms=60_000),)


@pytest.fixture
def settings(where):
    return HeartbeatsSettings(**where, tick_s=0.2, settle_s=0.3)


async def release_tasks(pool, settings, count=1):
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(n)) for n in range(count)])
    async with open_session(settings.postgres, "test") as session:
        batch = (await release.release(session, types.TaskType(name="t"), count, [])).batch
        return [ready.fence.attempt_id for ready in batch.tasks]


async def send(
    settings, kind, attempt_ids, worker="w", lease_ms=60_000, max_attempts=None, follows=None, begun=True
):
    """Writes a heartbeat; with `follows` to the partition of that worker, behind its heartbeats."""
    value = Heartbeat(kind, worker, lease_ms, attempt_ids, max_attempts, begun).encode()
    record_key = follows or worker
    await write(settings.kafka, f"{settings.prefix}heartbeats", value, key=record_key.encode())


async def state_of(pool, attempt_id):
    return await pool.fetchval("SELECT state FROM task WHERE id = $1", attempt_id[0])


async def sum_committed_offsets(settings):
    async with admin_client(settings) as admin:
        offsets = await admin.list_consumer_group_offsets(service_group(settings.prefix, "heartbeats"))
    return sum(meta.offset for meta in offsets.values() if meta.offset > 0)


async def test_a_lasting_claim_becomes_running_before_it_is_committed(settings, pool):
    """H8: a lease is in PostgreSQL before its claim is committed, so a crash loses no lease."""
    [attempt_id] = await release_tasks(pool, settings)
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [attempt_id])
        row = await wait_until(lambda: pool.fetchrow("SELECT * FROM task WHERE state = 'running'"))
        assert (row["worker"], row["lease_partition"]) == ("w", row["lease_partition"])
        await wait_until(lambda: sum_committed_offsets(settings), what="the claim is committed")


async def test_a_short_claim_does_not_update_the_row(settings, pool):
    """A stage shorter than the settling time causes no update in PostgreSQL."""
    quick, lasting = await release_tasks(pool, settings, 2)
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [quick])
        await send(settings, Kind.RELEASE, [quick])
        await send(settings, Kind.CLAIM, [lasting])
        await wait_until(
            lambda: pool.fetchval("SELECT true FROM task WHERE id = $1 AND state = 'running'", lasting[0])
        )
    assert await state_of(pool, quick) == "queued"


async def test_a_lease_expires_without_heartbeats_and_lasts_with_them(settings, pool):
    """H8, H10: the task of a silent worker is scheduled as attempt 1; the other keeps running."""
    silent, alive = await release_tasks(pool, settings, 2)
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [silent], worker="a", lease_ms=2_000)
        await send(settings, Kind.CLAIM, [alive], worker="b", lease_ms=2_000)

        async def expired():
            await send(settings, Kind.BEAT, [alive], worker="b", lease_ms=2_000)
            return await state_of(pool, silent) == "scheduled"

        await wait_until(expired, every=0.3)
        assert await state_of(pool, alive) == "running"
    found = await tasks.get(pool, silent[0])
    assert (found["attempt"], found["losses"], found["failures"]) == (1, 1, 0)
    assert [(a["outcome"], a["worker"]) for a in found["attempts"]] == [("expired", "a")]
    # The claim gives the attempt a start: a lost worker reports none.
    [lost] = found["attempts"]
    assert lost["queued_at"] <= lost["started_at"] <= lost["finished_at"]
    assert "no heartbeat from worker a" in found["attempts"][0]["error"]


async def test_a_locked_task_delays_no_other_lease(settings, pool):
    """S12: while another transaction locks a task, the claims and the expiries of other tasks are
    written. Its own follow when the lock ends."""
    locked, other, expiring, locked_later = await release_tasks(pool, settings, 4)
    async with running_service(create_app(settings)):
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", locked[0])
            await send(settings, Kind.CLAIM, [locked, other], worker="a", lease_ms=60_000)
            await send(settings, Kind.CLAIM, [expiring, locked_later], worker="b", lease_ms=2_000)

            async def both_running():
                return {await state_of(pool, each) for each in (other, locked_later)} == {"running"}

            await wait_until(both_running)
            await connection.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", locked_later[0])

            async def expired():
                return await state_of(pool, expiring) == "scheduled"

            await wait_until(expired)
            assert await state_of(pool, locked) == "queued"
            assert await state_of(pool, locked_later) == "running"

        async def both_written_later():
            return (await state_of(pool, locked), await state_of(pool, locked_later)) == (
                "running",
                "scheduled",
            )

        await wait_until(both_written_later)


async def test_a_mass_expiry_is_verified_first(settings, pool, caplog):
    """H8, H10: before more than a tenth of the leases expire at once, the processor verifies them.

    The processor asks Kafka whether it has read all heartbeats, and then expires the leases.
    """
    *silent, other = await release_tasks(pool, settings, 6)
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, silent, worker="a", lease_ms=2_000)
        await send(settings, Kind.CLAIM, [other], worker="b", lease_ms=60_000)
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 5 FROM task WHERE state = 'scheduled'"))
        assert await state_of(pool, other) == "running"
    events = [
        vars(record)["event"]
        for record in caplog.records
        if record.name == "penstock.heartbeats.lease_tracker"
    ]
    check = events.index("mass_expiry_checked")
    assert events[check + 1] == "mass_expiry_verified"
    assert "lease_expired" not in events[:check]


async def test_losing_the_last_attempt_fails_the_task(settings, pool):
    """H10: a task whose last attempt loses its worker fails, with an event."""
    [attempt_id] = await release_tasks(pool, settings)
    await pool.execute("UPDATE task SET losses = 1, attempt = 1 WHERE id = $1", attempt_id[0])
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [(attempt_id[0], 0, 1)], lease_ms=1_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'failed'"))
        [event] = await wait_until(lambda: read(settings.kafka, f"{settings.prefix}events"))
    assert (event["event"], event["error"]["kind"]) == ("task.failed", "LeaseExpired")


@pytest.mark.parametrize(
    ("limit", "failures", "kind", "meanwhile", "becomes"),
    [
        pytest.param(1, 0, Kind.CLAIM, "", "failed", id="only-once"),
        pytest.param(1, 0, Kind.BEAT, "", "failed", id="after-a-lost-claim"),
        pytest.param(1, 0, Kind.CLAIM, "restart", "failed", id="after-a-restart"),
        pytest.param(1, 0, Kind.CLAIM, "unsaved", "failed", id="in-memory-only"),
        pytest.param(10, 3, Kind.CLAIM, "", "scheduled", id="above-the-limit-of-the-type"),
        pytest.param(None, 3, Kind.CLAIM, "", "failed", id="limit-of-the-type"),
    ],
)
async def test_the_limit_of_the_stage_counts_when_its_worker_is_lost(
    settings, pool, limit, failures, kind, meanwhile, becomes
):
    """W1, H10: a claim contains the limit of the stage, because a lost worker cannot report it."""
    await pool.execute("UPDATE task_type SET max_attempts = 3")
    [(task_id, *_)] = await release_tasks(pool, settings)
    await pool.execute("UPDATE task SET failures = $2, attempt = $2 WHERE id = $1", task_id, failures)
    attempt_id = (task_id, 0, failures)

    async def has_ended():
        return await state_of(pool, attempt_id) in ("failed", "scheduled")

    async with running_service(create_app(settings)):
        await send(settings, kind, [attempt_id], lease_ms=1_500, max_attempts=limit)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'running'"))
        if meanwhile == "unsaved":
            await pool.execute("UPDATE task SET state = 'queued', max_attempts = NULL")
        if meanwhile != "restart":
            await wait_until(has_ended)
    if meanwhile == "restart":
        async with running_service(create_app(settings)):
            await wait_until(has_ended)
    row = await pool.fetchrow("SELECT state, failures, losses, max_attempts FROM task")
    assert tuple(row) == (becomes, failures, 1, None)


async def test_a_task_that_loses_too_many_workers_is_quarantined(settings, pool):
    """W8: losses are counted apart from failures, and the attempt is revoked."""
    [attempt_id] = await release_tasks(pool, settings)
    await pool.execute("UPDATE task_type SET max_attempts = 100, max_losses = 2")
    await pool.execute("UPDATE task SET losses = 1, failures = 7, attempt = 8 WHERE id = $1", attempt_id[0])
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [(attempt_id[0], 0, 8)], lease_ms=1_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'quarantined'"))
        [event] = await wait_until(lambda: read(settings.kafka, f"{settings.prefix}events"))
        [revoked] = await wait_until(lambda: read(settings.kafka, f"{settings.prefix}revoked"))
    assert (event["event"], event["error"]["kind"]) == ("task.quarantined", "LeaseExpired")
    assert revoked == {"why": "expired", "tasks": [[attempt_id[0], 0, 8]]}


@pytest.mark.parametrize("first", ["suspect", "others"])
async def test_a_loss_is_charged_to_the_suspect_that_had_begun(settings, pool, first):
    """W8: a suspect that waits for its turn, and an attempt beside a begun suspect, are not
    charged, in whichever order their leases expire. Without a suspect all begun attempts are
    charged."""
    await pool.execute("UPDATE task_type SET max_attempts = 10")
    suspect, waiting, fresh, other = await release_tasks(pool, settings, 4)
    await pool.execute("UPDATE task SET losses = 1 WHERE id = ANY ($1)", [suspect[0], waiting[0]])
    sooner, later = 1_000, 2_000
    lease_ms = (sooner, later) if first == "suspect" else (later, sooner)
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [fresh], lease_ms=lease_ms[1])
        await send(settings, Kind.CLAIM, [suspect], lease_ms=lease_ms[0], begun=False)
        await send(settings, Kind.CLAIM, [waiting], lease_ms=lease_ms[1], begun=False)
        await send(settings, Kind.BEAT, [suspect], lease_ms=lease_ms[0])
        await send(settings, Kind.CLAIM, [other], worker="without suspects", lease_ms=1_000)
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 4 FROM task WHERE state = 'scheduled'"))
    losses = {row["id"]: row["losses"] for row in await pool.fetch("SELECT id, losses FROM task")}
    assert losses == {suspect[0]: 2, waiting[0]: 1, fresh[0]: 0, other[0]: 1}
    assert await pool.fetchval("SELECT bool_and(attempt = 1) FROM task")


async def test_a_running_task_without_a_lease_gets_another_lease(settings, pool):
    """H10: the worker ends the lease but sends no result; a second lease expires."""
    [attempt_id] = await release_tasks(pool, settings)
    fast_settings = dataclasses.replace(settings, recount_s=0.3)
    async with running_service(create_app(fast_settings)):
        await send(settings, Kind.CLAIM, [attempt_id], lease_ms=2_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'running'"))
        await send(settings, Kind.RELEASE, [attempt_id])
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'scheduled'"))


@pytest.mark.declared_topics
async def test_attempts_with_an_unread_result_are_not_lost(settings, pool):
    """H8: while the stage processor is down, attempts that may have a result are not lost.

    After it has committed its records, the attempts without a lease are found.
    """
    [attempt_id] = await release_tasks(pool, settings)
    await pool.execute(
        "UPDATE task SET state = 'running', worker = 'w', lease_partition = 3 WHERE id = $1", attempt_id[0]
    )
    topic = f"{settings.prefix}stage-results"
    await write(settings.kafka, topic, {"worker": "w", "results": []}, partition=2)
    async with results_progress(settings) as progress:
        unwatched = UnwatchedAttempts(progress, pool)

        async def find_unwatched():
            recount = await unwatched.find({3}, lambda _attempt_id: False, 0.0)
            assert [lease.attempt_id for lease in recount.held] == [attempt_id]
            return [lease.attempt_id for lease in recount.unwatched]

        assert [await find_unwatched(), await find_unwatched(), await find_unwatched()] == [[], [], []]
        # The stage processor commits the record after its restart.
        async with running(make_consumer(settings, service_group(settings.prefix, "stages"))) as consumer:
            consumer.assign([TopicPartition(topic, 2)])
            await consumer.commit({TopicPartition(topic, 2): 1})
        assert await find_unwatched() == [attempt_id]


@pytest.mark.parametrize("restart", [False, True])
async def test_no_lease_expires_while_its_result_may_be_unread(settings, pool, restart):
    """H8, H10: a finished task keeps its result, however long the stage processor was away.

    The lease expires after the stage processor has read all results that were written before.
    """
    await pool.execute("UPDATE task_type SET max_attempts = 1")
    finished, silent = await release_tasks(pool, settings, 2)
    port = choose_port()
    metered = dataclasses.replace(settings, metrics_port=port)
    result = StageResult(fence=Fence(finished[0], 0, "start", 0), outcome=Outcome.DONE)

    async def overdue():
        return (await scrape(port))[("penstock_lease_overdue_seconds",)] > 1.5

    async with running_service(create_app(metered)):
        await send(settings, Kind.CLAIM, [finished, silent], lease_ms=1_000)
        await write(
            settings.kafka, f"{settings.prefix}stage-results", encode_results("w", [result]), key=b"w"
        )
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 2 FROM task WHERE state = 'running'"))
        if not restart:
            await wait_until(overdue)
    if restart:
        async with running_service(create_app(metered)):
            await wait_until(overdue)
    assert await pool.fetchval("SELECT count(*) = 2 FROM task WHERE state = 'running'")
    stages_settings = StagesSettings(kafka=settings.kafka, prefix=settings.prefix, postgres=settings.postgres)
    async with running_service(create_app(settings)), running_service(create_stages(stages_settings)):
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'failed'"))
    assert [await state_of(pool, one) for one in (finished, silent)] == ["succeeded", "failed"]


@pytest.mark.parametrize("type_lease_ms", [300, 3_000_000])
async def test_a_restart_restores_leases_with_their_own_timeout(settings, pool, type_lease_ms):
    """H8: a restarted processor restores leases from PostgreSQL, each with its whole timeout.

    The timeout is that of the claim, because the worker sends heartbeats by it. The type's timeout
    may have changed.
    """
    [attempt_id] = await release_tasks(pool, settings)
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [attempt_id], lease_ms=2_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'running'"))
        await wait_until(lambda: sum_committed_offsets(settings))
    await pool.execute("UPDATE task_type SET lease_ms = $1", type_lease_ms)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with running_service(create_app(settings)):
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'scheduled'"))
    assert loop.time() - started_s >= 2.0, "the lease expired before its whole timeout had passed again"
    assert "for 2 s" in (await tasks.get(pool, attempt_id[0]))["attempts"][0]["error"]


async def test_the_worker_of_the_last_claim_holds_the_lease(settings, pool):
    """W4: of two claims the second holds the lease; the first worker's silence does not end it."""
    [attempt_id] = await release_tasks(pool, settings)
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [attempt_id], worker="first", lease_ms=1_500)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE worker = 'first'"))
        await send(settings, Kind.CLAIM, [attempt_id], worker="second", lease_ms=60_000)
        await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE worker = 'second'"))
        # A later lease with the same timeout: when it expires, the first lease would have expired.
        [other] = await release_tasks(pool, settings)
        await send(settings, Kind.CLAIM, [other], worker="first", lease_ms=1_500)
        await wait_until(
            lambda: pool.fetchval("SELECT true FROM task WHERE id = $1 AND state = 'scheduled'", other[0])
        )
        assert await state_of(pool, attempt_id) == "running"


@pytest.mark.parametrize("known_from", ["memory", "memory and PostgreSQL", "PostgreSQL"])
async def test_a_late_beat_does_not_change_a_lease_of_another_worker(settings, pool, known_from):
    """W4: the holder keeps its lease and its timeout, and its attempt is not revoked."""
    held, free, finished = await release_tasks(pool, settings, 3)
    # The settling time keeps the claim in memory until all heartbeats of the test are read.
    slow_settings = dataclasses.replace(
        settings, settle_s=3.0 if known_from == "memory" else settings.settle_s
    )
    if known_from == "PostgreSQL":
        # Another processor, or this one before a restart, has read the claim.
        await pool.execute(
            "UPDATE task SET state = 'running', worker = 'holder', lease_partition = 99, lease_ms = 60000 WHERE id = $1",
            held[0],
        )
    await pool.execute("UPDATE task SET state = 'cancelled', finished_at = now() WHERE id = $1", finished[0])
    async with running_service(create_app(slow_settings)):
        if known_from != "PostgreSQL":
            await send(settings, Kind.CLAIM, [held], worker="holder")
        if known_from == "memory and PostgreSQL":
            await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE worker = 'holder'"))
        # One record has all attempts, so the end of the second shows that the first was read.
        await send(
            settings, Kind.BEAT, [held, free, finished], worker="late", lease_ms=1_000, follows="holder"
        )
        # The late worker's lease on the free task expires; one on the held task would expire, too.
        await wait_until(lambda: is_scheduled(pool, free))
        assert await pool.fetchval("SELECT worker FROM task WHERE id = $1", held[0]) == "holder"
        assert await state_of(pool, held) == "running"
        revoked = await wait_until(lambda: find_revoked(settings, [finished, free]))
    assert list(held) not in revoked


async def is_scheduled(pool, attempt_id):
    return await state_of(pool, attempt_id) == "scheduled"


async def find_revoked(settings, attempt_ids):
    """The revoked attempts, once they include all of `attempt_ids`."""
    records = await read(settings.kafka, f"{settings.prefix}revoked")
    found = [attempt_id for record in records for attempt_id in record["tasks"]]
    return all(list(attempt_id) in found for attempt_id in attempt_ids) and found


@pytest.mark.parametrize("ended", ["cancelled", "paused", "next attempt", "deleted"])
async def test_a_worker_is_told_again_and_again_what_is_over(settings, pool, ended):
    """W5, H3: while a worker sends heartbeats for an attempt that is over, it gets a revocation
    after each. So a lost revocation is repeated until its worker reads it; other attempts get
    none."""
    over, alive = await release_tasks(pool, settings, 2)
    fast = dataclasses.replace(settings, recount_s=0.3)
    changes = {
        "cancelled": "state = 'cancelled', finished_at = now()",
        "paused": "state = 'paused', attempt = attempt + 1",
        "next attempt": "state = 'ready', attempt = attempt + 1",
    }
    async with running_service(create_app(fast)):
        await send(settings, Kind.CLAIM, [over, alive])
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 2 FROM task WHERE state = 'running'"))
        # The revocation of this change is lost.
        if ended == "deleted":
            await pool.execute("DELETE FROM task WHERE id = $1", over[0])
        else:
            reset = "worker = NULL, lease_partition = NULL, lease_ms = NULL"
            await pool.execute(f"UPDATE task SET {changes[ended]}, {reset} WHERE id = $1", over[0])

        async def told_twice():
            await send(settings, Kind.BEAT, [over, alive])
            return len(await read(settings.kafka, f"{settings.prefix}revoked")) >= 2

        await wait_until(told_twice, every=0.3)
        revoked = await find_revoked(settings, [over])
        assert list(alive) not in revoked
        assert await state_of(pool, alive) == "running"


async def test_a_claim_waits_for_the_result_before(settings, pool):
    """H5: a worker that goes on with a task claims the next stage before the result of the last one
    is committed. The claim is kept, and the attempt is not revoked."""
    [attempt_id] = await release_tasks(pool, settings)
    following = attempt_id._replace(step=1, attempt=CHOSEN)
    async with running_service(create_app(settings)):
        await send(settings, Kind.CLAIM, [following])
        [other] = await release_tasks(pool, settings)
        await send(settings, Kind.CLAIM, [other], follows="w")
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 1 FROM task WHERE state = 'running'"))
        assert await state_of(pool, attempt_id) == "queued"
        await pool.execute(
            "UPDATE task SET state = 'running', step = 1, attempt = $2, worker = 'w', lease_partition = 0 WHERE id = $1",
            attempt_id[0],
            CHOSEN,
        )
        await wait_until(
            lambda: pool.fetchval("SELECT lease_ms = 60000 FROM task WHERE id = $1", attempt_id[0]),
            what="the claim is written",
        )
    assert await read(settings.kafka, f"{settings.prefix}revoked") == []


def stages_of(settings):
    """The stage processor of the deployment."""
    return create_stages(
        StagesSettings(
            kafka=settings.kafka, prefix=settings.prefix, postgres=settings.postgres, objects=settings.objects
        )
    )


async def go_on(settings, attempt_id, worker="gone"):
    """Writes the result of a first stage with which its worker goes on."""
    fence = Fence(attempt_id[0], 0, "start", 0)
    ended = StageResult(fence=fence, outcome=Outcome.NEXT, next_stage="two", goes_on=CHOSEN)
    async with producing(settings.kafka) as producer:
        await producer.send_and_wait(
            f"{settings.prefix}stage-results",
            encode_results(worker, [ended]),
            key=worker.encode(),
            headers=headers_of_going_on([ended]),
        )


async def lost(pool, attempt_id):
    """The task of an attempt when the one that followed it has expired; None before."""
    statement = "SELECT step, stage, attempt, losses FROM task WHERE id = $1 AND attempt = 1"
    return await pool.fetchrow(statement, attempt_id[0])


async def test_an_attempt_whose_worker_went_on_and_was_lost_expires(settings, pool):
    """H6, W4: kill -9 of a worker after the result with which it went on, before it has claimed the
    next attempt. It is found soon, and its lease ends. As without a claim in general, the loss is
    not charged."""
    await pool.execute("UPDATE task_type SET lease_ms = 1000 WHERE name = 't'")
    [attempt_id] = await release_tasks(pool, settings)
    async with running_service(create_app(settings)), running_service(stages_of(settings)):
        await go_on(settings, attempt_id)
        row = await wait_until(lambda: lost(pool, attempt_id), what="the attempt has expired")
    assert tuple(row) == (1, "two", 1, 0)


@asynccontextmanager
async def two_replicas(settings):
    """Two heartbeat processors, each with one partition of two, and the stage processor."""
    async with (
        running_service(create_app(settings)),
        running_service(create_app(settings)),
        running_service(stages_of(settings)),
        admin_client(settings) as admin,
    ):
        topic = f"{settings.prefix}heartbeats"

        async def share():
            members = await describe(admin, service_group(settings.prefix, "heartbeats")) or []
            return sorted(sorted(member.partitions.get(topic, ())) for member in members) == [[0], [1]]

        await wait_until(share, what="each replica has a partition")
        yield


async def test_one_of_two_replicas_finds_the_lost_attempt(settings, pool, monkeypatch):
    """H6, H10: with two replicas, one of them gives a lease to an attempt whose worker went on and
    was lost. It expires once."""
    monkeypatch.setattr(lost_follows, "SEARCH_S", 0.3)
    await pool.execute("UPDATE task_type SET lease_ms = 1000 WHERE name = 't'")
    first, later = await release_tasks(pool, settings, 2)
    async with two_replicas(settings):
        await go_on(settings, first)
        row = await wait_until(lambda: lost(pool, first), what="the attempt has expired")
        # A second lease on the first attempt would expire before this one.
        await go_on(settings, later)
        await wait_until(lambda: lost(pool, later), what="the later one has expired")
        assert tuple(await lost(pool, first)) == tuple(row) == (1, "two", 1, 0)
    expired = "SELECT task_id, step, attempt FROM attempt WHERE outcome = 'expired' ORDER BY task_id"
    assert [tuple(row) for row in await pool.fetch(expired)] == [(first[0], 1, 0), (later[0], 1, 0)]
