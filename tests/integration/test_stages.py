"""The stage processor on the real Kafka and PostgreSQL: every stage takes effect once, and what that owes is paid."""

import asyncio
import dataclasses
from datetime import UTC, datetime

import orjson
import pytest
from tests.running import make_topics, read, running_service, write
from tests.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.result import Failure, StageResult, encode_results
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.retry import RetryPolicy
from penstock.postgres import advance, release, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session
from penstock.stages.app import create_app
from penstock.stages.settings import StagesSettings


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    return StagesSettings(
        kafka=kafka_servers, prefix=prefix, postgres=database, sweep_age_s=1.0, sweep_every_s=0.3
    )


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(
            pool, types.TaskType(name="t", partitions=1, max_attempts=2, retry_base_ms=60_000, retry_jitter=0)
        )
        yield pool


async def queued(pool, settings, count=1, **fields):
    """Tasks that a worker has in hand, as their fences."""
    wanted = [Submission(type="t", context=Context.encode({"n": 0}), **fields) for _ in range(count)]
    await tasks.submit(pool, wanted)
    async with open_session(settings.postgres, "test") as session:
        batch = await release.release(session, types.TaskType(name="t"), count, [])
        assert batch is not None
        return [task.fence for task in batch.tasks]


async def report(settings, *results, worker="w"):
    await write(settings.kafka, f"{settings.prefix}stage-results", encode_results(worker, results), key=b"w")


async def task(pool, fence):
    return await tasks.get(pool, fence.id)


async def in_state(pool, fence, state):
    async def there():
        found = await task(pool, fence)
        return found if found["state"] == state else None

    return await wait_until(there, what=f"task {fence.id} is {state}")


def result(fence, outcome=Outcome.NEXT, **fields):
    if outcome is Outcome.NEXT:
        fields = {"next_stage": "two", "context": Context.encode({"n": 1}), **fields}
    return StageResult(
        fence=fence, outcome=outcome, started_ms=1_795_250_000_000, finished_ms=1_795_250_000_500, **fields
    )


async def test_a_result_takes_effect_once_however_often_it_comes(settings, pool):
    """W4: delivered twice in a record, twice in the topic and again after more was done, it counts once."""
    [fence] = await queued(pool, settings)
    async with running_service(create_app(settings)):
        await report(settings, result(fence), result(fence))
        await report(settings, result(fence, context=Context.encode({"n": 99})))
        found = await in_state(pool, fence, "ready")
        assert (found["stage"], found["step"], found["attempt"]) == ("two", 1, 0)
        # A marker behind them: when it is committed, so is all before.
        [marker] = await queued(pool, settings)
        assert marker.id != fence.id or marker.step == 1
        await report(settings, result(fence, Outcome.DONE))
        await report(settings, result(marker, Outcome.DONE, context=Context.encode("end")))
        await in_state(pool, marker, "succeeded")
    attempts = await pool.fetch(
        "SELECT step, attempt, outcome FROM attempt WHERE task_id = $1 ORDER BY step", fence.id
    )
    assert tuple(attempts[0]) == (0, 0, "next")
    assert len({(row["step"], row["attempt"]) for row in attempts}) == len(attempts)
    assert orjson.loads((await task(pool, fence))["context"]) == {"n": 1}


async def test_a_stage_visited_twice_is_not_the_same_attempt_twice(settings, pool):
    """W4: a late result of the first visit does not end the second (the step is part of the fence)."""
    [fence] = await queued(pool, settings)
    async with running_service(create_app(settings)):
        await report(settings, result(fence, next_stage=fence.stage))
        await in_state(pool, fence, "ready")
        [again] = await queued_again(pool, settings)
        assert (again.stage, again.attempt, again.step) == (fence.stage, fence.attempt, 1)
        await report(settings, result(fence, Outcome.DONE), result(again, next_stage="three"))
        found = await in_state(pool, fence, "ready")
    assert (found["stage"], found["step"]) == ("three", 2)


async def queued_again(pool, settings):
    async with open_session(settings.postgres, "test") as session:
        batch = await release.release(session, types.TaskType(name="t"), 10, [])
        return [ready.fence for ready in batch.tasks] if batch else []


async def test_done_keeps_the_result_and_tells_of_it_once(settings, pool):
    """C1: the final transition is on the events topic and owes its callbacks, in one transaction with it."""
    [fence] = await queued(
        pool, settings, callbacks=("http://127.0.0.1:9/a", "http://127.0.0.1:9/b"), labels={"k": "v"}
    )
    async with running_service(create_app(settings)):
        await report(settings, result(fence, Outcome.DONE, context=Context.encode({"out": 1})))
        found = await in_state(pool, fence, "succeeded")
        await wait_until(
            lambda: pool.fetchval("SELECT count(*) = 0 FROM outbox"), what="the debt is struck out"
        )
    assert orjson.loads(found["result"]) == {"out": 1}
    [event] = await read(settings.kafka, f"{settings.prefix}events")
    assert (event["id"], event["event"], event["result"]) == (
        f"{fence.id}-0-0-succeeded",
        "task.succeeded",
        {"out": 1},
    )
    assert event["task"]["labels"] == {"k": "v"}
    owed = await read(settings.kafka, f"{settings.prefix}callbacks")
    assert {c["target"]: orjson.loads(c["body"]) for c in owed} == {
        "http://127.0.0.1:9/a": event,
        "http://127.0.0.1:9/b": event,
    }
    assert {c["target"] for c in found["callbacks_owed"]} == {"http://127.0.0.1:9/a", "http://127.0.0.1:9/b"}


