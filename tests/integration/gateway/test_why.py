"""Reasons why a task waits, on the real Kafka and PostgreSQL: each reason by its cause, over HTTP
and by command line, and as the reason of the flow that the task belongs to."""

from __future__ import annotations

import dataclasses
import random
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.integration.cli.test_cli import penstock
from tests.integration.flow_owner.support import Owner, definition
from tests.support.gateways import running_gateway
from tests.support.invoking import documents
from tests.support.pipeline import submit
from tests.support.services import running_service
from tests.support.waiting import wait_until

from penstock.client import Client
from penstock.core.attempt import AttemptId
from penstock.core.release_order import position_in
from penstock.core.task import Priority
from penstock.core.why import WaitReason
from penstock.errors import NotFound
from penstock.gateway import why as gateway_why
from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology.topics import workers_group
from penstock.postgres import concurrency_keys, release, types, why
from penstock.postgres.concurrency_keys import ConcurrencyKeyChange
from penstock.postgres.queries import query
from penstock.postgres.session import open_session
from penstock.postgres.types import TaskType
from penstock.task_sync.app import create_app
from penstock.task_sync.limits import ReleaseLimiter
from penstock.task_sync.settings import TaskSyncSettings

__all__ = ["penstock"]  # fixture

PLAIN = TaskType(name="t", partitions=1)
TASK_TYPES = (PLAIN,)


@pytest.fixture(autouse=True)
def _without_lag_cache(monkeypatch):
    monkeypatch.setattr(gateway_why, "LAG_CACHE_S", 0.0)
    monkeypatch.setattr(gateway_why, "LAG_RETRY_S", 0.0)


@pytest.fixture
def settings(where):
    # The ready topic holds one record at a time.
    return TaskSyncSettings(**where, window=1, window_floor=1, release_batch=1)


@pytest.fixture
async def client(gateway):
    async with Client(gateway.url) as client:
        yield client


async def wait_for_reason(client, task_id, reason, **figures):
    """Waits until the answer has this reason and these figures, and returns all its figures."""

    async def matches():
        answer = await client.why(task_id)
        return answer if answer["reason"] == reason and figures.items() <= answer["figures"].items() else None

    return (await wait_until(matches, what=f"task {task_id} is {reason} {figures}"))["figures"]


@asynccontextmanager
async def joined_worker(settings):
    """A worker that has its partition; yields a coroutine function that takes and commits
    records."""
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


async def test_each_state_of_a_task_has_its_reason(settings, pool, client):
    """S8: a task's reasons are no owner, no worker, on Kafka, taken, running and ended. A task
    behind it is next, or has N tasks ahead."""
    first, second, third = await submit(pool, 3)
    assert "owner" not in await wait_for_reason(client, first, WaitReason.NO_OWNER)
    async with running_service(create_app(settings)):
        # The first task waits on Kafka, and the others wait for the same missing worker.
        for task_id in (first, second, third):
            await wait_for_reason(client, task_id, WaitReason.NO_WORKER, workers=0, lag=1)
        async with joined_worker(settings) as take:
            assert (await wait_for_reason(client, first, WaitReason.ON_KAFKA))["lag"] == 1
            assert (await wait_for_reason(client, second, WaitReason.NEXT))["ahead"] == 0
            found = await wait_for_reason(client, third, WaitReason.AHEAD)
            assert (found["ahead"], found["workers"], "owner" in found) == (1, 1, True)
            await types.change(pool, "t", lambda current: dataclasses.replace(current, paused=True))
            await take()
            assert (await wait_for_reason(client, first, WaitReason.TAKEN))["lag"] == 0
            await wait_for_reason(client, second, WaitReason.TYPE_PAUSED)
    await pool.execute("UPDATE task SET state = 'running', worker = 'w-1' WHERE id = $1", first)
    assert (await wait_for_reason(client, first, WaitReason.RUNNING))["worker"] == "w-1"
    await client.cancel([first])
    await wait_for_reason(client, first, WaitReason.ENDED)
    error = '{"kind": "Fail", "message": "there is nothing to count"}'
    await pool.execute("UPDATE task SET state = 'failed', error = $2 WHERE id = $1", first, error)
    assert (await client.why(first))["sentence"] == "it has ended: Fail: there is nothing to count"
    with pytest.raises(NotFound):
        await client.why(10**6)


