"""A worker goes on with tasks before their results are committed, on the real Kafka and
PostgreSQL."""

from __future__ import annotations

import pytest
from tests.integration.stages.test_stages import expire, in_state, result, settings, submit_and_release, task
from tests.support.services import producing, read, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.going_on import headers_of_going_on
from penstock.contracts.result import encode_results
from penstock.core.attempt import CHOSEN
from penstock.core.completion import Outcome
from penstock.core.leases import Lease
from penstock.kafka.processing.outbox import partition_of
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import HEARTBEATS
from penstock.postgres import leases, release, types
from penstock.postgres.session import open_session
from penstock.stages import handlers
from penstock.stages.app import create_app

__all__ = ["settings"]

TASK_TYPES = (types.TaskType(name="t", partitions=1),)


def next_of(fence, stage, **fields):
    """The result of an attempt with whose task the worker goes on, and the attempt that follows."""
    found = result(fence, next_stage=stage, **fields)
    found.goes_on = CHOSEN + fence.step
    return found, fence._replace(step=fence.step + 1, stage=stage, attempt=found.goes_on)


async def send(settings, *results, worker="w"):
    """Writes a record of results, as a worker does."""
    async with producing(settings.kafka) as producer:
        await producer.send_and_wait(
            f"{settings.prefix}stage-results",
            encode_results(worker, results),
            key=worker.encode(),
            headers=headers_of_going_on(results),
        )


async def events_of(settings, last):
    """The events with the stage and the state of their tasks, once the last one is there."""
    records = await read(settings.kafka, f"{settings.prefix}events")
    found = [(each["event"], each["task"]["stage"], each["task"]["state"]) for each in records]
    return found if found and found[-1][0] == last else None


@pytest.mark.parametrize("events", ["final", "all"])
@pytest.mark.parametrize("records", [1, 3])
async def test_a_chain_of_stages_is_committed(settings, pool, records, events):
    """W4: the stages of one worker, in one record or in one each. Each has its history with the
    context that it began with, and its events; the result is that of the last."""
    [fence] = await submit_and_release(pool, settings)
    await pool.execute("UPDATE task SET events = $2 WHERE id = $1", fence.id, events)
    first, second = next_of(fence, "two", context=None)
    then, third = next_of(second, "three", context=Context.encode({"n": 2}))
    more, fourth = next_of(third, "four", context=None)
    chain = [first, then, more, result(fourth, Outcome.DONE, context=Context.encode("end"))]
    async with running_service(create_app(settings)):
        size = len(chain) if records == 1 else 1
        for begin in range(0, len(chain), size):
            await send(settings, *chain[begin : begin + size])
            if records > 1:
                await wait_until(lambda n=begin + 1: pool.fetchval("SELECT count(*) = $1 FROM attempt", n))
        found = await wait_until(lambda: events_of(settings, "task.succeeded"), what="the task has ended")
        task_row = await pool.fetchrow("SELECT * FROM task WHERE id = $1", fence.id)
    rows = await pool.fetch(
        "SELECT step, stage, outcome, worker, input_type, convert_from(input, 'UTF8') AS input, queued_at <= now(),"
        " started_at <= finished_at FROM attempt WHERE task_id = $1 ORDER BY step",
        fence.id,
    )
    assert [tuple(row) for row in rows] == [
        (0, "start", "next", "w", "same", None, True, True),
        (1, "two", "next", "w", "json", '{"n":0}', True, True),
        (2, "three", "next", "w", "same", None, True, True),
        (3, "four", "done", "w", None, None, True, True),
    ]
    assert (task_row["context"], task_row["result"]) == (b'{"n":2}', b'"end"')
    between = [("two", "running"), ("three", "running"), ("four", "running")] if events == "all" else []
    assert found == [("task.advanced", *each) for each in between] + [("task.succeeded", "four", "succeeded")]