async def test_every_transition_is_told_on_request(settings, pool):
    """C1: with events=all each stage is an event; without, only the last."""
    [loud] = await queued(pool, settings, events="all")
    [quiet] = await queued(pool, settings)
    async with running_service(create_app(settings)):
        await report(settings, result(loud), result(quiet))
        await in_state(pool, loud, "ready")
        await wait_until(lambda: read(settings.kafka, f"{settings.prefix}events"))
    [event] = await read(settings.kafka, f"{settings.prefix}events")
    assert (event["event"], event["task"]["id"], event["task"]["stage"]) == ("task.advanced", loud.id, "two")


async def test_a_failure_is_retried_by_policy_then_failed_with_its_traceback(settings, pool):
    """A handler that raises: attempt + 1 after back-off, then failed, its traceback readable."""
    [fence] = await queued(pool, settings)
    error = Failure(kind="ValueError", message="no luck", traceback="Traceback (most recent call last): …")
    async with running_service(create_app(settings)):
        before = datetime.now(UTC)
        await report(settings, result(fence, Outcome.FAIL, error=error))
        found = await in_state(pool, fence, "scheduled")
        assert (found["attempt"], found["failures"]) == (1, 1)
        assert 50 < (found["due_at"] - before).total_seconds() < 70
        await pool.execute("UPDATE task SET state = 'queued' WHERE id = $1", fence.id)
        await report(settings, result(fence._replace(attempt=1), Outcome.FAIL, error=error))
        found = await in_state(pool, fence, "failed")
    assert orjson.loads(found["error"]) == error.to_wire()
    assert [(a["attempt"], a["outcome"]) for a in found["attempts"]] == [(0, "fail"), (1, "fail")]
    assert orjson.loads(found["attempts"][0]["error"])["traceback"].startswith("Traceback")


async def test_a_stage_may_be_stricter_than_its_type_and_a_failure_final(settings, pool):
    """W1: max_attempts of the stage wins over the type's; a permanent failure is not tried again."""
    strict, final = await queued(pool, settings, 2)
    error = Failure(kind="E", message="m")
    async with running_service(create_app(settings)):
        await report(
            settings,
            result(strict, Outcome.FAIL, error=error, max_attempts=1),
            result(final, Outcome.FAIL, error=error, permanent=True),
        )
        await in_state(pool, strict, "failed")
        await in_state(pool, final, "failed")


async def test_a_malformed_entry_is_parked_and_its_neighbours_are_committed(settings, pool):
    """Bad input gets a precise error and never blocks what is behind it; its own attempt fails with it."""
    good, other, spoilt = await queued(pool, settings, 3)
    topic = f"{settings.prefix}stage-results"
    async with running_service(create_app(settings)):
        bad = {**result(spoilt).to_wire(), "outcome": "maybe"}
        await write(
            settings.kafka,
            topic,
            {"worker": "w", "results": [bad, result(good, Outcome.DONE).to_wire()]},
            b"{",
            key=b"w",
        )
        await report(settings, result(other, Outcome.DONE))
        await in_state(pool, good, "succeeded")
        await in_state(pool, other, "succeeded")
        found = await in_state(pool, spoilt, "scheduled")
    assert orjson.loads(found["error"])["kind"] == "InvalidResult"
    rejected = await read(settings.kafka, f"{topic}.rejected")
    assert [r["pointer"] for r in rejected] == ["/results/0/outcome", ""]


async def test_a_result_for_another_stage_fails_its_attempt(settings, pool):
    """W4: its worker has done with the attempt, so it must end; a right result beside it is what counts."""
    wrong, both = await queued(pool, settings, 2)
    async with running_service(create_app(settings)):
        await report(
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
        "message": "the result speaks of stage 'elsewhere'; this attempt runs 'start'",
    }
    assert (found["attempt"], found["failures"]) == (1, 1)


async def expire(pool, fence, worker="lost"):
    """What the heartbeat processor does when a lease runs out."""
    verdict = conclude(fence, Outcome.EXPIRED, policy=RetryPolicy(max_attempts=9, base_s=60), chance=0)
    ending = advance.Ending(fence=fence, outcome=Outcome.EXPIRED, verdict=verdict, worker=None)
    done = await advance.advance(pool, [ending])
    assert done.applied == {fence}
    assert done.owed.revocation.tasks == [(fence.id, fence.step, fence.attempt)]


