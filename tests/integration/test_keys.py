"""Keys of a type: limits, pauses and turns as the owner of a type releases by them, and what choosing costs."""

import asyncio
from collections import Counter

import orjson
import pytest
from tests.integration.test_limits import become, finish, in_state, pool, register, settings, submit
from tests.running import running_service
from tests.waiting import wait_until

from penstock.core.task import Priority
from penstock.errors import NotFound
from penstock.postgres import advance, keys, types
from penstock.postgres.connection import connect
from penstock.postgres.keys import KeyChange
from penstock.postgres.queries import query
from penstock.postgres.session import open_session
from penstock.task_sync.app import create_app
from penstock.task_sync.limits import Limits

__all__ = ["pool", "settings"]  # fixtures


class Owner:
    """Releases as the gate does, without Kafka."""

    def __init__(self, pool, session):
        self.pool = pool
        self.woken = []
        self.limits = Limits(session, self.woken.append)

    async def release(self, limit=1_000):
        """One statement's worth: ids in order, and whether there may be more."""
        await self.limits.load()
        found = await self.limits.release((await types.all_types(self.pool))["t"], limit, list)
        return [task.fence.id for task in found.batch.tasks] if found.batch else [], found.more

    async def drain(self, limit=1_000):
        """All that may go."""
        ids, more = [], True
        while more:
            some, more = await self.release(limit)
            ids += some
        return ids


@pytest.fixture
async def owner(pool, database):
    async with open_session(database, "owner") as session:
        owner = Owner(pool, session)
        yield owner
        owner.limits.close()


async def of_key(pool, state="queued"):
    rows = await pool.fetch("SELECT key, count(*) AS tasks FROM task WHERE state = $1 GROUP BY key", state)
    return {row["key"]: row["tasks"] for row in rows}


async def test_no_key_has_more_in_flight_than_it_may_and_others_go_on(owner, pool):
    """S5: max_per_key holds for each key, known before or not; tasks without a key have none; a key's own limit wins."""
    await register(pool, max_per_key=2)
    await keys.change(pool, "t", "big", KeyChange(max_in_flight=4, limits=True))
    by_key = {key: await submit(pool, 6, key=key) for key in ("a", "big", "ü")}
    bare = await submit(pool, 3)
    ids = await owner.drain()
    assert ids == sorted([*by_key["a"][:2], *by_key["big"][:4], *by_key["ü"][:2], *bare]), "in order of ids"
    await finish(pool, by_key["a"][:1])
    assert await owner.drain() == [by_key["a"][2]]
    await advance.cancel(pool, by_key["big"][:2])
    assert await owner.drain() == by_key["big"][4:6]
    assert await of_key(pool) == {"a": 2, "big": 4, "ü": 2, "": 3}
    # What was released before there was a limit counts, too.
    await keys.change(pool, "t", "ü", KeyChange(max_in_flight=1, limits=True))
    await finish(pool, by_key["ü"][:1])
    assert await owner.drain() == []


async def test_a_key_has_its_room_over_all_levels(owner, pool):
    """S5: the limit of a key is one, however many levels its tasks wait at."""
    await register(pool, max_per_key=3)
    low = await submit(pool, 3, key="a", priority=Priority.LOW)
    high = await submit(pool, 2, key="a", priority=Priority.HIGH)
    assert await owner.drain() == [*high, low[0]]


async def test_a_paused_key_waits_and_nobody_else_also_with_another_owner(settings, pool):
    """S5: pause and resume of a key take effect within a second and survive a restart; resetting forgets all of it."""
    await register(pool)
    await keys.change(pool, "t", "a", KeyChange(paused=True))
    await submit(pool, 2, key="a")
    for round_ in (1, 2):
        async with running_service(create_app(settings)):
            await submit(pool, 1, key="b")
            await become(pool, "queued", round_)
            assert await of_key(pool) == {"b": round_}
            if round_ == 2:
                async with asyncio.timeout(1):
                    await keys.change(pool, "t", "a", KeyChange(paused=False))
                    await become(pool, "queued", 4)
                await keys.change(pool, "t", "a", KeyChange(paused=True))
                await submit(pool, 1, key="a")
                await submit(pool, 1, key="b")
                await become(pool, "queued", 3, "key = 'b'")
                assert len(await in_state(pool, "ready")) == 1
                assert await keys.reset(pool, "t", "a")
                await become(pool, "ready", 0)
    assert not await keys.reset(pool, "t", "a")
    assert not await pool.fetchval("SELECT keyed FROM task_type"), "nothing is asked of its keys any more"
    with pytest.raises(NotFound):
        await keys.change(pool, "nobody", "a", KeyChange(paused=True))


