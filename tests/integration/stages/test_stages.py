"""The stage processor with a real Kafka and PostgreSQL: each stage takes effect once.

Its events, callbacks and revocations are published, also after a crash.
"""

import asyncio
import dataclasses
from datetime import UTC, datetime

import orjson
import pytest
from tests.support.services import read, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.result import Failure, StageResult, encode_results, handed_back
from penstock.contracts.submission import Submission
from penstock.core.completion import Outcome, conclude
from penstock.core.retry import RetryPolicy
from penstock.postgres import advance, release, tasks, types
from penstock.postgres.ending import Ending
from penstock.postgres.session import open_session
from penstock.stages.app import create_app
from penstock.stages.settings import StagesSettings

TASK_TYPES = (types.TaskType(name="t", partitions=1, max_attempts=2, retry_base_ms=60_000, retry_jitter=0),)


@pytest.fixture
def settings(where):
    return StagesSettings(**where, sweep_age_s=1.0, sweep_every_s=0.3)


async def submit_and_release(pool, settings, count=1, **fields):
    """Submits and releases tasks; returns their fences, as a worker has them in flight."""
    submissions = [Submission(type="t", context=Context.encode({"n": 0}), **fields) for _ in range(count)]
    await tasks.submit(pool, submissions)
    async with open_session(settings.postgres, "test") as session:
        batch = (await release.release(session, types.TaskType(name="t"), count, [])).batch
        assert batch is not None
        return [task.fence for task in batch.tasks]


async def send_results(settings, *results, worker="w"):
    await write(settings.kafka, f"{settings.prefix}stage-results", encode_results(worker, results), key=b"w")


async def task(pool, fence):
    return await tasks.get(pool, fence.id)


async def in_state(pool, fence, state):
    async def has_state():
        found = await task(pool, fence)
        return found if found["state"] == state else None

    return await wait_until(has_state, what=f"task {fence.id} is {state}")


def result(fence, outcome=Outcome.NEXT, **fields):
    if outcome is Outcome.NEXT:
        fields = {"next_stage": "two", "context": Context.encode({"n": 1}), **fields}
    return StageResult(
        fence=fence, outcome=outcome, started_ms=1_795_250_000_000, finished_ms=1_795_250_000_500, **fields
    )


async def test_a_repeated_result_takes_effect_once(settings, pool):
    """W4: a result counts once, although it arrives several times.

    It arrives twice in one record, again in a second record, and again after the next stage began.
    """
    [fence] = await submit_and_release(pool, settings)
    async with running_service(create_app(settings)):
        await send_results(settings, result(fence), result(fence))
        await send_results(settings, result(fence, context=Context.encode({"n": 99})))
        found = await in_state(pool, fence, "ready")
        assert (found["stage"], found["step"], found["attempt"]) == ("two", 1, 0)
        # The marker follows the repeated results: its commit shows that they are processed.
        [marker] = await submit_and_release(pool, settings)
        assert marker.id != fence.id or marker.step == 1
        await send_results(settings, result(fence, Outcome.DONE))
        await send_results(settings, result(marker, Outcome.DONE, context=Context.encode("end")))
        await in_state(pool, marker, "succeeded")
    attempts = await pool.fetch(
        "SELECT step, attempt, outcome FROM attempt WHERE task_id = $1 ORDER BY step", fence.id
    )
    assert tuple(attempts[0]) == (0, 0, "next")
    assert len({(row["step"], row["attempt"]) for row in attempts}) == len(attempts)
    assert orjson.loads((await task(pool, fence))["context"]) == {"n": 1}


async def test_two_visits_of_a_stage_are_two_attempts(settings, pool):
    """W4: the step is part of the fence, so a late result of the first visit is stale."""
    [fence] = await submit_and_release(pool, settings)
    async with running_service(create_app(settings)):
        await send_results(settings, result(fence, next_stage=fence.stage))
        await in_state(pool, fence, "ready")
        [second_visit] = await release_again(pool, settings)
        assert (second_visit.stage, second_visit.attempt, second_visit.step) == (
            fence.stage,
            fence.attempt,
            1,
        )
        await send_results(settings, result(fence, Outcome.DONE), result(second_visit, next_stage="three"))
        found = await in_state(pool, fence, "ready")
    assert (found["stage"], found["step"]) == ("three", 2)


