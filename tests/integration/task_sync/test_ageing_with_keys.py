"""Ageing together with concurrency keys, on the real PostgreSQL and Kafka."""

import dataclasses
import random
from collections import Counter

import pytest
from tests.integration.gateway.test_why import put_into_flows
from tests.integration.task_sync.test_concurrency_keys import (
    ROWS,
    index_entries,
    owner,
    plan,
)
from tests.integration.task_sync.test_limits import (
    become,
    finish,
    register,
    released,
    settings,
    submit,
    worker_order,
)
from tests.support.services import running_service

from penstock.core.release_order import Head, level_of, position_in
from penstock.core.task import Priority
from penstock.postgres import concurrency_keys, types
from penstock.postgres.columns import expanded
from penstock.postgres.concurrency_keys import ConcurrencyKeyChange
from penstock.postgres.connection import connect
from penstock.task_sync.app import create_app

# Each test registers its types.
TASK_TYPES = ()

__all__ = ["owner", "settings"]  # fixtures

NAMES = ("", "a", "b", "c", "d")
AGEING_S = 20_000.0


async def submit_aged(pool, rng, count=60):
    """Submits tasks of several levels and keys, half of them in flows, each 1,000 s older than the
    next one."""
    ids = []
    for _ in range(count):
        ids += await submit(pool, priority=rng.choice(list(Priority)), key=rng.choice(NAMES))
    await put_into_flows(pool, rng, ids)


async def expected_order(pool, rooms):
    """All tasks by effective level and place, each if its key has room; with their levels."""
    rows = await pool.fetch(
        f"SELECT {expanded('release_keys', 't')}, coalesce(t.key, '') AS key,"
        " extract(epoch FROM now() - coalesce(f.created_at, t.created_at))::float8 AS waited_s"
        " FROM task t LEFT JOIN flow f ON f.id = t.flow_root_id WHERE t.state = 'ready'"
    )
    heads = {row["id"]: Head(position_in(row)[1:], row["level"], row["waited_s"]) for row in rows}
    keys = {row["id"]: row["key"] for row in rows}
    order = {}
    for head in sorted(heads.values(), key=lambda head: (level_of(head, AGEING_S), head.place)):
        if (room := rooms.get(keys[head.id])) is None or room > 0:
            order[head.id] = level_of(head, AGEING_S)
            if room is not None:
                rooms[keys[head.id]] -= 1
    return order, keys


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("limit", [1, 7, 1_000])
async def test_the_order_is_effective_level_then_place_within_the_limits_of_keys(owner, pool, fair, limit):
    """S3, S5: with ageing and keys, the order is effective level, then place, among the tasks whose
    keys have room, and no limit is exceeded. With fair queueing keys take turns within an effective
    level."""
    rng = random.Random(f"{fair} {limit}")
    await register(pool, ageing_s=AGEING_S, max_per_key=6, fair=fair)
    await concurrency_keys.change(pool, "t", "a", ConcurrencyKeyChange(max_in_flight=3, sets_limit=True))
    await concurrency_keys.change(pool, "t", "b", ConcurrencyKeyChange(paused=True))
    await submit_aged(pool, rng)
    order, keys = await expected_order(pool, {"a": 3, "b": 0, "c": 6, "d": 6})
    assert len(set(order.values())) > 2, "too few effective levels for a test of their order"
    ids = await owner.drain(limit)
    if not fair:
        assert ids == list(order)
    assert sorted(ids) == sorted(order), "a task was released twice, or not at all"
    assert [order[task_id] for task_id in ids] == sorted(order.values())
    for name in NAMES:
        assert [one for one in ids if keys[one] == name] == [one for one in order if keys[one] == name]
    if fair:
        for level in set(order.values()):
            turns = [keys[one] for one in ids if order[one] == level]
            first_round = turns[: len(set(turns))]
            assert len(set(first_round)) == len(first_round), "a key had two turns in one round"


@pytest.mark.parametrize("fair", [False, True])
async def test_ageing_releases_the_lowest_priority_within_a_limit(owner, pool, fair):
    """S3, S5: under a stream of HIGHEST tasks of its own key and of others, a LOWEST task is
    released after four times `ageing_s`, within the limit of its key. Workers keep that order."""
    ageing_s, step_s, room = 1_000, 100, 2
    await register(pool, ageing_s=ageing_s, max_per_key=room, fair=fair)
    [lowest] = await submit(pool, 1, key="a", priority=Priority.LOWEST)
    steps, ids = 0, []
    while lowest not in ids:
        await finish(pool, ids)
        steps += 1
        await pool.execute(
            f"UPDATE task SET created_at = created_at - interval '{step_s} s' WHERE state = 'ready'"
        )
        for key in ("a", "b"):
            await submit(pool, room, key=key, priority=Priority.HIGHEST)
        await owner.limits.load()
        found = await owner.limits.release((await types.all_types(pool))["t"], 2 * room, list)
        batch = found.batch.tasks
        assert worker_order(batch) == batch
        ids = [task.fence.id for task in batch]
        in_flight = await pool.fetch("SELECT key FROM task WHERE state = 'queued'")
        assert Counter(row["key"] for row in in_flight) == {"a": room, "b": room}
        assert steps < 100
    assert batch[ids.index(lowest)].priority is Priority.HIGHEST
    assert steps * step_s == 4 * ageing_s


