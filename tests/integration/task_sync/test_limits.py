"""Limits of types and keys on the real Kafka and PostgreSQL: pauses, tasks in flight, starts per
second and order."""

import asyncio
import dataclasses

import pytest
from tests.support.pipeline import submit
from tests.support.services import read_records, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.completion import Conclusion, FailureCounts, Fence, Outcome
from penstock.core.task import Priority, State
from penstock.errors import Conflict, InvalidRecord
from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology.topics import workers_group
from penstock.postgres import advance, concurrency_keys, tasks, types
from penstock.postgres.concurrency_keys import ConcurrencyKeyChange
from penstock.postgres.ending import Ending
from penstock.postgres.queries import query
from penstock.postgres.session import open_session
from penstock.postgres.types import TaskType
from penstock.task_sync.app import create_app
from penstock.task_sync.limits import ReleaseLimiter, ReleaseResult
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker.priority_semaphore import PriorityQueue

TASK_TYPES = ()

PLAIN = TaskType(name="t", partitions=1)


@pytest.fixture
def settings(where):
    # Only notifications wake a type.
    return TaskSyncSettings(**where, own_retry_s=0.2, sweep_s=3600.0)


async def register(pool, **fields):
    await types.register(pool, dataclasses.replace(PLAIN, **fields))


async def in_state(pool, state, condition="true"):
    return [
        r["id"]
        for r in await pool.fetch(f"SELECT id FROM task WHERE state = $1 AND {condition} ORDER BY id", state)
    ]


async def become(pool, state, count, condition="true"):
    async def reached():
        return len(await in_state(pool, state, condition)) == count

    await wait_until(reached, what=f"{count} tasks are {state} and {condition}")


async def finish(pool, ids, state=State.SUCCEEDED):
    """Ends tasks as the stage processor does."""
    endings = [
        Ending(
            fence=Fence(task_id, 0, "start", 0),
            outcome=Outcome.DONE,
            conclusion=Conclusion(state, "start", 0, 0, 0.0, FailureCounts()),
            worker="w",
        )
        for task_id in ids
    ]
    assert len((await advance.advance(pool, endings)).applied) == len(ids)


async def released(settings):
    """Returns (id, time in seconds) in the order of release."""
    found = await read_records(settings.kafka, f"{settings.prefix}ready.t")
    return [
        (int(record.value.split(b'"id":')[1].split(b",")[0]), record.timestamp / 1000) for record in found
    ]


async def test_a_paused_type_stays_paused_with_another_owner(settings, pool):
    """S5: a notification makes a pause or resume take effect, and a pause survives a restart and a
    registration."""
    await register(pool, paused=True)
    async with running_service(create_app(settings)):
        await submit(pool)
        # One session handles both types: the other type is released past the paused one.
        await types.register(pool, TaskType(name="u", partitions=1))
        await tasks.submit(pool, [Submission(type="u", context=Context.encode(None))])
        await become(pool, "queued", 1, "type = 'u'")
        assert await in_state(pool, "queued", "type = 't'") == []
    await register(pool, lease_ms=5000)
    async with running_service(create_app(settings)):
        await tasks.submit(pool, [Submission(type="u", context=Context.encode(None))])
        await become(pool, "queued", 2, "type = 'u'")
        assert await in_state(pool, "queued", "type = 't'") == []
        await types.change(pool, "t", lambda task_type: dataclasses.replace(task_type, paused=False))
        await become(pool, "queued", 1, "type = 't'")


async def test_the_limit_bounds_tasks_in_flight(settings, pool):
    """S5: max_in_flight limits queued and running tasks. Every end of a task lets the next one be
    released at once."""
    await register(pool, max_in_flight=3)
    ids = await submit(pool, 10)
    async with running_service(create_app(settings)):
        await become(pool, "queued", 3)
        await pool.execute(
            "UPDATE task SET state = 'running', worker = 'w' WHERE id = ANY ($1::bigint[])", ids[:2]
        )
        await finish(pool, ids[:2])
        await become(pool, "queued", 3)
        await advance.cancel(pool, [ids[2]])
        await become(pool, "queued", 1, f"id = {ids[5]}")
        assert await in_state(pool, "queued") == ids[3:6]
        await types.change(pool, "t", lambda task_type: dataclasses.replace(task_type, max_in_flight=5))
        await become(pool, "queued", 5)
        await types.change(pool, "t", lambda task_type: dataclasses.replace(task_type, max_in_flight=None))
        await become(pool, "queued", 7)


async def test_a_new_limit_counts_tasks_in_flight(settings, pool):
    """S5: a new limit holds at once and counts tasks that are already in flight."""
    await register(pool)
    first = await submit(pool, 4)
    async with running_service(create_app(settings)):
        await become(pool, "queued", 4)
        await pool.execute("UPDATE task SET state = 'running', worker = 'w' WHERE id = $1", first[0])
        await types.change(pool, "t", lambda task_type: dataclasses.replace(task_type, max_in_flight=3))
        later = await submit(pool, 3)
        await finish(pool, first[:1])
        await finish(pool, first[1:2])
        await become(pool, "queued", 1, f"id = {later[0]}")
        assert await in_state(pool, "queued") == [*first[2:], later[0]]