async def test_the_task_runs_on_with_its_worker(settings, pool):
    """H6: between the stages the task runs at its worker, and task-sync is not notified."""
    [fence] = await submit_and_release(pool, settings)
    heard = []

    def hear(*_):
        heard.append(1)

    async with pool.acquire() as listener, running_service(create_app(settings)):
        await listener.add_listener("penstock_ready", hear)
        first, _second = next_of(fence, "two")
        await send(settings, first)
        await in_state(pool, fence, "running")
        row = await pool.fetchrow(
            "SELECT worker, stage, step, attempt, lease_partition FROM task WHERE id = $1", fence.id
        )
        assert tuple(row) == ("w", "two", 1, CHOSEN, partition_of(b"w", partitions_of(settings, HEARTBEATS)))
        await listener.remove_listener("penstock_ready", hear)
    assert not heard


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ("pausing = true", "paused"),
        ("tracked = true", "ready"),
        ("state = 'cancelled', finished_at = now()", "cancelled"),
    ],
)
async def test_a_task_that_must_stop_stops(settings, pool, change, state):
    """S8, S13: a task that is to be paused is paused, one of a type with limits becomes ready, and
    one that has ended stays so. What the worker reports of it afterwards has no effect."""
    [fence] = await submit_and_release(pool, settings)
    await pool.execute(f"UPDATE task SET {change} WHERE id = $1", fence.id)
    first, second = next_of(fence, "two")
    [marker] = await submit_and_release(pool, settings)
    async with running_service(create_app(settings)):
        await send(settings, first)
        await in_state(pool, fence, state)
        await send(settings, result(second, Outcome.DONE), result(marker, Outcome.DONE))
        await in_state(pool, marker, "succeeded")
        assert (await task(pool, fence))["state"] == state


async def test_an_attempt_was_queued_when_it_began(settings, pool):
    """O5: the worker begins an attempt before the commit that queues it, and the rest of its chain
    is committed later. No stage was queued after it began."""
    [fence] = await submit_and_release(pool, settings)
    first, second = next_of(fence, "two")
    then, third = next_of(second, "three")
    async with running_service(create_app(settings)):
        await send(settings, first)
        await in_state(pool, fence, "running")
        await send(settings, then, result(third, Outcome.DONE))
        await in_state(pool, fence, "succeeded")
    late = "SELECT step FROM attempt WHERE task_id = $1 AND step > 0 AND queued_at > started_at"
    assert await pool.fetch(late, fence.id) == []


async def test_a_result_waits_for_the_one_before(settings, pool):
    """W4: the record with the earlier result is delivered after that with the later one, as after a
    crash of the stage processor."""
    [fence] = await submit_and_release(pool, settings)
    first, second = next_of(fence, "two")
    async with running_service(create_app(settings)):
        await send(settings, result(second, Outcome.DONE))
        await send(settings, first)
        await in_state(pool, fence, "succeeded")


async def test_a_result_does_not_wait_without_end(settings, pool, monkeypatch):
    """W4, O3: a result of a step that the task never enters is stale in the end, and its record
    holds up no other."""
    monkeypatch.setattr(handlers, "TRIES", 3)
    [fence] = await submit_and_release(pool, settings)
    async with running_service(create_app(settings)):
        await send(settings, result(fence._replace(step=5, stage="six"), Outcome.DONE))
        [marker] = await submit_and_release(pool, settings)
        await send(settings, result(marker, Outcome.DONE))
        await in_state(pool, marker, "succeeded")
        assert (await task(pool, fence))["state"] == "queued"


async def test_a_locked_task_keeps_the_order_of_its_results(settings, pool):
    """W4: another transaction locks the task while both results come."""
    [fence] = await submit_and_release(pool, settings)
    first, second = next_of(fence, "two")
    async with running_service(create_app(settings)), pool.acquire() as other:
        async with other.transaction():
            await other.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", fence.id)
            await send(settings, first)
            await send(settings, result(second, Outcome.DONE))
            [marker] = await submit_and_release(pool, settings)
            await send(settings, result(marker, Outcome.DONE))
            await in_state(pool, marker, "succeeded")
        await in_state(pool, fence, "succeeded")