async def test_an_aged_task_is_not_delayed_by_younger_urgent_tasks_of_other_keys(owner, pool):
    """S3: a LOWEST task that has waited for four times `ageing_s` is behind older tasks only, also
    when other keys have many younger HIGHEST tasks."""
    await register(pool, ageing_s=10.0, max_per_key=50)
    [older] = await submit(pool, 1, key="z", priority=Priority.HIGHEST)
    [lowest] = await submit(pool, 1, key="m", priority=Priority.LOWEST)
    await pool.execute("UPDATE task SET created_at = now() - interval '41 s'")
    for key in ("a", "m", "z"):
        await submit(pool, 20, key=key, priority=Priority.HIGHEST)
    assert (await owner.release(2))[0] == [older, lowest]


async def test_a_clock_that_stepped_back_raises_no_task(owner, pool):
    """S3: tasks that seem to be submitted in the future, because the clock stepped back, keep their
    level."""
    await register(pool, ageing_s=10.0, fair=True)
    [low] = await submit(pool, 1, key="a", priority=Priority.LOW)
    await pool.execute("UPDATE task SET created_at = now() + interval '1 h'")
    [high] = await submit(pool, 1, key="b", priority=Priority.HIGH)
    await owner.limits.load()
    found = await owner.limits.release((await types.all_types(pool))["t"], 10, list)
    assert [(task.fence.id, task.priority) for task in found.batch.tasks] == [
        (high, Priority.HIGH),
        (low, Priority.LOW),
    ]


async def test_records_on_kafka_have_the_order_of_ageing_and_keys(settings, pool):
    """S3, S5: task-sync writes aged tasks to the ready topic before younger urgent ones, and an end
    lets the next task of its key follow, without a sweep."""
    await register(pool, ageing_s=10.0, max_per_key=2)
    aged = await submit(pool, 2, key="a", priority=Priority.LOWEST)
    await pool.execute("UPDATE task SET created_at = now() - interval '1 h'")
    urgent = await submit(pool, 2, key="a", priority=Priority.HIGHEST)
    other = await submit(pool, 1, key="b", priority=Priority.HIGHEST)
    async with running_service(create_app(settings)):
        await become(pool, "queued", 3)
        await finish(pool, aged[:1])
        await become(pool, "queued", 1, f"id = {urgent[0]}")
        assert [task_id for task_id, _ in await released(settings)] == [*aged, *other, urgent[0]]
        # Ageing, or no ageing, takes effect without a restart.
        await types.change(pool, "t", lambda found: dataclasses.replace(found, ageing_s=None))
        await finish(pool, aged[1:])
        await become(pool, "queued", 1, f"id = {urgent[1]}")


@pytest.fixture
async def aged_backlog(pool, settings):
    """Creates 100,000 aged tasks of five levels, of a full tenant, and ten of each level of another
    tenant."""
    await register(pool, max_per_key=2, ageing_s=1.0)
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context, key, priority, tracked, created_at)"
        " SELECT 't', CASE WHEN n <= 2 THEN 'queued' ELSE 'ready' END, 'start', 'json', 'null',"
        "        CASE WHEN n <= $1 THEN 'full' ELSE 'other' END, n % 5, n <= 2, now() - interval '1 h'"
        " FROM generate_series(1, $1 + 50) AS n",
        ROWS,
    )
    connection = await connect(settings.postgres, "plans")
    yield connection
    await connection.close()


async def test_a_choice_among_100_000_aged_rows_reads_few(aged_backlog, pool):
    """S5: with ageing, choosing tasks probes an index once for each key and level, and reads the
    submission of those tasks only that may be chosen."""
    page = {"type": "t", "first": "", "end": None, "keys": 256, "max_per_key": 2, "tasks": 10}
    page |= {"levels": list(range(5)), "waits_s": [float(level) for level in range(5)], "excluded": []}
    for analysed in (False, True):
        if analysed:
            await pool.execute("VACUUM ANALYZE task")
        read = index_entries(await plan(aged_backlog, "limits.key_queues", **page))
        assert read.pop("task_release_key") <= 50
        assert read.pop("task_in_flight") <= 10
        # Two tasks of each level but the first one.
        assert read.pop("task_pkey") == 8
        assert sum(read.values()) == 0, read
        oldest = index_entries(
            await plan(aged_backlog, "limits.heads", type="t", limit=1, finish_first=False, excluded=[])
        )
        assert sum(oldest.values()) <= 15, oldest


@pytest.mark.parametrize("key", ["full", "other"])
async def test_a_count_ahead_among_100_000_aged_rows_reads_few(aged_backlog, pool, key):
    """S8: with ageing and keys, the counts of tasks ahead read a bounded number of tasks."""
    last = await pool.fetchval("SELECT max(id) FROM task WHERE key = $1 AND priority = 2", key)
    named = {"type": "t", "position": [0, last, 2, last], "limit": 50, "key": key, "ageing_s": 10_000.0}
    read = index_entries(await plan(aged_backlog, "why.ahead_by_key", **named))
    assert sum(read.values()) <= 5 * 2 * 50 + 20, read
    named |= {"levels": list(range(5)), "weight": 1, "above": 50}
    read = index_entries(await plan(aged_backlog, "why.ahead_by_round_robin", **named))
    # Own tasks of each level, tasks of the other key, and the two keys.
    assert sum(read.values()) <= 2 * (5 * 50 + 50) + 30, read
