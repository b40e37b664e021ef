"""Why a task is waiting, on the real Kafka and PostgreSQL: each reason by what causes it, over HTTP and by command line."""

from __future__ import annotations

import dataclasses
import random
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.gateways import running_gateway
from tests.integration.test_client_cli import documents, penstock
from tests.running import make_topics, running_service
from tests.waiting import wait_until

from penstock.client import Client
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.task import Priority
from penstock.core.why import Reason
from penstock.errors import NotFound
from penstock.gateway import waiting
from penstock.kafka.connection import make_consumer, running
from penstock.kafka.topics import workers_group
from penstock.postgres import keys, tasks, types, why
from penstock.postgres.connection import open_pool
from penstock.postgres.keys import KeyChange
from penstock.postgres.queries import query
from penstock.postgres.session import open_session
from penstock.postgres.types import TaskType
from penstock.task_sync.app import create_app
from penstock.task_sync.limits import Limits
from penstock.task_sync.settings import TaskSyncSettings

__all__ = ["penstock"]  # fixture

PLAIN = TaskType(name="t", partitions=1)


@pytest.fixture(autouse=True)
def _asking_anew(monkeypatch):
    monkeypatch.setattr(waiting, "KEEP_S", 0.0)
    monkeypatch.setattr(waiting, "AWAY_S", 0.0)


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    # One record at a time on the ready topic.
    return TaskSyncSettings(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=database,
        objects="memory:///",
        window=1,
        window_floor=1,
        release_batch=1,
    )


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, PLAIN)
        yield pool


@pytest.fixture
async def asked(settings):
    async with (
        running_gateway(
            kafka=settings.kafka, prefix=settings.prefix, postgres=settings.postgres, objects="memory:///"
        ) as gateway,
        Client(gateway.url) as client,
    ):
        yield client


async def submit(pool, count=1, **fields):
    wanted = [Submission(type="t", context=Context.encode(None), **fields) for _ in range(count)]
    return [found.id for found in await tasks.submit(pool, wanted)]


async def become(client, task_id, reason, **figures):
    """Waits until this is the answer, with these figures among others; all of them."""

    async def so():
        told = await client.why(task_id)
        return told if told["reason"] == reason and figures.items() <= told["figures"].items() else None

    return (await wait_until(so, what=f"task {task_id} is {reason} {figures}"))["figures"]


@asynccontextmanager
async def working(settings):
    """A worker who has its partition, and takes what it is told to: a coroutine that does so."""
    group = workers_group(settings.prefix, "t")
    async with running(make_consumer(settings, group, f"{settings.prefix}ready.t")) as consumer:

        async def join():
            await consumer.getmany(timeout_ms=50)
            return consumer.assignment()

        await wait_until(join)
        for partition in consumer.assignment():
            await consumer.seek_to_beginning(partition)

        async def take():
            await wait_until(lambda: consumer.getmany(timeout_ms=50))
            await consumer.commit()

        yield take


async def test_from_the_gate_to_the_end(settings, pool, asked):
    """S8: no owner, no worker, on Kafka, taken, running, ended; what is behind is next, or has N ahead."""
    first, second, third = await submit(pool, 3)
    assert "owner" not in await become(asked, first, Reason.NO_OWNER)
    async with running_service(create_app(settings)):
        # It is released and waits on Kafka; the others wait for the same nobody.
        for task_id in (first, second, third):
            await become(asked, task_id, Reason.NO_WORKER, workers=0, lag=1)
        async with working(settings) as take:
            assert (await become(asked, first, Reason.ON_KAFKA))["lag"] == 1
            assert (await become(asked, second, Reason.NEXT))["ahead"] == 0
            found = await become(asked, third, Reason.AHEAD)
            assert (found["ahead"], found["workers"], "owner" in found) == (1, 1, True)
            await types.change(pool, "t", lambda known: dataclasses.replace(known, paused=True))
            await take()
            assert (await become(asked, first, Reason.TAKEN))["lag"] == 0
            await become(asked, second, Reason.TYPE_PAUSED)
    await pool.execute("UPDATE task SET state = 'running', worker = 'w-1' WHERE id = $1", first)
    assert (await become(asked, first, Reason.RUNNING))["worker"] == "w-1"
    await asked.cancel([first])
    await become(asked, first, Reason.ENDED)
    with pytest.raises(NotFound):
        await asked.why(10**6)


