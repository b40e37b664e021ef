"""Concurrency keys of a type: limits, pauses, fair queueing, and the cost of choosing tasks."""

import asyncio
from collections import Counter

import orjson
import pytest
from tests.integration.task_sync.test_limits import become, finish, in_state, register, settings, submit
from tests.support.services import running_service
from tests.support.waiting import wait_until

from penstock.core.release_order import START, position_in
from penstock.core.task import Priority
from penstock.errors import NotFound
from penstock.postgres import advance, concurrency_keys, types
from penstock.postgres.concurrency_keys import ConcurrencyKeyChange
from penstock.postgres.connection import connect
from penstock.postgres.queries import bound, query
from penstock.postgres.session import open_session
from penstock.task_sync.app import create_app
from penstock.task_sync.limits import ReleaseLimiter

# Each test registers its types.
TASK_TYPES = ()

__all__ = ["settings"]  # fixtures


class Owner:
    """Releases tasks as task-sync's release loop does, without Kafka."""

    def __init__(self, pool, session):
        self.pool = pool
        self.woken = []
        self.limits = ReleaseLimiter(session, self.woken.append)

    async def release(self, limit=1_000):
        """Runs one release statement; returns ids in order, and whether there may be more."""
        await self.limits.load()
        found = await self.limits.release((await types.all_types(self.pool))["t"], limit, list)
        return [task.fence.id for task in found.batch.tasks] if found.batch else [], found.more

    async def drain(self, limit=1_000):
        """Releases all tasks that the limits allow."""
        ids, more = [], True
        while more:
            batch, more = await self.release(limit)
            ids += batch
        return ids


@pytest.fixture
async def owner(pool, database):
    async with open_session(database, "owner") as session:
        owner = Owner(pool, session)
        yield owner
        owner.limits.close()


async def tasks_by_key(pool, state="queued"):
    rows = await pool.fetch("SELECT key, count(*) AS tasks FROM task WHERE state = $1 GROUP BY key", state)
    return {row["key"]: row["tasks"] for row in rows}


async def test_a_key_at_its_limit_does_not_delay_other_keys(owner, pool):
    """S5: max_per_key limits each key, configured or not. A key's own limit takes precedence, and
    tasks without a key have no limit."""
    await register(pool, max_per_key=2)
    await concurrency_keys.change(pool, "t", "big", ConcurrencyKeyChange(max_in_flight=4, sets_limit=True))
    by_key = {key: await submit(pool, 6, key=key) for key in ("a", "big", "ü")}
    without_key = await submit(pool, 3)
    ids = await owner.drain()
    assert ids == sorted([*by_key["a"][:2], *by_key["big"][:4], *by_key["ü"][:2], *without_key]), (
        "tasks are not released in order of ids"
    )
    await finish(pool, by_key["a"][:1])
    assert await owner.drain() == [by_key["a"][2]]
    await advance.cancel(pool, by_key["big"][:2])
    assert await owner.drain() == by_key["big"][4:6]
    assert await tasks_by_key(pool) == {"a": 2, "big": 4, "ü": 2, "": 3}
    # A new limit also counts tasks released before it.
    await concurrency_keys.change(pool, "t", "ü", ConcurrencyKeyChange(max_in_flight=1, sets_limit=True))
    await finish(pool, by_key["ü"][:1])
    assert await owner.drain() == []


async def test_the_limit_of_a_key_covers_all_levels(owner, pool):
    """S5: a key has one limit for all priority levels."""
    await register(pool, max_per_key=3)
    low = await submit(pool, 3, key="a", priority=Priority.LOW)
    high = await submit(pool, 2, key="a", priority=Priority.HIGH)
    assert await owner.drain() == [*high, low[0]]