async def test_a_late_result_counts_while_nobody_has_finished_the_stage(settings, pool):
    """H10: accepted, not thrown away, whether the next attempt waits or runs; that attempt is taken back."""
    waiting, running, twice = await queued(pool, settings, 3)
    for fence in (waiting, running, twice):
        await expire(pool, fence)
    await pool.execute("UPDATE task SET state = 'running', due_at = NULL WHERE id = $1", running.id)
    async with running_service(create_app(settings)):
        await report(settings, *[result(fence, Outcome.DONE) for fence in (waiting, running)])
        for fence in (waiting, running):
            found = await in_state(pool, fence, "succeeded")
            assert [a["outcome"] for a in found["attempts"]] == ["expired", "done"]
        # Nobody finished it, so the first result counts; the attempt that took its place has come too late.
        await report(settings, result(twice), worker="first")
        await in_state(pool, twice, "ready")
        await report(settings, result(twice._replace(attempt=1), Outcome.DONE), worker="second")
        marker = await wait_until(lambda: read(settings.kafka, f"{settings.prefix}revoked"))
    assert (await task(pool, twice))["stage"] == "two"
    revoked = [
        key for record in await read(settings.kafka, f"{settings.prefix}revoked") for key in record["tasks"]
    ]
    assert marker[0]["why"] == "superseded"
    assert sorted(revoked) == sorted([fence.id, 0, 1] for fence in (waiting, running, twice))


async def test_a_type_may_refuse_late_results(settings, pool):
    """H10: policy per type. A repeated result of an attempt that did not expire is not late, but over."""
    refused, retried = await queued(pool, settings, 2)
    await expire(pool, refused)
    async with running_service(create_app(settings)):
        await report(settings, result(retried, Outcome.RETRY, delay_ms=60_000))
        await in_state(pool, retried, "scheduled")
        await report(settings, result(retried, Outcome.DONE))
        await pool.execute("UPDATE task_type SET late_results = 'refuse'")
        await report(settings, result(refused, Outcome.DONE))
        [last] = await queued(pool, settings)
        await report(settings, result(last, Outcome.DONE))
        await in_state(pool, last, "succeeded")
    assert [(await task(pool, fence))["state"] for fence in (refused, retried)] == ["scheduled", "scheduled"]


async def test_a_cancelled_task_stays_cancelled(settings, pool):
    """F5: a result that comes after the cancellation changes nothing."""
    cancelled, other = await queued(pool, settings, 2)
    await advance.cancel(pool, [cancelled.id])
    async with running_service(create_app(settings)):
        await report(settings, result(cancelled, Outcome.DONE), result(other, Outcome.DONE))
        await in_state(pool, other, "succeeded")
    assert (await task(pool, cancelled))["state"] == "cancelled"


async def test_what_a_crash_left_unpublished_is_swept(settings, pool):
    """O1, C1: the outbox of a process that died between commit and publication is published by another."""
    [fence] = await queued(pool, settings)
    ending = advance.Ending(
        fence=fence,
        outcome=Outcome.DONE,
        verdict=conclude(fence, Outcome.DONE),
        worker="w",
        context=Context.encode(1),
    )
    done = await advance.advance(pool, [ending])
    assert done.owed.outbox_id is not None  # and nobody publishes it
    async with running_service(create_app(settings)):
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 0 FROM outbox"), what="swept")
    [event] = await read(settings.kafka, f"{settings.prefix}events")
    assert event["id"] == f"{fence.id}-0-0-succeeded"


async def test_nothing_is_acknowledged_while_the_database_is_away(settings, pool):
    """In doubt it redelivers: with its tables out of reach it commits no offset, and goes on by itself afterwards."""
    [fence] = await queued(pool, settings)
    async with running_service(create_app(dataclasses.replace(settings, stall_timeout_s=60))):
        lock = await pool.acquire()
        try:
            transaction = lock.transaction()
            await transaction.start()
            await lock.execute("LOCK TABLE task IN ACCESS EXCLUSIVE MODE")
            await report(settings, result(fence, Outcome.DONE))
            waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'penstock stages'"
            pid = await wait_until(lambda: pool.fetchval(waiting), what="the commit waits")
            # The connection dies in the middle of the commit.
            await lock.execute("SELECT pg_terminate_backend($1)", pid)
            await wait_until(lambda: pool.fetchval(waiting), what="the same batch is tried again")
            await transaction.rollback()
        finally:
            await pool.release(lock)
        await in_state(pool, fence, "succeeded")


def test_fences_are_compared_whole():
    """Two attempts differ when any part of the fence does."""
    base = Fence(1, 0, "a", 0)
    assert (
        len({base, Fence(2, 0, "a", 0), Fence(1, 1, "a", 0), Fence(1, 0, "b", 0), Fence(1, 0, "a", 1)}) == 5
    )


async def test_two_processors_at_once_commit_a_stage_once(settings, pool):
    """W4, O3: replicas that are given the same results at the same time: one takes effect."""
    fences = await queued(pool, settings, 200)
    endings = [
        advance.Ending(fence=f, outcome=Outcome.DONE, verdict=conclude(f, Outcome.DONE), worker="w")
        for f in fences
    ]
    first, second = await asyncio.gather(advance.advance(pool, endings), advance.advance(pool, endings))
    assert first.applied.isdisjoint(second.applied)
    assert len(first.applied) + len(second.applied) == 200
    assert len(first.owed.events) + len(second.owed.events) == 200