async def test_delays_retries_and_pauses_of_tasks(pool, asked):
    """S8: not due tells until when, of a delay as of a retry; a paused task waits for somebody, with what is left of its delay."""
    at = datetime.now(UTC) + timedelta(hours=1)
    [delayed] = await submit(pool, run_at=at)
    found = await become(asked, delayed, Reason.NOT_DUE)
    assert datetime.fromisoformat(found["due_at"]) == at
    assert 3_500 < found["due_in_s"] <= 3_600
    await pool.execute("UPDATE task SET attempt = 2 WHERE id = $1", delayed)
    assert "tried again (attempt 2)" in (await asked.why(delayed))["sentence"]
    await pool.execute("UPDATE task SET state = 'paused' WHERE id = $1", delayed)
    assert (await become(asked, delayed, Reason.TASK_PAUSED))["due_at"] == found["due_at"]
    await pool.execute("UPDATE task SET state = 'waiting' WHERE id = $1", delayed)
    await become(asked, delayed, Reason.WAITING)


async def test_limits_and_keys(settings, pool, asked):
    """S8, S5: a key that is paused or has what it may have, the limits of the type; each goes when its cause does."""
    settings = dataclasses.replace(settings, window=100, window_floor=100)
    await types.register(pool, dataclasses.replace(PLAIN, max_per_key=1, max_in_flight=3))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_service(create_app(settings)))
        await keys.change(pool, "t", "held", KeyChange(paused=True))
        _, taken = await submit(pool, 2, key="acme")
        [paused] = await submit(pool, key="held")
        await become(asked, taken, Reason.NO_WORKER)
        await stack.enter_async_context(working(settings))
        found = await become(asked, taken, Reason.KEY_TAKEN)
        assert (found["key"], found["key_in_flight"], found["key_limit"]) == ("acme", 1, 1)
        assert (await become(asked, paused, Reason.KEY_PAUSED))["key"] == "held"
        *_, full = await submit(pool, 3)
        found = await become(asked, full, Reason.LIMIT_IN_FLIGHT)
        assert (found["in_flight"], found["max_in_flight"], "key" in found) == (3, 3, False)
        await become(asked, taken, Reason.KEY_TAKEN)
        await types.register(pool, dataclasses.replace(PLAIN, starts_per_s=0.01))
        [rated] = await submit(pool)
        # The records there are more than a second of starts.
        assert (await become(asked, rated, Reason.AHEAD))["lag"] >= 1


async def test_a_rate(settings, pool, asked):
    """S8, S5: so many starts a second, while the workers have taken what there was."""
    await types.register(pool, dataclasses.replace(PLAIN, starts_per_s=0.01))
    async with running_service(create_app(settings)):
        first, second = await submit(pool, 2)
        await become(asked, first, Reason.NO_WORKER)
        async with working(settings):
            assert (await become(asked, first, Reason.LIMIT_STARTS))["starts_per_s"] == 0.01
            assert (await become(asked, second, Reason.LIMIT_STARTS))["ahead"] == 1


async def test_without_kafka_the_rest_is_told(database, pool):
    """S8: what PostgreSQL knows is an answer; what only Kafka knows is left out."""
    async with (
        running_gateway(kafka="127.0.0.1:1", postgres=database, objects="memory:///") as gateway,
        Client(gateway.url) as client,
    ):
        ready, queued = await submit(pool, 2)
        await pool.execute("UPDATE task SET state = 'queued' WHERE id = $1", queued)
        await become(client, ready, Reason.NO_OWNER)
        assert "lag" not in await become(client, queued, Reason.ON_KAFKA)