async def test_a_paused_key_stays_paused_with_another_owner(settings, pool):
    """S5: pausing or resuming a key takes effect without a sweep and survives a restart. A reset
    removes the pause."""
    await register(pool)
    await concurrency_keys.change(pool, "t", "a", ConcurrencyKeyChange(paused=True))
    await submit(pool, 2, key="a")
    for round_ in (1, 2):
        async with running_service(create_app(settings)):
            await submit(pool, 1, key="b")
            await become(pool, "queued", round_)
            assert await tasks_by_key(pool) == {"b": round_}
            if round_ == 2:
                await concurrency_keys.change(pool, "t", "a", ConcurrencyKeyChange(paused=False))
                await become(pool, "queued", 4)
                await concurrency_keys.change(pool, "t", "a", ConcurrencyKeyChange(paused=True))
                await submit(pool, 1, key="a")
                await submit(pool, 1, key="b")
                await become(pool, "queued", 3, "key = 'b'")
                assert len(await in_state(pool, "ready")) == 1
                assert await concurrency_keys.reset(pool, "t", "a")
                await become(pool, "ready", 0)
    assert not await concurrency_keys.reset(pool, "t", "a")
    assert not await pool.fetchval("SELECT keyed FROM task_type"), "the type still has key settings"
    with pytest.raises(NotFound):
        await concurrency_keys.change(pool, "unknown", "a", ConcurrencyKeyChange(paused=True))


@pytest.mark.parametrize("name", ["change", "reset", "register"])
async def test_concurrent_changes_keep_the_pause_of_a_key(pool, name):
    """S5: a change that overlaps a pause or reset of another key sees it. The remaining pause stays
    in effect."""
    await register(pool)
    await concurrency_keys.change(pool, "t", "old", ConcurrencyKeyChange(weight=2))
    if name == "register":
        await concurrency_keys.reset(pool, "t", "old")
    paused, limits = True, False
    operation = {
        "change": lambda: concurrency_keys.change(pool, "t", "paused", ConcurrencyKeyChange(paused=True)),
        "reset": lambda: concurrency_keys.reset(pool, "t", "old"),
        "register": lambda: register(pool, lease_ms=5_000),
    }[name]
    async with pool.acquire() as other:
        async with other.transaction():
            await other.fetchrow(query("types.lock"), "t")
            if name == "change":
                await other.fetch(query("concurrency_keys.reset"), "t", "old")
            else:
                await other.fetch(
                    *bound(
                        "concurrency_keys.set",
                        type="t",
                        key="paused",
                        paused=paused,
                        weight=None,
                        max_in_flight=None,
                        sets_limit=limits,
                    )
                )
            concurrent = asyncio.create_task(operation())

            async def waits_or_is_done():
                return concurrent.done() or await pool.fetchval(
                    "SELECT count(*) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
                )

            await wait_until(waits_or_is_done, what="both changes run at the same time")
        await concurrent
    assert await pool.fetchval("SELECT keyed FROM task_type")
    assert await pool.fetchval("SELECT paused FROM type_key WHERE key = 'paused'")


async def test_earlier_tasks_without_a_key_are_released(owner, pool):
    """S5: tasks without a key, submitted before the type had key settings, are released like later
    ones, also when they become ready later."""
    await register(pool)
    first = await submit(pool, 3)
    await register(pool, max_per_key=1)
    later = await submit(pool, 2)
    assert await owner.drain() == [*first, *later]
    await pool.execute("UPDATE task SET state = 'ready', key = NULL WHERE id = $1", first[0])
    assert await owner.drain() == [], "a release searched for tasks without a key too early"
    owner.limits._states["t"].empty_keys_at_s = 0.0
    assert await owner.drain() == [first[0]]
    assert owner.limits._timers, "no timer is set for the next search"


async def test_new_key_settings_release_tasks_without_a_key_at_once(owner, pool):
    """S5: a type that gets key settings again releases its tasks without a key at once, before the
    slow search."""
    await register(pool, max_per_key=1, max_in_flight=100)
    await submit(pool, 1)
    assert len(await owner.drain()) == 1
    await register(pool, max_in_flight=100)
    await owner.limits.load()
    assert await owner.drain() == []
    later = await submit(pool, 2)
    await register(pool, max_per_key=1, max_in_flight=100)
    assert await owner.drain() == later


async def test_a_long_queue_is_searched_in_batches(owner, pool, monkeypatch):
    """S5: the search for tasks without a key reads a batch at a time and continues where the last
    batch ended. The first search runs at once, later ones between releases."""
    monkeypatch.setattr("penstock.task_sync.limits.EMPTY_KEYS_PER_STATEMENT", 2)
    await register(pool, max_per_key=1)
    full = await submit(pool, 5, key="full")
    without_key = await submit(pool, 2, priority=Priority.LOW)
    await pool.execute("UPDATE task SET key = NULL WHERE id = ANY ($1::bigint[])", without_key)
    assert await owner.drain() == [full[0], *without_key]
    await submit(pool, 3, key="full")
    [late] = await submit(pool, 1, priority=Priority.LOW)
    await pool.execute("UPDATE task SET key = NULL WHERE id = $1", late)
    found = []
    for _ in range(4):
        assert found == []
        owner.limits._states["t"].empty_keys_at_s = 0.0
        ids, more = await owner.release()
        assert not more
        found += ids
    assert found == [late]