@pytest.mark.parametrize("what", ["change", "reset", "register"])
async def test_changes_at_the_same_time_leave_the_type_released_key_by_key(pool, what):
    """S5: who registers a type, or forgets or changes what is said of a key, while another key is paused or forgotten sees
    that: the pause that is left is heeded."""
    await register(pool)
    await keys.change(pool, "t", "old", KeyChange(weight=2))
    if what == "register":
        await keys.reset(pool, "t", "old")
    paused, limits = True, False
    else_done = {
        "change": lambda: keys.change(pool, "t", "paused", KeyChange(paused=True)),
        "reset": lambda: keys.reset(pool, "t", "old"),
        "register": lambda: register(pool, lease_ms=5_000),
    }[what]
    async with pool.acquire() as other:
        async with other.transaction():
            await other.fetchrow(query("types.lock"), "t")
            if what == "change":
                await other.fetch(query("keys.reset"), "t", "old")
            else:
                await other.fetch(query("keys.set"), "t", "paused", paused, None, None, limits)
            at_once = asyncio.create_task(else_done())

            async def waits_or_is_done():
                return at_once.done() or await pool.fetchval(
                    "SELECT count(*) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
                )

            await wait_until(waits_or_is_done, what="they are at it at the same time")
        await at_once
    assert await pool.fetchval("SELECT keyed FROM task_type")
    assert await pool.fetchval("SELECT paused FROM type_key WHERE key = 'paused'")


async def test_tasks_without_key_from_before_are_not_forgotten(owner, pool):
    """S5: what was submitted without key before its type was released key by key goes like what comes after, also what
    is ready only later."""
    await register(pool)
    first = await submit(pool, 3)
    await register(pool, max_per_key=1)
    later = await submit(pool, 2)
    assert await owner.drain() == [*first, *later]
    await pool.execute("UPDATE task SET state = 'ready', key = NULL WHERE id = $1", first[0])
    assert await owner.drain() == [], "nobody looks at every release"
    owner.limits._memories["t"].adopt_at_s = 0.0
    assert await owner.drain() == [first[0]]
    assert owner.limits._timers, "whoever looked too early looks again"


async def test_a_type_that_has_keys_again_looks_for_those_without_at_once(owner, pool):
    """S5: changes take effect within a second, also for a type that had keys before: what came without one meanwhile does
    not wait for the slow look."""
    await register(pool, max_per_key=1, max_in_flight=100)
    await submit(pool, 1)
    assert len(await owner.drain()) == 1
    await register(pool, max_in_flight=100)
    await owner.limits.load()
    assert await owner.drain() == []
    meanwhile = await submit(pool, 2)
    await register(pool, max_per_key=1, max_in_flight=100)
    assert await owner.drain() == meanwhile


async def test_a_long_line_is_looked_through_in_pieces(owner, pool, monkeypatch):
    """S5: a line is looked through for tasks without a key a piece at a time and from where the last one ended: the first
    time at once, later with releases between; what has no key is found wherever it is."""
    monkeypatch.setattr("penstock.task_sync.limits.ADOPTED_AT_ONCE", 2)
    await register(pool, max_per_key=1)
    full = await submit(pool, 5, key="full")
    bare = await submit(pool, 2, priority=Priority.LOW)
    await pool.execute("UPDATE task SET key = NULL WHERE id = ANY ($1::bigint[])", bare)
    assert await owner.drain() == [full[0], *bare]
    await submit(pool, 3, key="full")
    [late] = await submit(pool, 1, priority=Priority.LOW)
    await pool.execute("UPDATE task SET key = NULL WHERE id = $1", late)
    found = []
    for _ in range(4):
        assert found == []
        owner.limits._memories["t"].adopt_at_s = 0.0
        ids, more = await owner.release()
        assert not more
        found += ids
    assert found == [late]


async def test_a_small_tenant_is_done_within_a_few_windows(owner, pool):
    """S3: two tenants, one with thousands of tasks and one with 10: fair, the small one has its share of each window,
    whatever waits before it; a key that weighs three has three a turn."""
    await register(pool, fair=True)
    await keys.change(pool, "t", "large", KeyChange(weight=3))
    await submit(pool, 5_000, key="large")
    small = set(await submit(pool, 10, key="small"))
    turns = []
    for limit in (7, 1, 12, 20):
        turns += ["small" if task_id in small else "large" for task_id in (await owner.release(limit))[0]]
    assert turns == (["large"] * 3 + ["small"]) * 10


async def test_without_turns_the_first_tasks_go_first(owner, pool):
    """S3: unless a type is fair, keys play no part in the order."""
    await register(pool, max_per_key=1_000)
    large = await submit(pool, 600, key="large")
    small = await submit(pool, 10, key="small")
    assert await owner.drain(50) == [*large, *small]


async def test_priority_goes_before_turns(owner, pool):
    """S3: keys take turns within a level; a higher level goes first, whose ever it is."""
    await register(pool, fair=True)
    low = {key: await submit(pool, 2, key=key, priority=Priority.LOW) for key in ("a", "b")}
    high = await submit(pool, 3, key="b", priority=Priority.HIGH)
    assert await owner.drain() == [*high, low["a"][0], low["b"][0], low["a"][1], low["b"][1]]