async def release_again(pool, settings):
    async with open_session(settings.postgres, "test") as session:
        batch = (await release.release(session, types.TaskType(name="t"), 10, [])).batch
        return [ready.fence for ready in batch.tasks] if batch else []


async def test_a_final_result_is_stored_and_published_once(settings, pool):
    """C1: the transaction of the final transition enqueues its event and its callbacks."""
    [fence] = await submit_and_release(
        pool, settings, callbacks=("http://127.0.0.1:9/a", "http://127.0.0.1:9/b"), labels={"k": "v"}
    )
    async with running_service(create_app(settings)):
        await send_results(settings, result(fence, Outcome.DONE, context=Context.encode({"out": 1})))
        found = await in_state(pool, fence, "succeeded")
        await wait_until(
            lambda: pool.fetchval("SELECT count(*) = 0 FROM outbox"), what="the published event is deleted"
        )
    assert orjson.loads(found["result"]) == {"out": 1}
    [event] = await read(settings.kafka, f"{settings.prefix}events")
    assert (event["id"], event["event"], event["result"]) == (
        f"{fence.id}-0-0-succeeded",
        "task.succeeded",
        {"out": 1},
    )
    assert event["task"]["labels"] == {"k": "v"}
    records = await read(settings.kafka, f"{settings.prefix}callbacks")
    assert {c["target"]: orjson.loads(c["body"]) for c in records} == {
        "http://127.0.0.1:9/a": event,
        "http://127.0.0.1:9/b": event,
    }
    assert {c["target"] for c in found["callbacks_owed"]} == {"http://127.0.0.1:9/a", "http://127.0.0.1:9/b"}


async def test_every_transition_is_published_on_request(settings, pool):
    """C1: with events=all each transition has an event; by default only the last has one."""
    [all_events] = await submit_and_release(pool, settings, events="all")
    [final_events] = await submit_and_release(pool, settings)
    async with running_service(create_app(settings)):
        await send_results(settings, result(all_events), result(final_events))
        await in_state(pool, all_events, "ready")
        await wait_until(lambda: read(settings.kafka, f"{settings.prefix}events"))
    [event] = await read(settings.kafka, f"{settings.prefix}events")
    assert (event["event"], event["task"]["id"], event["task"]["stage"]) == (
        "task.advanced",
        all_events.id,
        "two",
    )


async def test_a_failure_is_retried_by_policy_and_then_fails_the_task(settings, pool):
    """A failed attempt is retried after the backoff; the errors keep their tracebacks."""
    [fence] = await submit_and_release(pool, settings)
    error = Failure(kind="ValueError", message="no luck", traceback="Traceback (most recent call last): …")
    async with running_service(create_app(settings)):
        before = datetime.now(UTC)
        await send_results(settings, result(fence, Outcome.FAIL, error=error))
        found = await in_state(pool, fence, "scheduled")
        assert (found["attempt"], found["failures"]) == (1, 1)
        assert 50 < (found["due_at"] - before).total_seconds() < 70
        await pool.execute("UPDATE task SET state = 'queued' WHERE id = $1", fence.id)
        await send_results(settings, result(fence._replace(attempt=1), Outcome.FAIL, error=error))
        found = await in_state(pool, fence, "failed")
    assert orjson.loads(found["error"]) == error.to_wire()
    assert [(a["attempt"], a["outcome"]) for a in found["attempts"]] == [(0, "fail"), (1, "fail")]
    assert orjson.loads(found["attempts"][0]["error"])["traceback"].startswith("Traceback")