async def test_a_small_tenant_gets_its_share_of_each_window(owner, pool):
    """S3: with fair queueing a small tenant gets its share of each window behind thousands of
    tasks. A key of weight 3 gets three tasks a turn."""
    await register(pool, fair=True)
    await concurrency_keys.change(pool, "t", "large", ConcurrencyKeyChange(weight=3))
    await submit(pool, 5_000, key="large")
    small = set(await submit(pool, 10, key="small"))
    order = []
    for limit in (7, 1, 12, 20):
        order += ["small" if task_id in small else "large" for task_id in (await owner.release(limit))[0]]
    assert order == (["large"] * 3 + ["small"]) * 10


async def test_keys_do_not_change_the_order_without_fair_queueing(owner, pool):
    """S3: without fair queueing, keys do not change the order of release."""
    await register(pool, max_per_key=1_000)
    large = await submit(pool, 600, key="large")
    small = await submit(pool, 10, key="small")
    assert await owner.drain(50) == [*large, *small]


async def test_priority_precedes_fair_queueing(owner, pool):
    """S3: fair queueing applies within a priority level; a higher level goes first."""
    await register(pool, fair=True)
    low = {key: await submit(pool, 2, key=key, priority=Priority.LOW) for key in ("a", "b")}
    high = await submit(pool, 3, key="b", priority=Priority.HIGH)
    assert await owner.drain() == [*high, low["a"][0], low["b"][0], low["a"][1], low["b"][1]]


@pytest.mark.parametrize("fair", [False, True])
async def test_every_key_is_served_over_many_pages(owner, pool, fair, monkeypatch):
    """S5, S3: with many keys, full and paused ones included, every other key gets its share. Then
    no task remains to try."""
    monkeypatch.setattr("penstock.task_sync.key_scan.KEYS_PER_PAGE", 4)
    await register(pool, max_per_key=2, fair=fair)
    names = [f"k{number:02}" for number in range(30)]
    for name in names[5:15]:
        await concurrency_keys.change(pool, "t", name, ConcurrencyKeyChange(paused=True))
    owners = {task_id: name for name in names for task_id in await submit(pool, 3, key=name)}
    order = await owner.drain(7)
    assert await tasks_by_key(pool) == dict.fromkeys([*names[:5], *names[15:]], 2)
    if fair:
        assert Counter(owners[task_id] for task_id in order[:20]) == Counter([*names[:5], *names[15:]])
    assert await owner.drain(7) == []


ROWS = 100_000


async def plan(connection, name, *arguments, **named):
    """Runs a statement and returns the nodes of its plan; its changes are rolled back."""
    async with connection.transaction():
        text, *values = bound(name, *arguments, **named)
        text = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}", *values)
        found, nodes = [orjson.loads(text)[0]["Plan"]], []
        while found:
            node = found.pop()
            nodes.append(node)
            found += node.get("Plans", [])
    return nodes


def rows_by_index(nodes):
    """Returns the rows read from each index of `task`, by kind of scan, filtered rows included."""
    scans = [node for node in nodes if node.get("Relation Name") == "task" and "Scan" in node["Node Type"]]
    by_index = ("Index Scan", "Index Only Scan", "Bitmap Heap Scan")
    assert all(node["Node Type"] in by_index for node in scans), scans
    return {
        (node["Node Type"], node.get("Index Name") or node["Plans"][0]["Index Name"]): (
            node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        )
        * node["Actual Loops"]
        for node in scans
    }


def index_entries(nodes):
    """Returns the number of entries read from each index, and asserts that no table is scanned."""
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan"]
    found = Counter()
    for node in nodes:
        if "Index Name" in node:
            rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            found[node["Index Name"]] += rows * node["Actual Loops"]
    return found


