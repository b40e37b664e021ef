"""Limits of types and keys on the real Kafka and PostgreSQL: paused, in flight, starts a second, keys and their turns."""

import asyncio
import dataclasses

import pytest
from tests.running import make_topics, read_records, running_service
from tests.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome, Tally, Verdict
from penstock.core.task import Priority, State
from penstock.errors import Conflict, InvalidRecord
from penstock.kafka.connection import make_consumer, running
from penstock.kafka.topics import workers_group
from penstock.postgres import advance, keys, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.keys import KeyChange
from penstock.postgres.queries import query
from penstock.postgres.session import open_session
from penstock.postgres.types import TaskType
from penstock.task_sync.app import create_app
from penstock.task_sync.limits import Limits, Released
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker.turns import Backlog

PLAIN = TaskType(name="t", partitions=1)


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    return TaskSyncSettings(
        kafka=kafka_servers, prefix=prefix, postgres=database, objects="memory:///", own_retry_s=0.2
    )


@pytest.fixture
async def pool(database):
    async with open_pool(database, "test") as pool:
        yield pool


async def register(pool, **fields):
    await types.register(pool, dataclasses.replace(PLAIN, **fields))


async def submit(pool, count=1, **fields):
    wanted = [Submission(type="t", context=Context.encode(None), **fields) for _ in range(count)]
    return [found.id for found in await tasks.submit(pool, wanted)]


async def in_state(pool, state, more="true"):
    return [
        r["id"]
        for r in await pool.fetch(f"SELECT id FROM task WHERE state = $1 AND {more} ORDER BY id", state)
    ]


async def become(pool, state, count, more="true"):
    async def so():
        return len(await in_state(pool, state, more)) == count

    await wait_until(so, what=f"{count} tasks are {state} and {more}")


async def finish(pool, ids, state=State.SUCCEEDED):
    """As the stage processor does it."""
    endings = [
        advance.Ending(
            fence=Fence(task_id, 0, "start", 0),
            outcome=Outcome.DONE,
            verdict=Verdict(state, "start", 0, 0, 0.0, Tally()),
            worker="w",
        )
        for task_id in ids
    ]
    assert len((await advance.advance(pool, endings)).applied) == len(ids)


async def released(settings):
    """Ids in the order of release, each with when, in seconds."""
    found = await read_records(settings.kafka, f"{settings.prefix}ready.t")
    return [
        (int(record.value.split(b'"id":')[1].split(b",")[0]), record.timestamp / 1000) for record in found
    ]


async def test_a_paused_type_is_not_released_until_it_is_resumed_also_by_another_owner(settings, pool):
    """S5: pausing and resuming takes effect by notification, survives a restart, and no registration resumes it."""
    await register(pool, paused=True)
    async with running_service(create_app(settings)):
        await submit(pool)
        # The same session takes both, and another type goes by it.
        await types.register(pool, TaskType(name="u", partitions=1))
        await tasks.submit(pool, [Submission(type="u", context=Context.encode(None))])
        await become(pool, "queued", 1, "type = 'u'")
        assert await in_state(pool, "queued", "type = 't'") == []
    await register(pool, lease_ms=5000)
    async with running_service(create_app(settings)):
        await tasks.submit(pool, [Submission(type="u", context=Context.encode(None))])
        await become(pool, "queued", 2, "type = 'u'")
        assert await in_state(pool, "queued", "type = 't'") == []
        async with asyncio.timeout(1):
            await types.change(pool, "t", lambda known: dataclasses.replace(known, paused=False))
            await become(pool, "queued", 1, "type = 't'")


async def test_no_more_than_the_limit_is_in_flight_and_what_ends_makes_room_at_once(settings, pool):
    """S5: max_in_flight counts what is queued or running; an end, however it comes, lets the next one go."""
    await register(pool, max_in_flight=3)
    ids = await submit(pool, 10)
    async with running_service(create_app(settings)):
        await become(pool, "queued", 3)
        await pool.execute(
            "UPDATE task SET state = 'running', worker = 'w' WHERE id = ANY ($1::bigint[])", ids[:2]
        )
        async with asyncio.timeout(2):
            await finish(pool, ids[:2])
            await become(pool, "queued", 3)
            await advance.cancel(pool, [ids[2]])
            await become(pool, "queued", 1, f"id = {ids[5]}")
        assert await in_state(pool, "queued") == ids[3:6]
        await types.change(pool, "t", lambda known: dataclasses.replace(known, max_in_flight=5))
        await become(pool, "queued", 5)
        await types.change(pool, "t", lambda known: dataclasses.replace(known, max_in_flight=None))
        await become(pool, "queued", 7)