@pytest.mark.parametrize("no_handler", [False, True])
async def test_an_attempt_that_is_handed_back_keeps_what_its_stage_has_lost(settings, pool, no_handler):
    """W1, W8: handing an attempt back, as a worker does that stops, is full, or has no handler for
    the stage, counts for nothing. The stage keeps its failures and its losses, so that a suspect
    stays one. It starts again at once; for a missing handler, after a moment."""
    [fence] = await submit_and_release(pool, settings)
    await pool.execute("UPDATE task SET failures = 2, losses = 1 WHERE id = $1", fence.id)
    async with running_service(create_app(settings)):
        await send_results(settings, handed_back(fence, "the worker is stopping", no_handler=no_handler))
        found = await in_state(pool, fence, "scheduled")
    assert (found["attempt"], found["failures"], found["losses"]) == (1, 2, 1)
    delay_s = (found["due_at"] - found["updated_at"]).total_seconds() if found["due_at"] else 0
    assert delay_s == (0.25 if no_handler else 0), "without a back-off"
    assert [a["outcome"] for a in found["attempts"]] == ["handed_back"]


async def test_a_stage_that_no_worker_handles_fails_its_task_after_the_bound_of_its_type(settings, pool):
    """O6: the delays of attempts that were handed back add up. The task fails with the reason once
    they reach `no_handler_s`. An attempt that a worker has run begins again at 0."""
    lost, run = await submit_and_release(pool, settings, 2)
    await pool.execute("UPDATE task_type SET no_handler_s = 30")
    missing = "this worker has no handler for stage 'nosuch' of t"
    counted = []
    async with running_service(create_app(settings)):
        for attempt in range(3):
            fences = [fence._replace(attempt=attempt) for fence in (lost, run)]
            unhandled, other = (
                handed_back(fence, missing, no_handler=True, delay_ms=20_000) for fence in fences
            )
            if attempt == 1:
                asked = Failure(kind="RetryAfter", message="not yet")
                other = result(fences[1], Outcome.RETRY, error=asked, delay_ms=20_000)
            await pool.execute("UPDATE task SET state = 'queued' WHERE state = 'scheduled'")
            await send_results(settings, unhandled, other)
            state = "failed" if attempt == 2 else "scheduled"
            error = orjson.loads((await in_state(pool, fences[0], state))["error"])
            counted.append((error["unhandled_s"], error["message"].startswith("no worker with a handler")))
            found = await in_state(pool, fences[1], "scheduled")
    assert counted == [(20, False), (40, False), (40, True)]
    assert "'nosuch' of t" in error["message"]
    assert orjson.loads(found["error"])["unhandled_s"] == 20


async def test_a_retry_that_the_handler_asks_for_clears_what_its_stage_has_lost(settings, pool):
    """W8: a handler that returns `RetryAfter` has lived to its end, so its process has survived. A
    handler that polls for weeks is no suspect for the hosts that were lost beneath it."""
    [fence] = await submit_and_release(pool, settings)
    await pool.execute("UPDATE task SET failures = 2, losses = 2 WHERE id = $1", fence.id)
    asked = Failure(kind="RetryAfter", message="the job is still running")
    async with running_service(create_app(settings)):
        await send_results(settings, result(fence, Outcome.RETRY, error=asked))
        found = await in_state(pool, fence, "scheduled")
    assert (found["attempt"], found["failures"], found["losses"]) == (1, 0, 0)


async def test_a_stage_limit_and_a_permanent_failure_prevent_retries(settings, pool):
    """W1: the stage's max_attempts overrides the type's; a permanent failure is not retried."""
    strict, final = await submit_and_release(pool, settings, 2)
    error = Failure(kind="E", message="m")
    async with running_service(create_app(settings)):
        await send_results(
            settings,
            result(strict, Outcome.FAIL, error=error, max_attempts=1),
            result(final, Outcome.FAIL, error=error, permanent=True),
        )
        await in_state(pool, strict, "failed")
        await in_state(pool, final, "failed")