@pytest.fixture
async def large_backlog(pool, settings):
    """Creates 100,000 tasks of a full tenant, ten of another tenant, and 100,000 of a plain
    type."""
    await register(pool, max_per_key=2)
    await types.register(pool, types.TaskType(name="plain", partitions=1))
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context, key, tracked)"
        " SELECT 't', CASE WHEN n <= 2 THEN 'queued' ELSE 'ready' END, 'start', 'json', 'null',"
        "        CASE WHEN n <= $1 THEN 'full' ELSE 'other' END, n <= 2"
        " FROM generate_series(1, $1 + 10) AS n",
        ROWS,
    )
    await pool.execute(
        "INSERT INTO task (type, state, stage, content_type, context)"
        " SELECT 'plain', 'ready', 'start', 'json', 'null' FROM generate_series(1, $1)",
        ROWS,
    )
    connection = await connect(settings.postgres, "plans")
    yield connection
    await connection.close()


async def test_a_choice_among_100_000_blocked_rows_reads_few(large_backlog):
    """S5: choosing tasks probes an index once for each key, so that ten tasks behind 100,000
    blocked ones cost tens of rows. A limit counts only tasks in flight."""
    page = {"type": "t", "levels": [Priority.MEDIUM], "waits_s": [0.0], "first": "", "end": None, "keys": 256}
    page |= {"max_per_key": 2, "tasks": 10, "excluded": []}
    nodes = await plan(large_backlog, "limits.key_queues", **page)
    read = rows_by_index(nodes)
    # Only ageing reads when a task was submitted.
    assert read.pop(("Index Scan", "task_pkey")) == 0
    assert set(read) <= {("Index Only Scan", "task_release_key"), ("Index Only Scan", "task_in_flight")}
    assert sum(read.values()) <= 30, read
    rows = await large_backlog.fetch(*bound("limits.key_queues", **page))
    assert [(row["key"], row["room"], len(row["places"] or ())) for row in rows] == [
        ("full", 0, 0),
        ("other", 2, 2),
    ]
    counted = rows_by_index(await plan(large_backlog, "limits.in_flight", "t", 10))
    assert counted == {("Index Only Scan", "task_in_flight"): 2}


async def test_a_search_for_tasks_without_a_key_reads_one_batch(large_backlog):
    """S5: the searches for tasks without a key and for begun tasks read one batch of 100,000 tasks,
    also from the middle."""
    middle = await large_backlog.fetchval("SELECT min(id) FROM task WHERE type = 't'") + ROWS // 2
    for name in ("limits.set_empty_keys", "limits.track_ready"):
        for position in (START, position_in(await large_backlog.fetchrow(*bound("why.facts", middle)))):
            read = index_entries(await plan(large_backlog, name, "t", position, 50))
            assert read.pop("task_release") == 50
            assert sum(read.values()) == 0, read


async def test_a_count_of_tasks_in_flight_reads_only_those(large_backlog):
    """S5: counting tasks in flight for a new limit reads only those, behind any number of ready
    tasks."""
    for begun in (False, True):
        read = index_entries(await plan(large_backlog, "limits.track", "plain", begun, 5_000))
        assert sum(read.values()) <= 10, read


async def test_a_plain_type_is_chosen_by_one_index(large_backlog):
    """S3: with 100,000 ready tasks, the statement reads one index entry for each task it releases,
    and no index of limits and keys."""
    read = rows_by_index(
        await plan(
            large_backlog,
            "release.release",
            type="plain",
            limit=10,
            confirmed=[],
            tracked=False,
            excluded=[],
            version=None,
        )
    )
    assert read.pop(("Index Only Scan", "task_release")) == 10
    # The chosen tasks are read by primary key, with an index scan or a bitmap scan.
    assert read in ({("Index Scan", "task_pkey"): 10}, {("Bitmap Heap Scan", "task_pkey"): 10})
    assert await large_backlog.fetchval("SELECT count(*) FROM task WHERE type = 'plain' AND tracked") == 0


async def test_ageing_and_finishing_first_read_the_heads_of_the_levels(large_backlog):
    """S3: ageing and finish_first read the first few tasks of each level, behind any number of
    tasks."""
    for finish_first in (False, True):
        read = rows_by_index(
            await plan(
                large_backlog, "limits.heads", type="plain", limit=10, finish_first=finish_first, excluded=[]
            )
        )
        # No task here is a child of another, whose start would be read by its id.
        assert read.pop(("Index Scan", "task_pkey"), 0) == 0
        assert set(read) <= {("Index Scan", "task_release"), ("Index Scan", "task_release_begun")}
        assert sum(read.values()) <= 50, read