async def test_a_limit_counts_what_was_released_before_there_was_one(settings, pool):
    """S5: a limit that comes, or comes again, while tasks are in flight holds at once."""
    await register(pool)
    first = await submit(pool, 4)
    async with running_service(create_app(settings)):
        await become(pool, "queued", 4)
        await pool.execute("UPDATE task SET state = 'running', worker = 'w' WHERE id = $1", first[0])
        await types.change(pool, "t", lambda known: dataclasses.replace(known, max_in_flight=3))
        later = await submit(pool, 3)
        await finish(pool, first[:1])
        await finish(pool, first[1:2])
        await become(pool, "queued", 1, f"id = {later[0]}")
        assert await in_state(pool, "queued") == [*first[2:], later[0]]


async def test_starts_a_second_are_kept_within_five_percent(settings, pool):
    """S5: with always enough waiting, as many start a second as the type says."""
    rate, seconds = 40, 5
    await register(pool, starts_per_s=rate)
    await submit(pool, rate * (seconds + 3))
    settings = dataclasses.replace(settings, lag_poll_s=0.01)
    async with running_service(create_app(settings)):
        # A worker that takes all there is, as its committed offsets tell.
        consumer = asyncio.create_task(_take(settings))
        await become(pool, "queued", rate * (seconds + 3))
        consumer.cancel()
    at_s = [moment for _, moment in await released(settings)]
    # Between the first and the last of each stretch of some seconds, a rate.
    per_stretch = [later - earlier for earlier, later in zip(at_s, at_s[rate * seconds :], strict=False)]
    assert per_stretch
    for took_s in per_stretch:
        assert rate * 0.95 <= rate * seconds / took_s <= rate * 1.05
    assert sum(moment <= at_s[0] + 0.5 for moment in at_s) <= rate * 0.5 * 1.05 + rate * 0.1 + 1


async def _take(settings):
    group = workers_group(settings.prefix, "t")
    async with running(make_consumer(settings, group, f"{settings.prefix}ready.t")) as consumer:
        while True:
            if await consumer.getmany(timeout_ms=20):
                await consumer.commit()


async def test_of_a_rated_type_a_second_of_starts_waits_on_kafka_at_most(settings, pool):
    """S5: workers that come late do not begin at once what piled up meanwhile."""
    await register(pool, starts_per_s=50)
    await submit(pool, 200)
    async with running_service(create_app(settings)):
        await become(pool, "queued", 50)
        await tasks.submit(pool, [])
        # Another second's worth would be there by the time that of another type is.
        await types.register(pool, TaskType(name="u", partitions=1, starts_per_s=50))
        await tasks.submit(pool, [Submission(type="u", context=Context.encode(None)) for _ in range(50)])
        await become(pool, "queued", 50, "type = 'u'")
        assert len(await in_state(pool, "queued", "type = 't'")) == 50


def begun_by_a_worker(tasks):
    """These in the order in which a worker begins them that has them all in hand."""
    backlog = Backlog()
    for task in tasks:
        backlog.add(task)
    return [backlog.take() for _ in tasks]