async def test_a_malformed_result_is_rejected_and_other_results_are_committed(settings, pool):
    """A malformed result goes to the rejected topic with a precise error, and its attempt fails.

    It blocks no other result, in the same record or behind it.
    """
    good, other, malformed = await submit_and_release(pool, settings, 3)
    topic = f"{settings.prefix}stage-results"
    async with running_service(create_app(settings)):
        bad = {**result(malformed).to_wire(), "outcome": "maybe"}
        await write(
            settings.kafka,
            topic,
            {"worker": "w", "results": [bad, result(good, Outcome.DONE).to_wire()]},
            b"{",
            key=b"w",
        )
        await send_results(settings, result(other, Outcome.DONE))
        await in_state(pool, good, "succeeded")
        await in_state(pool, other, "succeeded")
        found = await in_state(pool, malformed, "scheduled")
    assert orjson.loads(found["error"])["kind"] == "InvalidResult"
    rejected = await read(settings.kafka, f"{topic}.rejected")
    assert [r["pointer"] for r in rejected] == ["/results/0/outcome", ""]


async def test_a_result_for_another_stage_fails_its_attempt(settings, pool):
    """W4: a result for the wrong stage ends its attempt, unless the record has a right result."""
    wrong, both = await submit_and_release(pool, settings, 2)
    async with running_service(create_app(settings)):
        await send_results(
            settings,
            result(wrong._replace(stage="elsewhere"), Outcome.DONE),
            result(both._replace(stage="elsewhere"), Outcome.DONE),
            result(both, Outcome.DONE),
        )
        found = await in_state(pool, wrong, "scheduled")
        await in_state(pool, both, "succeeded")
    error = orjson.loads(found["error"])
    assert error == {
        "kind": "WrongStage",
        "message": "the result names stage 'elsewhere'; this attempt runs 'start'",
    }
    assert (found["attempt"], found["failures"]) == (1, 1)


async def expire(pool, fence, max_attempts=9, max_losses=9, worker=None):
    """Ends the attempt as the heartbeat processor does when a lease expires."""
    policy = RetryPolicy(max_attempts=max_attempts, base_s=60)
    conclusion = conclude(fence, Outcome.EXPIRED, policy=policy, max_losses=max_losses, chance=0)
    ending = Ending(fence=fence, outcome=Outcome.EXPIRED, conclusion=conclusion, worker=worker)
    done = await advance.advance(pool, [ending])
    assert done.applied == {fence}
    assert done.outbox.revocation.tasks == [fence.attempt_id]


async def test_a_late_result_counts_while_the_stage_is_unfinished(settings, pool):
    """H10: a late result counts while the next attempt waits or runs; that attempt is revoked."""
    waiting, running, twice = await submit_and_release(pool, settings, 3)
    for fence in (waiting, running, twice):
        await expire(pool, fence)
    await pool.execute("UPDATE task SET state = 'running', due_at = NULL WHERE id = $1", running.id)
    async with running_service(create_app(settings)):
        await send_results(settings, *[result(fence, Outcome.DONE) for fence in (waiting, running)])
        for fence in (waiting, running):
            found = await in_state(pool, fence, "succeeded")
            assert [a["outcome"] for a in found["attempts"]] == ["expired", "done"]
        # The stage is unfinished, so the first result counts; the next attempt's result is stale.
        await send_results(settings, result(twice), worker="first")
        await in_state(pool, twice, "ready")
        await send_results(settings, result(twice._replace(attempt=1), Outcome.DONE), worker="second")
        first_revoked = await wait_until(lambda: read(settings.kafka, f"{settings.prefix}revoked"))
    assert (await task(pool, twice))["stage"] == "two"
    revoked = [
        attempt_id
        for record in await read(settings.kafka, f"{settings.prefix}revoked")
        for attempt_id in record["tasks"]
    ]
    assert first_revoked[0]["why"] == "superseded"
    assert sorted(revoked) == sorted([fence.id, 0, 1] for fence in (waiting, running, twice))