@pytest.mark.parametrize(
    "before",
    [{}, {"max_in_flight": 9}, {"fair": True}, {"ageing_s": 60.0}, {"fair": True, "ageing_s": 60.0}],
    ids=["plain", "limit", "keys", "order", "keys and order"],
)
async def test_an_outdated_type_is_not_released(database, pool, before):
    """S5: an owner that has not yet received the notification of a pause or a new limit releases no
    task that was submitted after it. The notification makes it go on."""
    await register(pool, **before)
    async with open_session(database, "owner") as session:
        limiter = ReleaseLimiter(session, lambda _name: None)
        await limiter.load()
        outdated = (await types.all_types(pool))["t"]
        await types.change(pool, "t", lambda task_type: dataclasses.replace(task_type, max_in_flight=2))
        ids = await submit(pool, 4)
        for _ in range(3):
            assert (await limiter.release(outdated, 10, list)).batch is None
        await limiter.load()
        current = (await types.all_types(pool))["t"]
        found = ReleaseResult(None, more=True)
        while found.batch is None:
            assert found.more
            found = await limiter.release(current, 10, list)
        assert [task.fence.id for task in found.batch.tasks] == ids[:2]
        limiter.close()


@pytest.mark.alone
async def test_starts_per_second_stay_within_five_percent(settings, pool):
    """S5: with enough ready tasks, starts per second stay within 5 % of the type's rate."""
    rate, seconds = 40, 5
    await register(pool, starts_per_s=rate)
    await submit(pool, rate * (seconds + 3))
    settings = dataclasses.replace(settings, lag_poll_s=0.01)
    async with running_service(create_app(settings)):
        # A consumer that commits all records, as a fast worker would.
        consumer = asyncio.create_task(_consume(settings))
        await become(pool, "queued", rate * (seconds + 3))
        consumer.cancel()
    at_s = [moment for _, moment in await released(settings)]
    # Measure the rate over every span of `seconds`.
    spans_s = [later - earlier for earlier, later in zip(at_s, at_s[rate * seconds :], strict=False)]
    assert spans_s
    for span_s in spans_s:
        assert rate * 0.95 <= rate * seconds / span_s <= rate * 1.05
    assert sum(moment <= at_s[0] + 0.5 for moment in at_s) <= rate * 0.5 * 1.05 + rate * 0.1 + 1


async def _consume(settings):
    group = workers_group(settings.prefix, "t")
    async with running(make_consumer(settings, group, f"{settings.prefix}ready.t")) as consumer:
        while True:
            if await consumer.getmany(timeout_ms=20):
                await consumer.commit()


async def test_one_second_of_starts_waits_on_kafka(settings, pool):
    """S5: at most one second of starts of a rated type waits on Kafka, so that late workers do not
    start a backlog at once."""
    await register(pool, starts_per_s=50)
    await submit(pool, 200)
    async with running_service(create_app(settings)):
        await become(pool, "queued", 50)
        await tasks.submit(pool, [])
        # Releasing the other type takes a second, in which further tasks could be released.
        await types.register(pool, TaskType(name="u", partitions=1, starts_per_s=50))
        await tasks.submit(pool, [Submission(type="u", context=Context.encode(None)) for _ in range(50)])
        await become(pool, "queued", 50, "type = 'u'")
        assert len(await in_state(pool, "queued", "type = 't'")) == 50


def worker_order(tasks):
    """Returns the tasks in the order in which a worker starts them."""
    backlog = PriorityQueue()
    for task in tasks:
        backlog.add(task)
    return [backlog.take() for _ in tasks]


