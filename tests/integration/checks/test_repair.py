"""`penstock check --repair` with a real Kafka and PostgreSQL: offenders run the normal way."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from click.testing import CliRunner
from tests.integration.checks.test_checks import (
    LONG_AGO,
    check_one,
    claim,
    enqueue_event,
    full_name,
    read_all,
    record,
    result,
    task,
    write_long_ago,
)
from tests.support.pipeline import System
from tests.support.services import read, write
from tests.support.waiting import wait_until

from penstock.checks import rule
from penstock.checks.app import Rule, check
from penstock.checks.queued import Queued
from penstock.cli.main import cli
from penstock.core.attempt import AttemptId
from penstock.kafka.topology.topics import workers_group
from penstock.postgres import release, tasks, types
from penstock.postgres.ownership import lock
from penstock.postgres.release import TYPES
from penstock.postgres.session import open_session


@pytest.fixture
async def system(settings, pool):
    async with AsyncExitStack() as stack:
        yield System(settings.kafka, settings.prefix, settings.postgres, stack, pool)


async def assert_repaired(settings, rule, count=1):
    """Repairs the offenders against one rule and asserts that none remains."""
    report = await check(settings, repair=True)
    assert report.counts == {rule: count}
    assert report.repaired == {rule: count}
    assert not report.remaining
    assert report.well
    assert not report.clean


async def test_a_task_without_a_record_is_released_and_runs_once(settings, pool, system):
    """O2b: repair keeps the attempt, so that the fence accepts only one result."""
    lost = await task(pool, state="'queued'")
    await assert_repaired(settings, Rule.RECORDLESS)
    row = await tasks.get(pool, lost)
    assert (row["state"], row["step"], row["attempt"]) == ("ready", 0, 0)
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    await system.become(succeeded=1)
    assert system.executed == {lost: 1}


async def test_repair_leaves_tasks_that_change_after_the_check(settings, pool):
    """Repair compares (id, step, attempt, state) and the time of the last change."""
    ids = [await task(pool, state="'queued'") for _ in range(4)]
    queued = Queued(rule.System(settings, pool, None, 10))
    queued._since = await pool.fetchval("SELECT now()")
    await pool.execute("UPDATE task SET attempt = 1 WHERE id = $1", ids[0])
    await pool.execute("UPDATE task SET state = 'running' WHERE id = $1", ids[1])
    await pool.execute("UPDATE task SET updated_at = now() WHERE id = $1", ids[2])
    assert await queued.release_again([AttemptId(task_id, 0, 0) for task_id in ids]) == 1
    assert await pool.fetchval("SELECT id FROM task WHERE state = 'ready'") == ids[3]


async def test_an_overdue_timer_is_made_ready(settings, pool):
    """Repair promotes the task as task-sync does."""
    late = await task(pool, due_at=LONG_AGO, state="'scheduled'")
    # Task-sync may still promote it.
    await task(pool, due_at="now() - interval '5 seconds'", state="'scheduled'")
    await assert_repaired(settings, Rule.OVERDUE)
    assert (await tasks.get(pool, late))["state"] == "ready"


async def test_repair_notifies_the_owner_of_a_type_again(settings, pool, system):
    """Only the notification of the owner was lost; repair sends it again."""
    await system.start("task-sync")
    await system.submit(1)
    await system.become(queued=1)
    # This statement notifies no owner.
    await pool.execute(f"UPDATE task SET state = 'ready', updated_at = {LONG_AGO}")
    await read_all(settings, workers_group(settings.prefix, "t"), "ready.t")
    await assert_repaired(settings, Rule.UNRELEASED)
    await system.become(queued=1)


async def test_an_unwatched_attempt_expires(settings, pool):
    """H10: repair ends the attempt as an expired lease does: next attempt, history and event."""
    found = await task(pool, state="'running'", worker="'w'", lease_partition="NULL")
    unclaimed = await task(pool, state="'running'", lease_partition="99")
    await assert_repaired(settings, Rule.UNWATCHED, 2)
    for task_id, worker in ((found, "w"), (unclaimed, None)):
        row = await tasks.get(pool, task_id)
        assert (row["state"], row["attempt"], row["losses"]) == ("scheduled", 1, 1)
        assert [(a["outcome"], a["worker"]) for a in row["attempts"]] == [("expired", worker)]
    events = await read(settings.kafka, full_name(settings, "events"))
    assert {(e["event"], e["task"]["id"]) for e in events} == {
        ("task.expired", found),
        ("task.expired", unclaimed),
    }
    assert await pool.fetchval("SELECT count(*) FROM outbox") == 0, "the event is published"


async def test_an_unwatched_attempt_with_an_unread_result_stays(settings, pool, system):
    """H10: repair ends no attempt whose result may be unread; the result counts once it is read."""
    finished = await task(pool, state="'running'", worker="'w'", lease_partition="NULL")
    await write(settings.kafka, full_name(settings, "stage-results"), result(finished))
    report = await check(settings, repair=True)
    assert report.repaired[Rule.UNWATCHED] == 0
    await system.start("stages")
    await wait_until(lambda: pool.fetchval("SELECT true FROM task WHERE state = 'succeeded'"))


async def test_an_unwatched_attempt_obeys_the_limit_of_its_stage(settings, pool):
    """W1: the limit of the claim counts, and not the limit of the type."""
    once = await task(pool, state="'running'", worker="'w'", lease_partition="NULL", max_attempts="1")
    await assert_repaired(settings, Rule.UNWATCHED)
    row = await tasks.get(pool, once)
    assert (row["state"], row["attempt"], row["losses"]) == ("failed", 0, 1)


async def test_an_unconfirmed_release_is_undone(settings, pool):
    """Repair undoes the release under the type's lock; tasks that changed since then stay."""
    stuck, moved = await task(pool), await task(pool)
    async with open_session(settings.postgres, "dying owner") as session:
        await release.release(session, types.TaskType(name="t"), 10, [])
    await pool.execute(f"UPDATE release SET created_at = {LONG_AGO}")
    await pool.execute("UPDATE task SET updated_at = (SELECT created_at FROM release) WHERE id = $1", stuck)
    await pool.execute("UPDATE task SET step = 1, updated_at = now() WHERE id = $1", moved)
    await write(
        settings.kafka, full_name(settings, "ready.t"), record(moved).replace(b'"step":0', b'"step":1')
    )
    await assert_repaired(settings, Rule.UNSENT)
    assert (await tasks.get(pool, stuck))["state"] == "ready"
    assert (await tasks.get(pool, moved))["state"] == "queued"
    assert await pool.fetchval("SELECT count(*) FROM release") == 0