ORDERS = {
    "plain": {},
    "ageing": {"ageing_s": 10_000.0},
    "finish first": {"finish_first": True},
    "both": {"ageing_s": 10_000.0, "finish_first": True},
    "limited keys": {"max_per_key": 3},
    "turns": {"fair": True},
    "turns of limited keys": {"fair": True, "max_per_key": 4},
}
NAMES = ("", "a", "b", "c", "d")


@pytest.mark.parametrize("order", ORDERS)
async def test_as_many_are_ahead_as_are_released_before(order, database, pool):
    """S8, S3: whatever the order of release, what is said to be ahead of a task is what goes before it; where keys take turns,
    at most a round more. What its key keeps back is ahead of nobody."""
    chance = random.Random(order)
    await types.register(pool, dataclasses.replace(PLAIN, **ORDERS[order]))
    if order in ("limited keys", "turns of limited keys"):
        await keys.change(pool, "t", "a", KeyChange(paused=True))
    if "turns" in order:
        await keys.change(pool, "t", "b", KeyChange(weight=3))
    ids = []
    for _ in range(60):
        ids += await submit(pool, priority=chance.choice(list(Priority)), key=chance.choice(NAMES) or None)
    await pool.execute(
        "UPDATE task SET created_at = now() - make_interval(secs => (max.id - task.id) * 1000 + 500), step = task.id % 3, tracked = true "
        "FROM (SELECT max(id) AS id FROM task) AS max"
    )
    said = {}
    for task_id in ids:
        found = (await why.facts(pool, task_id)).facts.ahead
        assert (found.more, found.about) == (False, "turns" in order)
        said[task_id] = found.tasks
    async with open_session(database, "owner") as session:
        gate = Limits(session, lambda _name: None)
        await gate.load()
        task_type = (await types.all_types(pool))["t"]
        released = []
        while True:
            found = await gate.release(task_type, 1, list)
            if found.batch is not None:
                released += [task.fence.id for task in found.batch.tasks]
            elif not found.more:
                break
        gate.close()
    assert len(released) > 10
    assert (len(released) == 60) == ("limited" not in order)
    weights = 2 + len(NAMES)
    for place, task_id in enumerate(released):
        if "turns" in order:
            assert place <= said[task_id] <= place + weights, (place, said[task_id])
        else:
            assert said[task_id] == place


@pytest.mark.parametrize("order", ORDERS)
async def test_those_ahead_are_counted_up_to_a_limit(order, pool, monkeypatch):
    """S8: however many there are, as many are looked at as are told, and it is said that there are more."""
    monkeypatch.setattr(why, "COUNTED", 5)
    await types.register(pool, dataclasses.replace(PLAIN, **{**ORDERS[order], "max_per_key": None}))
    ids = await submit(pool, 8, key="a")
    found = [(await why.facts(pool, task_id)).facts.ahead for task_id in ids]
    assert [one.tasks for one in found] == [0, 1, 2, 3, 4, 5, 5, 5]
    assert [one.more for one in found] == [False] * 6 + [True] * 2


async def test_those_ahead_are_counted_from_an_index_alone(pool):
    """S8: nothing but the index of what is ready is read, however much waits."""
    [task_id] = await submit(pool)
    rows = await pool.fetch(f"EXPLAIN {query('why.ahead')}", "t", 2, task_id, 10)
    plan = "\n".join(row[0] for row in rows)
    assert "Index Only Scan using task_ready on task" in plan
    assert plan.count("Scan") == 1


async def test_the_command_line_tells_why(penstock):
    """S8, O8: `penstock tasks why` says it in a sentence with its figures, or as JSON; no such task is status 4."""
    [one] = documents(await penstock("submit", "media", "--json"))
    told = await penstock("tasks", "why", str(one["id"]))
    assert told.exit_code == 0
    assert f"task {one['id']} (media, ready): no task-sync has its type" in told.stdout
    assert "ahead" in told.stdout
    [document] = documents(await penstock("tasks", "why", str(one["id"]), "--json"))
    assert (document["reason"], document["figures"]["ahead"]) == ("no_owner", 0)
    assert (await penstock("tasks", "why", "999999")).exit_code == 4