async def test_delayed_and_paused_tasks_have_their_reasons(pool, client):
    """S8: a task that is not due names its due time, after a delay and before a retry. A paused
    task keeps its due time."""
    at = datetime.now(UTC) + timedelta(hours=1)
    [delayed] = await submit(pool, run_at=at)
    found = await wait_for_reason(client, delayed, WaitReason.NOT_DUE)
    assert datetime.fromisoformat(found["due_at"]) == at
    assert 3_500 < found["due_in_s"] <= 3_600
    await pool.execute("UPDATE task SET attempt = 2 WHERE id = $1", delayed)
    assert "tried again (attempt 2)" in (await client.why(delayed))["sentence"]
    await pool.execute("UPDATE task SET state = 'paused' WHERE id = $1", delayed)
    assert (await wait_for_reason(client, delayed, WaitReason.TASK_PAUSED))["due_at"] == found["due_at"]
    await pool.execute("UPDATE task SET state = 'waiting' WHERE id = $1", delayed)
    await wait_for_reason(client, delayed, WaitReason.WAITING)


async def test_a_task_of_a_flow_names_its_flow(settings, pool, client):
    """S8, S3: the answer names the flow in whose place a task waits; its document and lists have
    its place in the flow."""
    await types.register(pool, PLAIN)
    settings = dataclasses.replace(settings, window=1, window_floor=1)
    async with running_service(create_app(settings)), joined_worker(settings):
        [released] = await submit(pool)
        await wait_for_reason(client, released, WaitReason.ON_KAFKA)
        [plain, one, other] = await submit(pool, 3)
        await pool.execute(
            "UPDATE task SET flow_id = 8, flow_root_id = 7, flow_priority = 3, flow_node = 'n', flow_generation = 1,"
            " flow_item = id - $1 WHERE id > $1",
            plain,
        )
        found = await wait_for_reason(client, other, WaitReason.AHEAD)
        assert (found["ahead"], found["flow"], found["flow_root"], found["flow_priority"]) == (2, 8, 7, "LOW")
        sentence = (await client.why(other))["sentence"]
        assert sentence == "2 tasks of its type are released before it, in the place of flow 7 (LOW)"
        assert "flow" not in await wait_for_reason(client, plain, WaitReason.NEXT)
    listed = [task async for task in client.list(flow=8)]
    assert [(task.id, task.raw["flow"]) for task in listed] == [
        (task_id, {"id": 8, "node": "n", "generation": 1, "item": task_id - plain})
        for task_id in (other, one)
    ]
    assert [task.id async for task in client.list(flow=7)] == []
    assert "flow" not in (await client.get(plain)).raw


async def test_limits_and_concurrency_keys_are_reasons(settings, pool, client):
    """S8, S5: a paused or full concurrency key and the limits of the type are reasons, each until
    its cause ends."""
    settings = dataclasses.replace(settings, window=100, window_floor=100)
    await types.register(pool, dataclasses.replace(PLAIN, max_per_key=1, max_in_flight=3))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_service(create_app(settings)))
        await concurrency_keys.change(pool, "t", "held", ConcurrencyKeyChange(paused=True))
        _, taken = await submit(pool, 2, key="acme")
        [paused] = await submit(pool, key="held")
        await wait_for_reason(client, taken, WaitReason.NO_WORKER)
        await stack.enter_async_context(joined_worker(settings))
        found = await wait_for_reason(client, taken, WaitReason.KEY_TAKEN)
        assert (found["key"], found["key_in_flight"], found["key_limit"]) == ("acme", 1, 1)
        assert (await wait_for_reason(client, paused, WaitReason.KEY_PAUSED))["key"] == "held"
        *_, full = await submit(pool, 3)
        found = await wait_for_reason(client, full, WaitReason.LIMIT_IN_FLIGHT)
        assert (found["in_flight"], found["max_in_flight"], "key" in found) == (3, 3, False)
        await wait_for_reason(client, taken, WaitReason.KEY_TAKEN)
        await types.register(pool, dataclasses.replace(PLAIN, starts_per_s=0.01))
        [rated] = await submit(pool)
        # The records on Kafka exceed one second of starts.
        assert (await wait_for_reason(client, rated, WaitReason.AHEAD))["lag"] >= 1