async def test_repair_leaves_a_release_to_its_living_owner(settings, pool):
    """Only the owner sends its batch; the report lists the release as remaining."""
    await task(pool)
    async with open_session(settings.postgres, "owner") as session:
        assert await lock(session, TYPES, "t")
        await release.release(session, types.TaskType(name="t"), 10, [])
        await pool.execute(f"UPDATE release SET created_at = {LONG_AGO}")
        report = await check(settings, repair=True)
    assert (report.repaired, report.remaining, report.well) == ({}, {Rule.UNSENT: 1}, False)


async def test_an_unpublished_event_is_published(settings, pool):
    """C1: repair publishes the event as the sweeper does, with the same id."""
    await enqueue_event(pool)
    assert (await check(settings)).clean, "the sweeper may still publish it"
    await pool.execute(f"UPDATE outbox SET created_at = {LONG_AGO}")
    await assert_repaired(settings, Rule.UNPUBLISHED)
    [event] = await read(settings.kafka, full_name(settings, "events"))
    assert event["id"] == "1-0-0-succeeded"
    assert await pool.fetchval("SELECT count(*) FROM outbox") == 0


async def test_an_overdue_callback_is_published_again(settings, pool):
    """C2: repair publishes the record as the requeuer does, and sets a later due time."""
    [callback] = (await enqueue_event(pool)).callbacks
    await pool.execute("DELETE FROM outbox")
    await pool.execute(f"UPDATE callback SET due_at = {LONG_AGO}")
    await assert_repaired(settings, Rule.UNDELIVERED)
    [written] = await read(settings.kafka, full_name(settings, "callbacks"))
    assert (written["id"], written["attempt"]) == (callback.id, 0)
    assert await pool.fetchval("SELECT due_at > now() FROM callback")