@pytest.mark.parametrize("fair", [False, True])
async def test_more_keys_than_a_page_are_all_served(owner, pool, fair, monkeypatch):
    """S5, S3: however many keys there are, and however many are full or paused, all others are served, each its share,
    and then nothing is left to try."""
    monkeypatch.setattr("penstock.task_sync.limits.KEYS_AT_ONCE", 4)
    await register(pool, max_per_key=2, fair=fair)
    names = [f"k{number:02}" for number in range(30)]
    for name in names[5:15]:
        await keys.change(pool, "t", name, KeyChange(paused=True))
    owners = {task_id: name for name in names for task_id in await submit(pool, 3, key=name)}
    order = await owner.drain(7)
    assert await of_key(pool) == dict.fromkeys([*names[:5], *names[15:]], 2)
    if fair:
        assert Counter(owners[task_id] for task_id in order[:20]) == Counter([*names[:5], *names[15:]])
    assert await owner.release(7) == ([], False)


ROWS = 100_000


async def plan(connection, name, *arguments):
    """The nodes of a statement's plan, as it ran; what it changed is undone."""
    async with connection.transaction():
        text = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {query(name)}", *arguments)
        found, nodes = [orjson.loads(text)[0]["Plan"]], []
        while found:
            node = found.pop()
            nodes.append(node)
            found += node.get("Plans", [])
    return nodes


def of_tasks(nodes):
    """How each index of `task` was read: kind of scan, and rows in all, those it read in vain included."""
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


def entries(nodes):
    """How many entries of each index were read, where tasks may also be fetched by bitmap; no table is read as a whole."""
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan"]
    found = Counter()
    for node in nodes:
        if "Index Name" in node:
            rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            found[node["Index Name"]] += rows * node["Actual Loops"]
    return found


@pytest.fixture
async def crowded(pool, settings):
    """100,000 tasks of a tenant that is full, and behind them ten of another and ten of a plain type."""
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


async def test_choosing_among_100_000_blocked_rows_reads_a_few(crowded):
    """S5: one probe of an index for each key, whatever waits behind it: ten tasks behind 100,000 blocked ones cost tens
    of rows; a limit counts what is in flight and no more."""
    nodes = await plan(crowded, "limits.lines", "t", Priority.MEDIUM, "", None, 256, 2, 10)
    read = of_tasks(nodes)
    assert set(read) <= {("Index Only Scan", "task_ready_key"), ("Index Only Scan", "task_in_flight")}
    assert sum(read.values()) <= 30, read
    rows = await crowded.fetch(query("limits.lines"), "t", Priority.MEDIUM, "", None, 256, 2, 10)
    assert [(row["key"], row["room"], len(row["ids"] or ())) for row in rows] == [
        ("full", 0, 0),
        ("other", 2, 2),
    ]
    counted = of_tasks(await plan(crowded, "limits.in_flight", "t"))
    assert counted == {("Index Only Scan", "task_in_flight"): 2}


async def test_looking_for_tasks_without_a_key_reads_a_piece_of_the_line(crowded):
    """S5: of 100,000 tasks that have keys, a look for those without reads as many as it may, also in the middle; so does a
    look for what has begun."""
    middle = await crowded.fetchval("SELECT min(id) FROM task WHERE type = 't'") + ROWS // 2
    for name in ("limits.adopt", "limits.track_ready"):
        for place in ((-1, 0), (int(Priority.MEDIUM), middle)):
            read = entries(await plan(crowded, name, "t", *place, 50))
            assert read.pop("task_ready") == 50
            assert sum(read.values()) == 0, read


async def test_counting_what_is_in_flight_reads_that(crowded):
    """S5: a type that gets a limit is looked through for what is in flight, whatever waits."""
    for begun in (False, True):
        read = entries(await plan(crowded, "limits.track", "plain", begun, 5_000))
        assert sum(read.values()) <= 10, read


async def test_a_plain_type_is_chosen_by_its_index_alone(crowded):
    """S3: 100,000 tasks wait: the statement reads as many entries of the index as it releases, and none of the indexes
    that limits and keys need."""
    tracked = False
    read = of_tasks(await plan(crowded, "release.release", "plain", 10, [], tracked))
    assert read.pop(("Index Only Scan", "task_ready")) == 10
    # What was chosen is then found by its key, by a scan or by a bitmap.
    assert read in ({("Index Scan", "task_pkey"): 10}, {("Bitmap Heap Scan", "task_pkey"): 10})
    assert await crowded.fetchval("SELECT count(*) FROM task WHERE type = 'plain' AND tracked") == 0


async def test_ageing_and_finishing_first_read_the_heads_of_the_levels(crowded):
    """S3: an order of its own costs the first few of each level, whatever waits behind them."""
    for finish_first in (False, True):
        read = of_tasks(await plan(crowded, "limits.heads", "plain", 10, finish_first))
        assert set(read) <= {("Index Scan", "task_ready"), ("Index Scan", "task_ready_begun")}
        assert sum(read.values()) <= 50, read