async def test_priorities_age_so_that_the_lowest_do_not_starve(database, pool):
    """S3: under a load of HIGHEST tasks that never ends, a LOWEST one goes once it has waited for four times `ageing_s`
    and for what was submitted before it, and no worker turns that round; without ageing it never does."""
    ageing_s, step_s = 1_000, 100
    await register(pool)
    lowest = await submit(pool, 3, priority=Priority.LOWEST)
    async with open_session(database, "owner") as session:
        gate = Limits(session, lambda _name: None)

        async def step():
            """Some time passes, five HIGHEST tasks come, and five may go; whether the LOWEST are among them."""
            await pool.execute(
                f"UPDATE task SET created_at = created_at - interval '{step_s} s' WHERE state = 'ready'"
            )
            await submit(pool, 5, priority=Priority.HIGHEST)
            found = await gate.release((await types.all_types(pool))["t"], 5, list)
            assert len(found.batch.tasks) == 5
            assert begun_by_a_worker(found.batch.tasks) == found.batch.tasks
            return set(lowest) <= {task.fence.id for task in found.batch.tasks}

        for _ in range(4 * ageing_s // step_s + 2):
            assert not await step(), "nobody ages unless told to"
        await pool.execute("UPDATE task SET created_at = now() WHERE state = 'ready'")
        await register(pool, ageing_s=ageing_s)
        steps = 1
        while not await step():
            steps += 1
            assert steps < 100
        gate.close()
    assert steps * step_s == 4 * ageing_s


async def test_what_has_begun_is_finished_first(database, pool):
    """S3: tasks in a later stage go before those in their first, also those that were in it when the option came, and
    whatever their priority; in order among themselves. So a worker begins them, too."""
    await register(pool)
    await submit(pool, 6, priority=Priority.LOW)
    async with open_session(database, "owner") as session:
        gate = Limits(session, lambda _name: None)

        async def go(limit):
            found = Released(None, more=True)
            while found.batch is None and found.more:
                found = await gate.release((await types.all_types(pool))["t"], limit, list)
            assert begun_by_a_worker(found.batch.tasks) == found.batch.tasks
            return [task.fence.id for task in found.batch.tasks]

        begun = await go(4)
        await advance_to(pool, begun[:1])
        await register(pool, finish_first=True)
        high = await submit(pool, 2, priority=Priority.HIGH)
        await advance_to(pool, begun[3:])
        assert await go(1) == begun[:1]
        await advance_to(pool, begun[2:3])
        assert await go(3) == [begun[2], begun[3], high[0]]
        assert len(await go(10)) == 3
        # What had ended before the option came, and was never released under it, has begun all the same.
        [recovered] = await submit(pool, 1, priority=Priority.LOW)
        await pool.execute(
            "UPDATE task SET state = 'failed', step = 1, finished_at = now() WHERE id = $1", recovered
        )
        [higher] = await submit(pool, 1, priority=Priority.HIGHEST)
        await pool.fetch(query("operations.recover"), [recovered])
        assert await go(2) == [recovered, higher]
        gate.close()


async def test_what_is_in_flight_is_counted_in_batches_before_anything_goes(database, pool, monkeypatch):
    """S5: what was released before there was a limit counts, however much it is and whoever holds some of it: until all of it
    does, nothing goes; and what waits or is paused in a later stage is as begun as what is ready."""
    monkeypatch.setattr("penstock.task_sync.limits.TRACKED_AT_ONCE", 2)
    await register(pool)
    ids = await submit(pool, 9)
    async with open_session(database, "owner") as session:
        woken = []
        gate = Limits(session, woken.append)

        async def go():
            found = await gate.release((await types.all_types(pool))["t"], 5, list)
            return found.batch and [task.fence.id for task in found.batch.tasks], found.more

        assert (await go())[0] == ids[:5]
        await register(pool, max_in_flight=6)
        assert [await go(), await go()] == [(None, True)] * 2
        async with pool.acquire() as other, other.transaction():
            await other.fetch("SELECT FROM task WHERE id = $1 FOR UPDATE", ids[4])
            assert await go() == (None, False)
            assert await in_state(pool, "queued", "NOT tracked") == [ids[4]]
            await wait_until(lambda: woken == ["t"], what="it tries again")
        assert [await go(), await go()] == [(None, True), ([ids[5]], True)]
        await pool.execute("UPDATE task SET tracked = false")
        await advance_to(pool, ids[:3])
        for state, one in zip(("scheduled", "paused"), ids, strict=False):
            await pool.execute(
                "UPDATE task SET state = $1, due_at = now() + interval '1 h' WHERE id = $2", state, one
            )
        await register(pool, finish_first=True)
        while (await go())[0] is None:
            pass
        assert await in_state(pool, "queued", "tracked") == ids[2:]
        assert not await pool.fetchval("SELECT count(*) FROM task WHERE step > 0 AND NOT tracked")
        gate.close()


async def advance_to(pool, ids):
    """To the second stage, as the stage processor does it."""
    verdict = Verdict(State.READY, "second", 1, 0, 0.0, Tally())
    endings = [
        advance.Ending(fence=Fence(one, 0, "start", 0), outcome=Outcome.NEXT, verdict=verdict, worker="w")
        for one in ids
    ]
    assert len((await advance.advance(pool, endings)).applied) == len(ids)


async def test_an_order_of_its_own_and_keys_do_not_go_together(pool):
    """S5: what would be ignored is refused, whichever comes first."""
    await register(pool, ageing_s=1.0)
    with pytest.raises(Conflict, match="ageing_s"):
        await keys.change(pool, "t", "a", KeyChange(paused=True))
    await register(pool)
    await keys.change(pool, "t", "a", KeyChange(paused=True))
    with pytest.raises(Conflict, match="settings of keys"):
        await register(pool, finish_first=True)
    for field in ("fair", "max_per_key"):
        with pytest.raises(InvalidRecord) as refused:
            TaskType.from_wire({"name": "t", "ageing_s": 1.0, field: True})
        assert refused.value.pointer == "/ageing_s"