async def test_a_callback_held_for_a_normal_target_is_requeued(settings, pool):
    """C3: repair makes the callback due at once."""
    await enqueue_event(pool)
    await pool.execute("DELETE FROM outbox")
    await pool.execute("UPDATE callback SET state = 'held', diverted = true")
    await assert_repaired(settings, Rule.HELD)
    assert await pool.fetchval("SELECT state = 'pending' AND due_at <= now() FROM callback")


@pytest.mark.declared_topics
async def test_repair_ends_no_task_while_its_service_is_down(settings, pool):
    """The worker of a task with unread heartbeats may be alive."""
    running = await task(pool, state="'running'", worker="'w'", lease_partition="3")
    await write_long_ago(settings, "heartbeats", claim(running))
    report = await check(settings, repair=True)
    assert report.counts == report.remaining == {Rule.UNHEARD: 1, Rule.UNREAD: 1}
    assert not report.repaired
    assert (await tasks.get(pool, running))["state"] == "running"


async def test_a_check_without_repair_changes_nothing(settings, pool):
    """A check without --repair is a dry run."""
    lost = await task(pool, state="'queued'")
    assert (await check_one(settings)).id == lost
    assert (await tasks.get(pool, lost))["state"] == "queued"


async def test_the_exit_status_and_the_output_match_the_report(settings, pool, monkeypatch):
    """O2b: the status is 7 while offenders remain, else 0; --json lists the repairs."""
    for name in ("kafka", "postgres", "prefix"):
        monkeypatch.setenv(f"PENSTOCK_{name.upper()}", getattr(settings, name))

    async def run_check(*arguments):
        return await asyncio.to_thread(CliRunner().invoke, cli, ["check", *arguments])

    assert (await run_check()).exit_code == 0
    lost = await task(pool, state="'queued'")
    await task(pool, state="'waiting'")
    found = await run_check("--dry-run")
    assert found.exit_code == 7
    assert "in limbo: 1 recordless, 1 waiting" in found.output
    found = await run_check("--repair", "--json")
    assert found.exit_code == 7
    printed = json.loads(found.stdout)
    assert printed["counts"] == {"waiting": 1, "recordless": 1}
    assert printed["repaired"] == {"recordless": 1}
    assert printed["remaining"] == {"waiting": 1}
    assert {"rule": "recordless", "what": "task", "id": lost}.items() <= printed["offenders"][1].items()
    await pool.execute("DELETE FROM task WHERE state = 'waiting'")
    await pool.execute("UPDATE task SET state = 'queued'")
    found = await run_check("--repair")
    assert found.exit_code == 0
    assert "repaired: 1 recordless" in found.output
    assert "still in limbo: none" in found.output


async def test_a_busy_system_is_always_clean(settings, system, monkeypatch):
    """O2b: tasks in transit, an old ready backlog and workers that catch up are no offenders."""
    monkeypatch.undo()
    await system.start("task-sync", "heartbeats", "stages")
    await system.submit(3000)
    # The backlog looks as if it were submitted long ago.
    await system.pool.execute(f"UPDATE task SET updated_at = {LONG_AGO} WHERE state = 'ready'")
    await system.work(handler_s=0.3, pool=100, backlog=50)
    observed_states = set()

    async def all_succeeded():
        report = await check(settings)
        assert report.clean, report.offenders
        observed_states.update(report.tasks)
        return report.tasks == {"succeeded": 3000}

    await wait_until(all_succeeded)
    # At least one check ran while tasks were in progress.
    assert {"queued", "succeeded"} < observed_states