async def test_a_rate_limit_is_a_reason(settings, pool, client):
    """S8, S5: the limit of starts a second is the reason while the workers have taken every
    record."""
    await types.register(pool, dataclasses.replace(PLAIN, starts_per_s=0.01))
    async with running_service(create_app(settings)):
        first, second = await submit(pool, 2)
        await wait_for_reason(client, first, WaitReason.NO_WORKER)
        async with joined_worker(settings):
            assert (await wait_for_reason(client, first, WaitReason.LIMIT_STARTS))["starts_per_s"] == 0.01
            assert (await wait_for_reason(client, second, WaitReason.LIMIT_STARTS))["ahead"] == 1


NO_ROOM = {
    "type": (
        {"max_in_flight": 1},
        "limit_in_flight",
        {"in_flight": 1, "max_in_flight": 1},
        "1 task of its type is in flight, of at most 1",
    ),
    "key": (
        {"max_per_key": 1},
        "key_taken",
        {"key": "acme", "key_in_flight": 1, "key_limit": 1},
        "1 tasks of its key, acme, are in flight, of at most 1",
    ),
}


@pytest.mark.parametrize("limit", NO_ROOM)
async def test_a_flow_without_room_says_so_and_goes_on_once_there_is_room(limit, settings, pool, client):
    """F2, S8: the answer about a flow has the reason and the figures of the task that it waits
    for. The flow goes on by itself when another task of the type, or of the key, has ended."""
    limits, reason, figures, sentence = NO_ROOM[limit]
    settings = dataclasses.replace(settings, window=100, window_floor=100)
    await types.register(pool, dataclasses.replace(PLAIN, **limits))
    owner = Owner(pool)
    document = definition("load", nodes={"work": {"kind": "task", "type": "t", "key": "'acme'"}})
    await owner.define(document)

    async def flow_waits(reason):
        answer = await client.why_flow(flow_id)
        return answer if answer["task"] is not None and answer["task"]["reason"] == reason else None

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_service(create_app(settings)))
        [other] = await submit(pool, key="acme")
        await wait_for_reason(client, other, WaitReason.NO_WORKER, lag=1)
        flow_id = await owner.start(document)
        await owner.advance()
        await wait_until(lambda: flow_waits("no_worker"))
        await stack.enter_async_context(joined_worker(settings))
        answer = await wait_until(lambda: flow_waits(reason))
        [step], task = answer["path"], answer["task"]
        assert figures.items() <= task["figures"].items()
        assert (answer["reason"], step["task"], task["figures"]["flow"]) == ("task", task["id"], flow_id)
        assert answer["sentence"] == f"node work runs task {task['id']} (t, ready): {sentence}"
        alone = await client.why(task["id"])
        assert alone["sentence"] == task["sentence"] == sentence
        await client.cancel([other])
        await wait_until(lambda: flow_waits("on_kafka"))
    await owner.end({"id": task["id"]})
    answer = await client.why_flow(flow_id)
    assert (answer["reason"], answer["task"]) == ("unapplied", None)
    assert answer["sentence"].startswith(
        f"the end of task {task['id']} (succeeded), of node work, is not applied"
    )
    await owner.advance()
    assert (await client.why_flow(flow_id))["sentence"] == "it has succeeded"