async def test_ageing_releases_the_lowest_priority(database, pool):
    """S3: with ageing, a LOWEST task under a constant load of HIGHEST tasks is released after four
    times `ageing_s`, and workers keep that order. Without ageing it is never released."""
    ageing_s, step_s = 1_000, 100
    await register(pool)
    lowest = await submit(pool, 3, priority=Priority.LOWEST)
    async with open_session(database, "owner") as session:
        limiter = ReleaseLimiter(session, lambda _name: None)

        async def step():
            """Advances time, submits and releases five HIGHEST tasks; returns whether the LOWEST
            ones were among them."""
            await pool.execute(
                f"UPDATE task SET created_at = created_at - interval '{step_s} s' WHERE state = 'ready'"
            )
            await submit(pool, 5, priority=Priority.HIGHEST)
            await limiter.load()
            found = await limiter.release((await types.all_types(pool))["t"], 5, list)
            assert len(found.batch.tasks) == 5
            assert worker_order(found.batch.tasks) == found.batch.tasks
            return set(lowest) <= {task.fence.id for task in found.batch.tasks}

        for _ in range(4 * ageing_s // step_s + 2):
            assert not await step(), "a task aged without ageing_s"
        await pool.execute("UPDATE task SET created_at = now() WHERE state = 'ready'")
        await register(pool, ageing_s=ageing_s)
        steps = 1
        while not await step():
            steps += 1
            assert steps < 100
        limiter.close()
    assert steps * step_s == 4 * ageing_s


async def test_begun_tasks_are_released_first(database, pool):
    """S3: with finish_first, tasks in a later stage are released before tasks in their first,
    regardless of priority, and workers keep that order. Tasks from before the option count,
    too."""
    await register(pool)
    await submit(pool, 6, priority=Priority.LOW)
    async with open_session(database, "owner") as session:
        limiter = ReleaseLimiter(session, lambda _name: None)

        async def release(limit):
            found = ReleaseResult(None, more=True)
            while found.batch is None and found.more:
                await limiter.load()
                found = await limiter.release((await types.all_types(pool))["t"], limit, list)
            assert worker_order(found.batch.tasks) == found.batch.tasks
            return [task.fence.id for task in found.batch.tasks]

        begun = await release(4)
        await advance_to(pool, begun[:1])
        await register(pool, finish_first=True)
        high = await submit(pool, 2, priority=Priority.HIGH)
        await advance_to(pool, begun[3:])
        assert await release(1) == begun[:1]
        await advance_to(pool, begun[2:3])
        assert await release(3) == [begun[2], begun[3], high[0]]
        assert len(await release(10)) == 3
        # A task that ended before the option and was then recovered has begun, too.
        [recovered] = await submit(pool, 1, priority=Priority.LOW)
        await pool.execute(
            "UPDATE task SET state = 'failed', step = 1, finished_at = now() WHERE id = $1", recovered
        )
        [higher] = await submit(pool, 1, priority=Priority.HIGHEST)
        await pool.fetch(query("operations.recover"), [recovered])
        assert await release(2) == [recovered, higher]
        limiter.close()


async def test_tasks_in_flight_are_counted_before_a_release(database, pool, monkeypatch):
    """S5: a new limit first counts all earlier tasks in flight, in batches, and waits for locked
    ones. With finish_first, scheduled and paused tasks in a later stage are counted as begun."""
    monkeypatch.setattr("penstock.task_sync.limits.TRACKED_PER_STATEMENT", 2)
    await register(pool)
    ids = await submit(pool, 9)
    async with open_session(database, "owner") as session:
        woken = []
        limiter = ReleaseLimiter(session, woken.append)

        async def release():
            await limiter.load()
            found = await limiter.release((await types.all_types(pool))["t"], 5, list)
            return found.batch and [task.fence.id for task in found.batch.tasks], found.more

        assert (await release())[0] == ids[:5]
        await register(pool, max_in_flight=6)
        assert [await release(), await release()] == [(None, True)] * 2
        async with pool.acquire() as other, other.transaction():
            await other.fetch("SELECT FROM task WHERE id = $1 FOR UPDATE", ids[4])
            assert await release() == (None, False)
            assert await in_state(pool, "queued", "NOT tracked") == [ids[4]]
            await wait_until(lambda: woken == ["t"], what="the limiter tries again")
        assert [await release(), await release()] == [(None, True), ([ids[5]], True)]
        await pool.execute("UPDATE task SET tracked = false")
        await advance_to(pool, ids[:3])
        for state, task_id in zip(("scheduled", "paused"), ids, strict=False):
            await pool.execute(
                "UPDATE task SET state = $1, due_at = now() + interval '1 h' WHERE id = $2", state, task_id
            )
        await register(pool, finish_first=True)
        while (await release())[0] is None:
            pass
        assert await in_state(pool, "queued", "tracked") == ids[2:]
        assert not await pool.fetchval("SELECT count(*) FROM task WHERE step > 0 AND NOT tracked")
        limiter.close()


async def advance_to(pool, ids):
    """Advances tasks to the second stage, as the stage processor does."""
    conclusion = Conclusion(State.READY, "second", 1, 0, 0.0, FailureCounts())
    endings = [
        Ending(fence=Fence(task_id, 0, "start", 0), outcome=Outcome.NEXT, conclusion=conclusion, worker="w")
        for task_id in ids
    ]
    assert len((await advance.advance(pool, endings)).applied) == len(ids)


async def test_finish_first_and_concurrency_keys_conflict(pool):
    """S5: settings of concurrency keys conflict with finish_first, in either order, and not with
    ageing_s."""
    await register(pool, ageing_s=1.0, finish_first=True)
    with pytest.raises(Conflict, match="finish_first"):
        await concurrency_keys.change(pool, "t", "a", ConcurrencyKeyChange(paused=True))
    await register(pool, ageing_s=1.0)
    await concurrency_keys.change(pool, "t", "a", ConcurrencyKeyChange(paused=True))
    with pytest.raises(Conflict, match="settings of concurrency keys"):
        await register(pool, finish_first=True)
    for field in ("fair", "max_per_key"):
        with pytest.raises(InvalidRecord) as refused:
            TaskType.from_wire({"name": "t", "ageing_s": 1.0, "finish_first": True, field: True})
        assert refused.value.pointer == "/finish_first"
        assert TaskType.from_wire({"name": "t", "ageing_s": 1.0, field: True}).ordered