async def test_times_of_a_clock_that_was_ahead_are_mended(settings, pool):
    """O2b, S4: while the clock of PostgreSQL was two hours ahead, a back-off of 5 s and a delayed
    stage got times in two hours. So did a callback, an event and an operation. `check` reports
    them, and repair starts the delays anew. A `run_at` in two hours stays."""
    ahead = "now() + interval '2 hours'"
    backoff = await task(
        pool, due_at=f"{ahead} + interval '5 s'", state="'scheduled'", attempt="1", updated_at=ahead
    )
    stage = await task(
        pool, due_at=f"{ahead} + interval '1 h'", state="'scheduled'", step="1", updated_at=ahead
    )
    run_at = await task(pool, due_at=ahead, state="'scheduled'", updated_at="now()")
    await pool.execute(
        "INSERT INTO audit (id, verb, asked_by, filter, rate, upto, next_at) "
        f"VALUES ('op', 'cancel', 'me', '{{}}', 100, 1, {ahead})"
    )
    [callback] = (await enqueue_event(pool)).callbacks
    await pool.execute(f"UPDATE callback SET created_at = {ahead}, due_at = {ahead} + interval '7 s'")
    await pool.execute(f"UPDATE outbox SET created_at = {ahead}")
    report = await check(settings)
    assert {(offender.what, offender.id) for offender in report.offenders} == {
        ("task", str(backoff)),
        ("task", str(stage)),
        ("callback", callback.id),
        ("event", str(await pool.fetchval("SELECT id FROM outbox"))),
        ("operation", "op"),
    }
    await assert_repaired(settings, Rule.AHEAD, 5)

    async def due_in_s(task_id):
        return await pool.fetchval(
            "SELECT extract(epoch FROM due_at - now()) FROM task WHERE id = $1", task_id
        )

    assert await due_in_s(backoff) <= 5
    assert 1_800 < await due_in_s(stage) <= 3_600
    assert await due_in_s(run_at) > 3_600
    assert await pool.fetchval("SELECT due_at <= now() + interval '7 s' FROM callback")
    assert await pool.fetchval("SELECT next_at <= now() FROM audit")


async def test_a_back_off_beyond_the_longest_of_its_type_is_mended(settings, pool):
    """O2b: a task that was changed after the clock was corrected does not show when its back-off
    was computed. Its length does: the type allows 300 s at most. A delay that a handler chose may
    be longer."""
    failed = await task(pool, due_at="now() + interval '2 hours'", state="'scheduled'", attempt="1")
    chosen = await task(pool, due_at="now() + interval '2 hours'", state="'scheduled'", attempt="1")
    await pool.executemany(
        "INSERT INTO attempt (task_id, step, attempt, stage, outcome, finished_at) VALUES ($1, 0, 0, 's', $2, now())",
        [(failed, "fail"), (chosen, "retry")],
    )
    assert (await check_one(settings)).id == str(failed)
    await assert_repaired(settings, Rule.AHEAD)
    assert await pool.fetchval("SELECT due_at <= now() + interval '300 s' FROM task WHERE id = $1", failed)
    assert await pool.fetchval("SELECT due_at > now() + interval '1 hour' FROM task WHERE id = $1", chosen)


async def test_unpublished_and_refused_results_of_callbacks_are_published(settings, pool):
    """C12: repair publishes the results and dead letters that the callbacks service has left."""
    await pool.executemany(
        "INSERT INTO callback_outbox (id, topic, keys, records, created_at, refused) "
        f"VALUES (gen_random_uuid(), $1, $2, $3, {LONG_AGO}, $4)",
        [
            ("callbacks.results", [b"1"], [b'{"id": "a"}'], None),
            ("callbacks.results", [b"2"], [b'{"id": "b"}'], "too large"),
            ("callbacks.dead", [b"http://a/"], [b'{"id": "c"}'], None),
        ],
    )
    report = await check(settings, repair=True)
    assert report.repaired == {Rule.UNPUBLISHED: 2, Rule.REFUSED: 1}
    assert report.clean is False
    assert report.remaining == {}
    assert await pool.fetchval("SELECT count(*) FROM callback_outbox") == 0
    results = await read(settings.kafka, full_name(settings, "callbacks.results"))
    [letter] = await read(settings.kafka, full_name(settings, "callbacks.dead"))
    assert sorted(result["id"] for result in results) == ["a", "b"]
    assert letter["id"] == "c"