async def test_a_task_behind_a_busy_worker_has_the_place_of_its_record(settings, pool, client):
    """S8, S13: the answer names partition and worker of a record that waits, and the records before
    it. After a withdrawal it says that an attempt did not run."""
    await types.register(pool, PLAIN)
    settings = dataclasses.replace(settings, window=9, window_floor=9, release_batch=9)
    first, second = await submit(pool, 2)
    async with running_service(create_app(settings)), joined_worker(settings):
        await wait_until(lambda: has_place(client, second))
        found = (await client.why(second))["figures"]
        assert (found["partition"], found["before"], found["worker"]) == (0, 1, "penstock")
        assert "unrun" not in found
        async with open_session(settings.postgres, "test") as session:
            await release.withdraw(session, [AttemptId(first, 0, 0)])
        await wait_until(lambda: has_unrun(client, first))
        assert "task-sync withdrew the record" in (await client.why(first))["sentence"]


async def has_place(client, task_id):
    return "before" in (await client.why(task_id))["figures"]


async def has_unrun(client, task_id):
    return (await client.why(task_id))["figures"].get("unrun") == 1


async def test_an_answer_without_kafka_leaves_out_the_lag(database, pool):
    """S8: without Kafka the answer has the facts of PostgreSQL, and leaves out the lag."""
    async with (
        running_gateway(kafka="127.0.0.1:1", postgres=database, objects="memory:///") as gateway,
        Client(gateway.url) as client,
    ):
        ready, queued = await submit(pool, 2)
        await pool.execute("UPDATE task SET state = 'queued' WHERE id = $1", queued)
        await wait_for_reason(client, ready, WaitReason.NO_OWNER)
        assert "lag" not in await wait_for_reason(client, queued, WaitReason.ON_KAFKA)


ORDERS = {
    "plain": {},
    "ageing": {"ageing_s": 10_000.0},
    "finish first": {"finish_first": True},
    "both": {"ageing_s": 10_000.0, "finish_first": True},
    "limited keys": {"max_per_key": 3},
    "turns": {"fair": True},
    "turns of limited keys": {"fair": True, "max_per_key": 4},
    "ageing, limited keys": {"ageing_s": 20_000.0, "max_per_key": 3},
    "ageing, turns": {"ageing_s": 20_000.0, "fair": True},
    "ageing, turns of limited keys": {"ageing_s": 20_000.0, "fair": True, "max_per_key": 4},
}
NAMES = ("", "a", "b", "c", "d")


async def put_into_flows(pool, rng, ids):
    """Gives half of the tasks to three flows, whose ids are between those of the tasks. Each task
    and flow becomes 1,000 s older than the next one."""
    flows = [ids[5] - 1, ids[25] - 1, ids[45] - 1]
    await pool.execute(
        "INSERT INTO flow (id, root_id, name, version, unfinished, priority) OVERRIDING SYSTEM VALUE"
        " SELECT id, id, 'f', 1, 1, n FROM unnest($1::bigint[]) WITH ORDINALITY AS f (id, n)",
        flows,
    )
    for task_id in rng.sample(ids, 30):
        number = rng.randrange(3)
        await pool.execute(
            "UPDATE task SET flow_id = $2, flow_root_id = $2, flow_priority = $3, flow_node = id::text,"
            " flow_generation = 0 WHERE id = $1",
            task_id,
            flows[number],
            number + 1,
        )
    for table in ("task", "flow"):
        # Ids are times, so that the gaps between them differ.
        await pool.execute(
            f"UPDATE {table} SET created_at = now() - make_interval(secs => behind * 1000 + 500) FROM ("
            " SELECT id, row_number() OVER (ORDER BY id DESC) - 1 AS behind"
            " FROM (SELECT id FROM task UNION ALL SELECT id FROM flow) AS one) AS place"
            f" WHERE place.id = {table}.id"
        )