async def test_a_record_of_an_earlier_worker_has_no_header(settings, pool):
    """O9: without the header, or with one that cannot be read, the task becomes ready."""
    fences = await submit_and_release(pool, settings, count=2)
    async with running_service(create_app(settings)):
        first, _ = next_of(fences[0], "two")
        await write(settings.kafka, f"{settings.prefix}stage-results", encode_results("w", [first]), key=b"w")
        other, _ = next_of(fences[1], "two")
        async with producing(settings.kafka) as producer:
            await producer.send_and_wait(
                f"{settings.prefix}stage-results",
                encode_results("w", [other]),
                key=b"w",
                headers=[("penstock-goes-on", b"[[1")],
            )
        for fence in fences:
            await in_state(pool, fence, "ready")


async def test_only_the_attempt_that_follows_the_taken_result_counts(settings, pool):
    """W4: two workers ran the first stage and went on, each with a context of its own.

    The task took the result of one. The other's next result and claim change nothing."""
    [fence] = await submit_and_release(pool, settings)
    first, second = next_of(fence, "two")
    async with running_service(create_app(settings)):
        await send(settings, first)
        await in_state(pool, fence, "running")
        other, _ = next_of(fence, "two")
        other.goes_on = CHOSEN + 7
        theirs = second._replace(attempt=other.goes_on)
        await send(settings, other, result(theirs, Outcome.DONE, context=Context.encode("other")), worker="b")
        [marker] = await submit_and_release(pool, settings)
        await send(settings, result(marker, Outcome.DONE), worker="b")
        await in_state(pool, marker, "succeeded")
        assert (await task(pool, fence))["state"] == "running"
        claim = Lease(theirs.attempt_id, "b", 0, 60_000, 0.0)
        assert await leases.claimed(pool, [claim], [False]) == (set(), set())
        await send(settings, result(second, Outcome.DONE, context=Context.encode("mine")))
        await in_state(pool, fence, "succeeded")
    assert await pool.fetchval("SELECT result FROM task WHERE id = $1", fence.id) == b'"mine"'


async def test_a_stage_after_task_sync_takes_no_result_of_another_chain(settings, pool):
    """W4: two workers ran the first stage and went on. The task took the results of one, and passes
    task-sync before its third stage, because a second was over. The result of the other worker's
    third stage follows outputs that the task never had: it has no effect."""
    [fence] = await submit_and_release(pool, settings)
    first, second = next_of(fence, "two")
    ended = result(second, next_stage="three", context=Context.encode("mine"))
    other_third = fence._replace(step=2, stage="three", attempt=CHOSEN + 9)
    async with running_service(create_app(settings)):
        await send(settings, first, ended)
        await in_state(pool, fence, "ready")
        async with open_session(settings.postgres, "test") as session:
            assert (await release.release(session, types.TaskType(name="t"), 1, [])).batch is not None
        await send(settings, result(other_third, Outcome.DONE, context=Context.encode("other")), worker="b")
        [marker] = await submit_and_release(pool, settings)
        await send(settings, result(marker, Outcome.DONE), worker="b")
        await in_state(pool, marker, "succeeded")
        assert (await task(pool, fence))["state"] == "queued"
        claim = Lease(other_third.attempt_id, "b", 0, 60_000, 0.0)
        assert await leases.claimed(pool, [claim], [False]) == (set(), set())


async def test_no_late_result_counts_where_a_worker_chose_the_number(settings, pool):
    """H10, W4: the attempt with which a worker went on has expired. The worker then read the record
    of the stage before again, and went on with another outcome. The late result of that second
    chain is of another attempt than the one that expired, and history has 0 for both."""
    [fence] = await submit_and_release(pool, settings)
    first, second = next_of(fence, "two")
    async with running_service(create_app(settings)):
        await send(settings, first)
        await in_state(pool, fence, "running")
        await expire(pool, second, worker="w")
        other = second._replace(attempt=CHOSEN + 7)
        [marker] = await submit_and_release(pool, settings)
        await send(settings, result(other, Outcome.DONE), result(second, Outcome.DONE))
        await send(settings, result(marker, Outcome.DONE))
        await in_state(pool, marker, "succeeded")
    assert (await task(pool, fence))["state"] == "scheduled"