@pytest.mark.parametrize(
    ("limits", "state"), [({"max_attempts": 1}, "failed"), ({"max_losses": 1}, "quarantined")]
)
async def test_a_late_result_of_the_last_attempt_counts(settings, pool, limits, state):
    """H10: the expiry of the last attempt does not finish its stage. A late result continues or
    ends the task, although it has an event of its expiry; a second one is stale."""
    done, continued, refused, recovered = await submit_and_release(pool, settings, 4)
    for fence in (done, continued, refused, recovered):
        await expire(pool, fence, **limits)
        assert (await task(pool, fence))["state"] == state
    await pool.execute("UPDATE task SET state = 'ready', attempt = 1 WHERE id = $1", recovered.id)
    async with running_service(create_app(settings)):
        # The handler's failure is no success, so the expiry stands.
        await send_results(settings, result(refused, Outcome.FAIL, error=Failure(kind="E", message="m")))
        await send_results(settings, *[result(fence, Outcome.DONE) for fence in (done, recovered)])
        await send_results(settings, result(continued), result(done, Outcome.DONE))
        found = await in_state(pool, continued, "ready")
        assert (found["stage"], found["step"], found["attempt"]) == ("two", 1, 0)
        assert found["finished_at"] is None
        for fence in (done, recovered):
            ended = await in_state(pool, fence, "succeeded")
            assert [a["outcome"] for a in ended["attempts"]] == ["expired", "done"]
        events = await wait_until(lambda: events_of(settings, done.id, 2))
    # The sweeper has published the event of the expiry, too.
    assert {event["event"] for event in events} == {f"task.{state}", "task.succeeded"}
    assert (await task(pool, refused))["state"] == state


async def events_of(settings, task_id, count):
    found = await read(settings.kafka, f"{settings.prefix}events")
    events = [event for event in found if event["task"]["id"] == task_id]
    return events if len(events) == count else None


async def test_a_stage_that_its_handler_failed_is_finished(settings, pool):
    """H10: a late result does not undo the failure of a later attempt."""
    failed, other = await submit_and_release(pool, settings, 2)
    await expire(pool, failed)
    await pool.execute("UPDATE task SET state = 'running', due_at = NULL WHERE id = $1", failed.id)
    error = Failure(kind="E", message="m")
    async with running_service(create_app(settings)):
        later = failed._replace(attempt=1)
        await send_results(settings, result(later, Outcome.FAIL, permanent=True, error=error))
        await in_state(pool, failed, "failed")
        await send_results(settings, result(failed, Outcome.DONE))
        await send_results(settings, result(other, Outcome.DONE))
        await in_state(pool, other, "succeeded")
    assert (await task(pool, failed))["state"] == "failed"


async def test_a_type_may_refuse_late_results(settings, pool):
    """H10: each type has its policy; a repeated result of an unexpired attempt is stale."""
    refused, retried = await submit_and_release(pool, settings, 2)
    await expire(pool, refused)
    async with running_service(create_app(settings)):
        await send_results(settings, result(retried, Outcome.RETRY, delay_ms=60_000))
        await in_state(pool, retried, "scheduled")
        await send_results(settings, result(retried, Outcome.DONE))
        await pool.execute("UPDATE task_type SET late_results = 'refuse'")
        await send_results(settings, result(refused, Outcome.DONE))
        [last] = await submit_and_release(pool, settings)
        await send_results(settings, result(last, Outcome.DONE))
        await in_state(pool, last, "succeeded")
    assert [(await task(pool, fence))["state"] for fence in (refused, retried)] == ["scheduled", "scheduled"]


async def test_a_cancelled_task_stays_cancelled(settings, pool):
    """F5: a result that arrives after the cancellation changes nothing."""
    cancelled, other = await submit_and_release(pool, settings, 2)
    await advance.cancel(pool, [cancelled.id])
    async with running_service(create_app(settings)):
        await send_results(settings, result(cancelled, Outcome.DONE), result(other, Outcome.DONE))
        await in_state(pool, other, "succeeded")
    assert (await task(pool, cancelled))["state"] == "cancelled"


