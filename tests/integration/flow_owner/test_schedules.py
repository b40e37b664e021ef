"""Schedules and backfills: each tick starts one flow, or is recorded as skipped."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import orjson
import pytest
from tests.support.waiting import wait_until

from penstock.core.schedule_policy import CatchUp, Overlap, Rules
from penstock.cron import parse_cron
from penstock.flow_owner.schedule_loop import ScheduleLoop
from penstock.objects import ObjectStore
from penstock.postgres import backfills, flow_definitions, schedules
from penstock.postgres.schedule_rows import Settings
from penstock.settings import Platform
from penstock.task_sync.history import History
from penstock.task_sync.settings import TaskSyncSettings

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


@pytest.fixture
async def loop_of(pool, database, tmp_path):
    """Makes replicas of the loop over a database with the definition `nightly`."""
    await flow_definitions.insert(
        pool,
        {
            "flow": "nightly",
            "version": 1,
            "inputs": {"day": {"default": "today"}},
            "nodes": {"one": {"kind": "task", "type": "a"}, "two": {"kind": "task", "type": "b"}},
        },
        None,
    )
    objects = ObjectStore((tmp_path / "objects").as_uri())
    return lambda: ScheduleLoop(Platform(postgres=database), pool, objects)


def utc(*moment):
    return datetime(*moment, tzinfo=UTC)


async def put(pool, name="nightly", *, cron="0 * * * *", since=None, zone="UTC", flow="nightly", **fields):
    """A schedule whose ticks are decided up to a moment, by default that of an hour ago."""
    now = await schedules.clock(pool)
    position = since or now - HOUR
    rules = Rules(
        **{
            field: fields.pop(field)
            for field in ("catch_up", "overlap", "catch_up_limit", "catch_up_rate")
            if field in fields
        }
    )
    settings = Settings(name=name, flow=flow, cron=cron, zone=zone, rules=rules, **fields)
    next_tick = parse_cron(cron, zone).first_after(position)
    return await schedules.put(pool, settings, position=position, next_tick=next_tick, actor=None)


async def flows(pool, name="nightly"):
    return await pool.fetch("SELECT * FROM flow WHERE schedule = $1 ORDER BY tick, id", name)


async def end(pool, flow_id, status="succeeded"):
    await pool.execute("UPDATE flow SET status = $2, finished_at = now() WHERE id = $1", flow_id, status)


async def skips(pool, name="nightly"):
    return [
        (row["reason"], row["ticks"])
        for row in reversed(await schedules.skips(pool, name, before=None, limit=50))
    ]


async def make_due(pool, name="nightly", *, ago):
    """Sets a schedule back, as if nothing had looked since then."""
    now = await schedules.clock(pool)
    schedule = await schedules.get(pool, name)
    ticks = parse_cron(schedule.settings.cron, schedule.settings.zone)
    await pool.execute(
        "UPDATE schedule SET position = $2, next_tick = $3, next_at = $3 WHERE name = $1",
        name,
        now - ago,
        ticks.first_after(now - ago),
    )


async def test_a_tick_starts_a_flow_with_inputs_of_its_own(pool, loop_of):
    """F4: nominal tick, version, inputs, priority and labels; the newest definition at the tick."""
    await put(
        pool,
        cron="0 2 * * *",
        zone="Europe/Berlin",
        since=utc(2026, 10, 24, 12),
        input='{"day": local_tick}',
        labels={"team": "data"},
        overlap=Overlap.ALLOW,
    )
    loop = loop_of()
    assert await loop.fire_due() == 1
    assert await loop.fire_due() == 0
    [flow] = await flows(pool)
    berlin = parse_cron("0 2 * * *", "Europe/Berlin")
    newest = max(berlin.between(utc(2026, 10, 24, 12), await schedules.clock(pool)))
    assert flow["tick"] == newest
    assert orjson.loads(flow["inputs"])["day"].startswith(newest.strftime("%Y-%m-%dT02:00:00+0"))
    assert (flow["version"], flow["unfinished"], orjson.loads(flow["labels"])) == (1, 2, {"team": "data"})
    [(reason, ticks)] = await skips(pool)
    since = utc(2026, 10, 24, 12)
    assert (reason, ticks) == ("catch_up", len(list(berlin.between(since, newest))) - 1)
    schedule = await schedules.get(pool, "nightly")
    assert schedule.next_tick == berlin.first_after(newest)
    assert schedule.to_wire()["last_tick"] == newest


async def test_a_week_of_outage_and_a_clock_that_is_set_back(pool, loop_of):
    """F4: catch-up decides about a week; what is due again after the clock went back starts
    nothing twice."""
    week = timedelta(days=7)
    now = await schedules.clock(pool)
    await put(pool, "latest", since=now - week, overlap=Overlap.ALLOW)
    await put(pool, "none", since=now - week, catch_up=CatchUp.NONE, overlap=Overlap.ALLOW)
    await put(
        pool,
        "all",
        since=now - week,
        catch_up=CatchUp.ALL,
        catch_up_limit=30,
        catch_up_rate=100.0,
        overlap=Overlap.ALLOW,
    )
    loop = loop_of()
    assert await loop.fire_due() == 3
    on_time = int(now - now.replace(minute=0, second=0, microsecond=0) < MINUTE)
    counts = {name: len(await flows(pool, name)) for name in ("latest", "none", "all")}
    assert counts == {"latest": 1, "none": on_time, "all": 30 + on_time}
    assert [reason for reason, _ in await skips(pool, "all")] == ["catch_up"]
    # As if the position had been written before the clock went back.
    for name in ("latest", "all"):
        await make_due(pool, name, ago=3 * HOUR)
    before = [flow["id"] for flow in await flows(pool, "all")]
    assert await loop.fire_due() == 2
    assert [flow["id"] for flow in await flows(pool, "all")] == before
    assert len(await flows(pool, "latest")) == 1


async def test_two_owners_decide_about_overlap_one_after_the_other(pool, loop_of):
    """F4: with four replicas at once, no schedule has two running flows."""
    names = [f"s{number}" for number in range(40)]
    for name in names:
        await put(pool, name, overlap=Overlap.SKIP)
    owners = [loop_of() for _ in range(4)]
    for _ in range(3):
        await asyncio.gather(*(owner.fire_due() for owner in owners))
        for name in names[::2]:
            await make_due(pool, name, ago=3 * HOUR)
        await asyncio.gather(*(owner.fire_due() for owner in owners))
        running = await pool.fetchval(
            "SELECT max(flows) FROM (SELECT count(*) AS flows FROM flow WHERE status = 'running' GROUP BY schedule) AS c"
        )
        assert running == 1


async def test_queued_ticks_start_when_the_flow_ends(pool, loop_of):
    """F4: `queue_all` starts each in order by the notification, and `queue_one` the latest; a
    flow that fails frees the next one as well."""
    await put(pool, "every", overlap=Overlap.QUEUE_ALL, catch_up=CatchUp.ALL)
    await put(pool, "one", overlap=Overlap.QUEUE_ONE)
    running = asyncio.create_task(loop_of().run())
    try:
        for name in ("every", "one"):
            await wait_until(lambda name=name: flows(pool, name))
            await pool.execute("UPDATE flow SET tick = tick - interval '1 day' WHERE schedule = $1", name)
            await make_due(pool, name, ago=5 * HOUR)
            await pool.execute("SELECT pg_notify('penstock_schedules', '')")

        async def queued(name, number):
            return len((await schedules.get(pool, name)).queued) == number

        await wait_until(lambda: queued("every", 5))
        await wait_until(lambda: queued("one", 1))
        for name, number in (("every", 4), ("one", 0)):
            [flow] = await flows(pool, name)
            await end(pool, flow["id"], "failed")
            await wait_until(lambda name=name, number=number: queued(name, number))
            assert [
                each["status"] for each in sorted(await flows(pool, name), key=lambda each: each["id"])
            ] == [
                "failed",
                "running",
            ]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert await skips(pool, "every") == []
    assert await skips(pool, "one") == [("catch_up", 4)]


async def test_the_other_flow_is_cancelled(pool, loop_of):
    """F4: `cancel_other` cancels what is running, and starts the tick."""
    await put(pool, overlap=Overlap.CANCEL_OTHER)
    loop = loop_of()
    await loop.fire_due()
    [first] = await flows(pool)
    await pool.execute("DELETE FROM flow WHERE id = $1", first["id"])
    await make_due(pool, ago=HOUR)
    await loop.fire_due()
    [first] = await flows(pool)
    await pool.execute("UPDATE flow SET tick = tick - interval '1 day' WHERE id = $1", first["id"])
    await make_due(pool, ago=HOUR)
    await loop.fire_due()
    assert len(await flows(pool)) == 2
    cancelled = await pool.fetch("SELECT flow_id FROM flow_inbox WHERE kind = 'cancel'")
    assert [row["flow_id"] for row in cancelled] == [first["id"]]


async def test_a_tick_that_cannot_start_is_recorded_and_holds_up_nothing(pool, loop_of):
    """F4: a definition that does not exist, and inputs that fail; the next schedules start."""
    await put(pool, "absent", flow="no-such-flow")
    await put(pool, "wrong", input='{"day": tick.nothing}')
    await put(pool, "undeclared", input='{"month": tick}')
    await put(pool, "sound")
    loop = loop_of()
    await loop.fire_due()
    assert len(await flows(pool, "sound")) == 1
    for name, text in (("absent", "no-such-flow"), ("wrong", "/input"), ("undeclared", "month")):
        assert await skips(pool, name) == [("error", 1)]
        schedule = await schedules.get(pool, name)
        assert text in schedule.to_wire()["error"]
        assert schedule.next_tick > await schedules.clock(pool)


async def test_a_thousand_schedules_of_one_minute(pool, loop_of):
    """F4: two replicas start each once."""
    await put(pool, "s0", cron="* * * * *", since=await schedules.clock(pool) - MINUTE)
    columns = (
        "flow, version, cron, zone, input, priority, labels, catch_up, catch_up_limit, catch_up_rate, overlap, "
        "paused, position, next_tick, next_at"
    )
    await pool.execute(
        f"INSERT INTO schedule (name, {columns}) SELECT 's' || n, {columns} FROM schedule, generate_series(1, 999) AS n"
    )
    fired = await asyncio.gather(*(_drain(loop_of()) for _ in range(2)))
    assert sum(fired) >= 1_000
    assert await pool.fetchval("SELECT count(DISTINCT schedule) FROM flow") == 1_000
    assert await pool.fetchval("SELECT count(*) FROM flow GROUP BY schedule ORDER BY 1 DESC LIMIT 1") <= 2


async def _drain(loop):
    fired = 0
    while found := await loop.fire_due():
        fired += found
    return fired


async def _backfill(pool, *, days, rate=None, max_running=None, rerun=False):
    now = await schedules.clock(pool)
    since, until = now - timedelta(days=days), now
    schedule = await schedules.get(pool, "nightly")
    ticks = parse_cron(schedule.settings.cron, schedule.settings.zone)
    row = await backfills.create(
        pool,
        schedule="nightly",
        since=since,
        until=until,
        total=len(list(ticks.between(since, until))),
        position=since,
        rate=rate,
        max_running=max_running,
        rerun=rerun,
        asked_by="ann",
        actor=None,
    )
    return row["id"]


async def test_a_backfill_runs_each_tick_once(pool, loop_of, database, tmp_path):
    """F4: ticks that have a flow are left, or run again when asked; the
    schedule's own overlap is not concerned."""
    settings = TaskSyncSettings(
        postgres=database, objects=(tmp_path / "objects").as_uri(), history_keep_days=7.0, history_rate=1e6
    )
    await put(pool, input='{"day": tick}')
    loop = loop_of()
    await loop.fire_due()
    own = len(await flows(pool))
    backfill_id = await _backfill(pool, days=50)
    began = asyncio.get_running_loop().time()
    while (await backfills.get(pool, backfill_id))["started"] + own < 1_200:
        assert await loop.backfills.run_batch(())
    took_s = asyncio.get_running_loop().time() - began
    print(f"{1_200 / took_s:,.0f} runs of a backfill a second")
    row = await backfills.get(pool, backfill_id)
    assert (row["state"], row["started"] + row["already_run"]) == ("running", row["total"])
    found = await flows(pool)
    assert len(found) == len({flow["tick"] for flow in found})
    await pool.execute("UPDATE flow SET status = 'failed' WHERE backfill = $1", backfill_id)
    assert await loop.backfills.run_batch({"nightly"})
    row = await backfills.get(pool, backfill_id)
    assert row["state"] == "done"
    assert await backfills.counts(pool, [backfill_id]) == {backfill_id: {"failed": row["started"]}}
    # Also those whose flows have moved to history are left.
    await pool.execute("DELETE FROM flow_inbox")
    await pool.execute(
        "UPDATE flow SET finished_at = now() - interval '10 days' WHERE backfill = $1", backfill_id
    )
    history = History(settings, ObjectStore(settings.objects))
    while await history.round():
        pass
    assert len(await flows(pool)) == own
    second = await _backfill(pool, days=1)
    while await loop.backfills.run_batch(()):
        pass
    row = await backfills.get(pool, second)
    assert (row["started"], row["already_run"]) == (0, row["total"])
    again = await _backfill(pool, days=1, rerun=True)
    while await loop.backfills.run_batch(()):
        pass
    row = await backfills.get(pool, again)
    assert (row["started"], row["already_run"]) == (row["total"], 0)
    reruns = await pool.fetch("SELECT rerun_of FROM flow WHERE backfill = $1", again)
    assert all(each["rerun_of"] for each in reruns)


async def test_a_backfill_has_limits_and_can_be_stopped(pool, loop_of):
    """F4: `max_running` frees a place with each end, the rate is kept, and stopping cancels."""
    await put(pool, paused=True)
    running = asyncio.create_task(loop_of().run())
    try:
        limited = await _backfill(pool, days=2, max_running=3)

        async def started(number, backfill_id=limited):
            return (await backfills.get(pool, backfill_id))["started"] == number

        await wait_until(lambda: started(3))
        await end(pool, (await flows(pool))[0]["id"], "cancelled")
        await wait_until(lambda: started(4))
        async with pool.acquire() as connection, connection.transaction():
            await backfills.stop(connection, limited, "bob", cancel=True)
        row = await backfills.get(pool, limited)
        assert (row["state"], row["stopped_by"], row["started"]) == ("stopped", "bob", 4)
        assert await pool.fetchval("SELECT count(*) FROM flow_inbox WHERE kind = 'cancel'") == 3
        slow = await _backfill(pool, days=20, rate=2.0)
        await wait_until(lambda: started(2, slow))
        row = await backfills.get(pool, slow)
        assert row["next_at"] > row["created_at"] + timedelta(seconds=0.9)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
