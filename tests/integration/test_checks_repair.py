"""`penstock check --repair` on the real Kafka and PostgreSQL: offenders go back the normal way, and are run."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from click.testing import CliRunner
from tests.integration.test_checks import (
    LONG_AGO,
    claim,
    of,
    only,
    owed,
    read_all,
    record,
    task,
    write_long_ago,
)
from tests.running import make_topics, read, write
from tests.system import System
from tests.waiting import wait_until

from penstock.checks import moving
from penstock.checks.app import Rule, check
from penstock.checks.queued import Queued
from penstock.cli.main import cli
from penstock.kafka.connection import create_topics
from penstock.kafka.topics import ready, workers_group
from penstock.postgres import release, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session
from penstock.settings import Platform


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


@pytest.fixture
async def system(settings, pool):
    async with AsyncExitStack() as stack:
        yield System(settings.kafka, settings.prefix, settings.postgres, stack, pool)


async def repaired(settings, rule, count=1):
    """Repairs what breaks one rule, and finds nothing left."""
    report = await check(settings, repair=True)
    assert report.counts == {rule: count}
    assert report.repaired == {rule: count}
    assert not report.remaining
    assert report.well
    assert not report.clean


async def test_what_has_lost_its_record_is_released_and_run_once(settings, pool, system):
    """O2b: ready again in the same attempt, so that the fence still lets one result count."""
    lost = await task(pool, state="'queued'")
    await repaired(settings, Rule.RECORDLESS)
    row = await tasks.get(pool, lost)
    assert (row["state"], row["step"], row["attempt"]) == ("ready", 0, 0)
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    await system.become(succeeded=1)
    assert system.executed == {lost: 1}


async def test_what_moves_between_the_look_and_the_repair_is_left_alone(settings, pool):
    """By comparison with (id, step, attempt, state) and since when: never past the fence."""
    ids = [await task(pool, state="'queued'") for _ in range(4)]
    queued = Queued(settings, pool, None, 10)
    queued._since = await pool.fetchval("SELECT now()")
    await pool.execute("UPDATE task SET attempt = 1 WHERE id = $1", ids[0])
    await pool.execute("UPDATE task SET state = 'running' WHERE id = $1", ids[1])
    await pool.execute("UPDATE task SET updated_at = now() WHERE id = $1", ids[2])
    assert await queued.release_again([(task_id, 0, 0) for task_id in ids]) == 1
    assert await pool.fetchval("SELECT id FROM task WHERE state = 'ready'") == ids[3]


async def test_an_overdue_timer_is_made_ready(settings, pool):
    """As task-sync does when it is due."""
    late = await task(pool, due_at=LONG_AGO, state="'scheduled'")
    await repaired(settings, Rule.OVERDUE)
    assert (await tasks.get(pool, late))["state"] == "ready"


async def test_the_owner_of_a_type_is_told_again(settings, pool, system):
    """A wake-up that got lost: nothing but a notification is missing."""
    await system.start("task-sync")
    await system.submit(1)
    await system.become(queued=1)
    # Written behind task-sync's back, so that nobody told it.
    await pool.execute(f"UPDATE task SET state = 'ready', updated_at = {LONG_AGO}")
    await read_all(settings, workers_group(settings.prefix, "t"), "ready.t")
    await repaired(settings, Rule.UNRELEASED)
    await system.become(queued=1)


async def test_an_unwatched_attempt_expires(settings, pool):
    """H10: by the decision and the statement of an expired lease: attempt + 1, history, and the event it owes."""
    found = await task(pool, state="'running'", worker="'w'", lease_partition="NULL")
    nobody = await task(pool, state="'running'", lease_partition="99")
    await repaired(settings, Rule.UNWATCHED, 2)
    for task_id, worker in ((found, "w"), (nobody, None)):
        row = await tasks.get(pool, task_id)
        assert (row["state"], row["attempt"], row["losses"]) == ("scheduled", 1, 1)
        assert [(a["outcome"], a["worker"]) for a in row["attempts"]] == [("expired", worker)]
    events = await read(settings.kafka, of(settings, "events"))
    assert {(e["event"], e["task"]["id"]) for e in events} == {
        ("task.expired", found),
        ("task.expired", nobody),
    }
    assert await pool.fetchval("SELECT count(*) FROM outbox") == 0, "what it owed is paid"


async def test_an_unwatched_attempt_of_a_stage_that_may_be_tried_once_is_not_tried_again(settings, pool):
    """W1: the limit it was claimed with counts, and not that of its type."""
    once = await task(pool, state="'running'", worker="'w'", lease_partition="NULL", max_attempts="1")
    await repaired(settings, Rule.UNWATCHED)
    row = await tasks.get(pool, once)
    assert (row["state"], row["attempt"], row["losses"]) == ("failed", 0, 1)


async def test_a_release_that_nobody_confirms_is_taken_back(settings, pool):
    """Under the type's lock; what has moved on since stays where it is."""
    stuck, moved = await task(pool), await task(pool)
    async with open_session(settings.postgres, "dying owner") as session:
        await release.release(session, types.TaskType(name="t"), 10, [])
    await pool.execute(f"UPDATE release SET created_at = {LONG_AGO}")
    await pool.execute("UPDATE task SET updated_at = (SELECT created_at FROM release) WHERE id = $1", stuck)
    await pool.execute("UPDATE task SET step = 1, updated_at = now() WHERE id = $1", moved)
    await write(settings.kafka, of(settings, "ready.t"), record(moved).replace(b'"step":0', b'"step":1'))
    await repaired(settings, Rule.UNSENT)
    assert (await tasks.get(pool, stuck))["state"] == "ready"
    assert (await tasks.get(pool, moved))["state"] == "queued"
    assert await pool.fetchval("SELECT count(*) FROM release") == 0