@pytest.mark.parametrize("order", ORDERS)
async def test_the_count_ahead_equals_the_tasks_released_before(order, database, pool):
    """S8, S3: in every order of release, the count ahead of a task is the number of tasks released
    before it. Under fair queueing it may be a round more. Tasks that their key holds back are not
    counted."""
    rng = random.Random(order)
    await types.register(pool, dataclasses.replace(PLAIN, **ORDERS[order]))
    if "limited keys" in order:
        await concurrency_keys.change(pool, "t", "a", ConcurrencyKeyChange(paused=True))
    if "turns" in order:
        await concurrency_keys.change(pool, "t", "b", ConcurrencyKeyChange(weight=3))
    ids = []
    for _ in range(60):
        ids += await submit(pool, priority=rng.choice(list(Priority)), key=rng.choice(NAMES) or None)
    await put_into_flows(pool, rng, ids)
    await pool.execute("UPDATE task SET step = id % 3, tracked = true")
    counts_ahead = {}
    for task_id in ids:
        found = (await why.facts(pool, task_id)).facts.ahead
        assert (found.more, found.about) == (False, "turns" in order or order == "ageing, limited keys")
        counts_ahead[task_id] = found.tasks
    async with open_session(database, "owner") as session:
        limiter = ReleaseLimiter(session, lambda _name: None)
        await limiter.load()
        task_type = (await types.all_types(pool))["t"]
        released = []
        while True:
            found = await limiter.release(task_type, 1, list)
            if found.batch is not None:
                released += [task.fence.id for task in found.batch.tasks]
            elif not found.more:
                break
        limiter.close()
    assert len(released) > 10
    assert (len(released) == 60) == ("limited" not in order)
    round_length = 2 + len(NAMES)
    for place, task_id in enumerate(released):
        if "turns" in order:
            assert place <= counts_ahead[task_id] <= place + round_length, (place, counts_ahead[task_id])
        else:
            assert counts_ahead[task_id] == place


async def test_the_count_ahead_is_bounded(pool, monkeypatch):
    """S8: the count ahead stops at a limit, and `more` says that further tasks are ahead."""
    monkeypatch.setattr(why, "COUNTED", 5)
    ids = await submit(pool, 8, key="a")
    for name, order in ORDERS.items():
        await types.register(pool, dataclasses.replace(PLAIN, **{**order, "max_per_key": None}))
        found = [(await why.facts(pool, task_id)).facts.ahead for task_id in ids]
        assert [one.tasks for one in found] == [0, 1, 2, 3, 4, 5, 5, 5], name
        assert [one.more for one in found] == [False] * 6 + [True] * 2, name


async def test_the_count_ahead_reads_only_an_index(pool):
    """S8: the count ahead reads only the index of ready tasks."""
    [task_id] = await submit(pool)
    position = position_in(await pool.fetchrow(query("why.facts"), task_id))
    rows = await pool.fetch(f"EXPLAIN {query('why.ahead')}", "t", position, 10)
    plan = "\n".join(row[0] for row in rows)
    assert "Index Only Scan using task_release on task" in plan
    assert plan.count("Scan") == 1


async def test_the_command_line_prints_the_reason(penstock):
    """S8, O8: `penstock tasks why` prints the reason as a sentence with its figures, or as JSON. An
    unknown task gives status 4."""
    [one] = documents(await penstock("submit", "media", "--json"))
    result = await penstock("tasks", "why", str(one["id"]))
    assert result.exit_code == 0
    assert f"task {one['id']} (media, ready): no task-sync owns its type" in result.stdout
    assert "ahead" in result.stdout
    [document] = documents(await penstock("tasks", "why", str(one["id"]), "--json"))
    assert (document["reason"], document["figures"]["ahead"]) == ("no_owner", 0)
    assert (await penstock("tasks", "why", "999999")).exit_code == 4