async def test_the_sweeper_publishes_the_outbox_of_a_crashed_process(settings, pool):
    """O1, C1: a process that dies after its commit leaves its outbox to the sweeper."""
    [fence] = await submit_and_release(pool, settings)
    ending = Ending(
        fence=fence,
        outcome=Outcome.DONE,
        conclusion=conclude(fence, Outcome.DONE),
        worker="w",
        context=Context.encode(1),
    )
    done = await advance.advance(pool, [ending])
    assert done.outbox.outbox_id is not None  # the test does not publish it
    async with running_service(create_app(settings)):
        await wait_until(
            lambda: pool.fetchval("SELECT count(*) = 0 FROM outbox"),
            what="the sweeper has emptied the outbox",
        )
    [event] = await read(settings.kafka, f"{settings.prefix}events")
    assert event["id"] == f"{fence.id}-0-0-succeeded"


async def test_the_sweeper_revokes_what_a_crashed_process_cancelled(settings, pool):
    """H3: the gateway dies between the commit of cancellations and their publication, or Kafka is
    away until it dies. The sweeper reads the cancelled attempts from the outbox, and revokes
    them."""
    first, second, done = await submit_and_release(pool, settings, 3)
    await pool.execute("UPDATE task SET attempt = 3 WHERE id = $1", second.id)
    conclusion = conclude(done, Outcome.DONE)
    context = Context.encode("task.cancelled")
    ending = Ending(fence=done, outcome=Outcome.DONE, conclusion=conclusion, worker="w", context=context)
    await advance.advance(pool, [ending])
    cancelled, entry = await advance.cancel(pool, [first.id, second.id])
    assert cancelled == [first.id, second.id]
    assert entry.outbox_id is not None  # the test does not publish it
    async with running_service(create_app(settings)):
        await wait_until(
            lambda: pool.fetchval("SELECT count(*) = 0 FROM outbox"),
            what="the sweeper has emptied the outbox",
        )
    [revoked] = await read(settings.kafka, f"{settings.prefix}revoked")
    assert revoked == {"why": "cancelled", "tasks": [[first.id, 0, 0], [second.id, 0, 3]]}


async def test_results_are_committed_after_a_database_outage(settings, pool):
    """The processor retries a batch until PostgreSQL is available again, and then commits it."""
    [fence] = await submit_and_release(pool, settings)
    async with running_service(create_app(dataclasses.replace(settings, stall_timeout_s=60))):
        lock = await pool.acquire()
        try:
            transaction = lock.transaction()
            await transaction.start()
            await lock.execute("LOCK TABLE task IN ACCESS EXCLUSIVE MODE")
            await send_results(settings, result(fence, Outcome.DONE))
            waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'penstock stages'"
            waiting += " AND datname = current_database()"
            pid = await wait_until(lambda: pool.fetchval(waiting), what="the commit waits")
            # The connection is cut during the commit.
            await lock.execute("SELECT pg_terminate_backend($1)", pid)
            await wait_until(lambda: pool.fetchval(waiting), what="the same batch is tried again")
            await transaction.rollback()
        finally:
            await pool.release(lock)
        await in_state(pool, fence, "succeeded")


async def test_a_locked_task_delays_no_other_result(settings, pool):
    """S12: while another transaction locks a task, the results of other tasks are committed, also
    those of the same record. Its own result is committed when the lock ends."""
    locked, same_record, other = await submit_and_release(pool, settings, 3)
    async with running_service(create_app(settings)):
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", locked.id)
            await send_results(settings, result(locked, Outcome.DONE), result(same_record, Outcome.DONE))
            await send_results(settings, result(other, Outcome.DONE))
            await in_state(pool, same_record, "succeeded")
            await in_state(pool, other, "succeeded")
            assert (await task(pool, locked))["state"] == "queued"
        await in_state(pool, locked, "succeeded")


async def test_two_processors_commit_a_stage_once(settings, pool):
    """W4, O3: when two replicas process the same results at the same time, one takes effect."""
    fences = await submit_and_release(pool, settings, 200)
    endings = [
        Ending(fence=f, outcome=Outcome.DONE, conclusion=conclude(f, Outcome.DONE), worker="w")
        for f in fences
    ]
    first, second = await asyncio.gather(advance.advance(pool, endings), advance.advance(pool, endings))
    assert first.applied.isdisjoint(second.applied)
    assert len(first.applied) + len(second.applied) == 200
    assert len(first.outbox.events) + len(second.outbox.events) == 200