async def test_a_release_whose_owner_lives_is_left_to_it(settings, pool):
    """Two that send the same batch are one too many: it remains, and that is said."""
    await task(pool)
    async with open_session(settings.postgres, "owner") as session:
        assert await release.own(session, "t")
        await release.release(session, types.TaskType(name="t"), 10, [])
        await pool.execute(f"UPDATE release SET created_at = {LONG_AGO}")
        report = await check(settings, repair=True)
    assert (report.repaired, report.remaining, report.well) == ({}, {Rule.UNSENT: 1}, False)


async def test_an_unpublished_event_is_published(settings, pool):
    """C1: as the sweeper does, under the same id."""
    await owed(pool)
    await pool.execute(f"UPDATE outbox SET created_at = {LONG_AGO}")
    await repaired(settings, Rule.UNPUBLISHED)
    [event] = await read(settings.kafka, of(settings, "events"))
    assert event["id"] == "1-0-0-succeeded"
    assert await pool.fetchval("SELECT count(*) FROM outbox") == 0


async def test_an_overdue_callback_gets_its_record_again(settings, pool):
    """C2: as the releaser does; it is due again unless its fate is known by then."""
    [callback] = (await owed(pool)).callbacks
    await pool.execute("DELETE FROM outbox")
    await pool.execute(f"UPDATE callback SET due_at = {LONG_AGO}")
    await repaired(settings, Rule.UNDELIVERED)
    [written] = await read(settings.kafka, of(settings, "callbacks"))
    assert (written["id"], written["attempt"]) == (callback.id, 0)
    assert await pool.fetchval("SELECT due_at > now() FROM callback")


async def test_a_callback_held_for_a_target_that_is_well_is_let_go(settings, pool):
    """C3: it is due at once, and the releaser is told."""
    await owed(pool)
    await pool.execute("DELETE FROM outbox")
    await pool.execute("UPDATE callback SET state = 'held', diverted = true")
    await repaired(settings, Rule.HELD)
    assert await pool.fetchval("SELECT state = 'pending' AND due_at <= now() FROM callback")


async def test_a_service_that_does_not_run_cannot_be_made_up_for(settings, pool):
    """In doubt nothing is ended: the worker of a task that nobody hears may be alive."""
    running = await task(pool, state="'running'", worker="'w'", lease_partition="3")
    await write_long_ago(settings, "heartbeats", claim(running))
    report = await check(settings, repair=True)
    assert report.counts == report.remaining == {Rule.UNHEARD: 1, Rule.UNREAD: 1}
    assert not report.repaired
    assert (await tasks.get(pool, running))["state"] == "running"


async def test_the_check_changes_nothing_unless_told_to(settings, pool):
    """--dry-run is what happens without --repair."""
    lost = await task(pool, state="'queued'")
    assert (await only(settings)).id == lost
    assert (await tasks.get(pool, lost))["state"] == "queued"


async def test_the_verb_and_its_statuses(settings, pool, monkeypatch):
    """O2b: 0 when nothing is in limbo (any more), 7 when something is; --json says what was done."""
    for name in ("kafka", "postgres", "prefix"):
        monkeypatch.setenv(f"PENSTOCK_{name.upper()}", getattr(settings, name))

    async def verb(*arguments):
        return await asyncio.to_thread(CliRunner().invoke, cli, ["check", *arguments])

    assert (await verb()).exit_code == 0
    lost = await task(pool, state="'queued'")
    await task(pool, state="'waiting'")
    found = await verb("--dry-run")
    assert found.exit_code == 7
    assert "in limbo: 1 recordless, 1 waiting" in found.output
    found = await verb("--repair", "--json")
    assert found.exit_code == 7
    said = json.loads(found.stdout)
    assert said["counts"] == {"waiting": 1, "recordless": 1}
    assert said["repaired"] == {"recordless": 1}
    assert said["remaining"] == {"waiting": 1}
    assert {"rule": "recordless", "what": "task", "id": lost}.items() <= said["offenders"][1].items()
    await pool.execute("DELETE FROM task WHERE state = 'waiting'")
    await pool.execute("UPDATE task SET state = 'queued'")
    found = await verb("--repair")
    assert found.exit_code == 0
    assert "put back: 1 recordless" in found.output
    assert "still in limbo: none" in found.output


async def test_a_busy_system_is_clean_at_every_moment(settings, system, monkeypatch):
    """O2b: tasks between places, a backlog that is ready for long and workers that catch up are no offenders."""
    monkeypatch.undo()
    await system.start("task-sync", "heartbeats", "stages")
    await system.submit(3000)
    # As if it had been submitted long ago: a backlog.
    await system.pool.execute(f"UPDATE task SET updated_at = {LONG_AGO} WHERE state = 'ready'")
    await system.work(handler_s=0.3, pool=100, backlog=50)
    busy = set()

    async def done():
        report = await check(settings)
        assert report.clean, report.offenders
        busy.update(report.tasks)
        return report.tasks == {"succeeded": 3000}

    await wait_until(done, timeout=120)
    # It was looked at while it was under way, however few looks a busy machine allows.
    assert {"queued", "succeeded"} < busy
