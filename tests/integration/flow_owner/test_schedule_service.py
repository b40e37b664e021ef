"""The service `flows` runs schedules: flows start, queue, wait for each other and end."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import orjson
import pytest
from tests.integration.flow_owner.support import Owner, definition
from tests.support.gateways import running_gateway
from tests.support.services import running_service
from tests.support.waiting import in_time, wait_until

from penstock.client import Client
from penstock.core.schedule_policy import CatchUp, Overlap, Rules
from penstock.core.task import Priority
from penstock.cron import parse_cron
from penstock.errors import Stalled
from penstock.flow_owner.app import create_app
from penstock.flow_owner.settings import FlowsSettings
from penstock.postgres import backfills, schedules
from penstock.postgres.schedule_rows import Settings


async def test_queued_ticks_and_flows_that_wait_for_a_tick_end(where, pool):
    """F4: three missed ticks of two schedules, one after the other; each flow of the second waits
    for that of the first with its tick."""
    # The notifications bring all of it, and no sweep.
    settings = FlowsSettings(**where, flow_own_retry_s=0.2, flow_sweep_s=600.0)
    first = definition(
        "first",
        inputs={"at": {}},
        nodes={"rest": {"kind": "timer", "delay_s": 0.05}},
        output="inputs.at",
    )
    second = definition(
        "second",
        nodes={"wait": {"kind": "wait", "flow": "first", "tick": "same"}},
        output="[nodes.wait.output, flow.tick]",
    )
    await Owner(pool).define(first, second)
    rules = Rules(catch_up=CatchUp.ALL, catch_up_limit=3, overlap=Overlap.QUEUE_ALL)
    position = await schedules.clock(pool) - timedelta(days=3)
    ticks = parse_cron("0 3 * * *", "UTC")
    for name, given in (("second", None), ("first", '{"at": tick}')):
        await schedules.put(
            pool,
            Settings(name=name, flow=name, cron="0 3 * * *", zone="UTC", input=given, rules=rules),
            position=position,
            next_tick=ticks.first_after(position),
            actor=None,
        )
    async with running_service(create_app(settings)):

        async def outputs():
            rows = await pool.fetch(
                "SELECT tick, output FROM flow WHERE name = 'second' AND status = 'succeeded' ORDER BY id"
            )
            return rows if len(rows) == 3 else None

        found = await wait_until(outputs, what="each tick has its flow")
    expected = list(ticks.between(position, await schedules.clock(pool)))
    assert [row["tick"] for row in found] == expected
    for row in found:
        tick = row["tick"].isoformat().replace("+00:00", "Z")
        assert orjson.loads(row["output"]) == [tick, tick]


async def test_a_schedule_starts_plain_tasks(where, pool):
    """F4: at each tick a task of the type, with the value of the expression as its context and the
    priority of the schedule; backfills and overlap hold as for flows."""
    async with (
        running_gateway(**where) as gateway,
        Client(gateway.url) as client,
        running_service(create_app(FlowsSettings(**where, flow_own_retry_s=0.2))),
    ):
        await client.put_schedule("report", type="a", cron="0 3 * * *", input="tick", priority="HIGH")
        since = await schedules.clock(pool) - timedelta(days=2)
        await client.backfill("report", since, wait=False)

        async def tasks():
            rows = await pool.fetch("SELECT * FROM task ORDER BY context")
            return rows if len(rows) == 2 else None

        found = await wait_until(tasks, what="each tick has its task")
    ticks = parse_cron("0 3 * * *", "UTC").between(since, await schedules.clock(pool))
    assert [orjson.loads(row["context"]) for row in found] == [
        tick.isoformat().replace("+00:00", "Z") for tick in ticks
    ]
    assert {(row["type"], row["flow_priority"]) for row in found} == {("a", Priority.HIGH)}


@pytest.mark.parametrize("part", ["schedule", "backfill"])
async def test_a_loop_that_hangs_ends_the_process_and_the_next_one_goes_on(where, pool, monkeypatch, part):
    """O2a: a schedule, or a backfill, without progress is a stall, and nothing of it is lost."""
    settings = FlowsSettings(**where, stall_timeout_s=5.0)
    await Owner(pool).define(definition("first", nodes={"rest": {"kind": "timer", "delay_s": 0.05}}))
    now = await schedules.clock(pool)
    position = now - timedelta(minutes=2) if part == "schedule" else now
    await schedules.put(
        pool,
        Settings(name="first", flow="first", cron="* * * * *"),
        position=position,
        next_tick=parse_cron("* * * * *", "UTC").first_after(position),
        actor=None,
    )
    if part == "backfill":
        await backfills.create(
            pool,
            schedule="first",
            since=now - timedelta(minutes=2),
            until=now,
            total=2,
            position=now - timedelta(minutes=2),
            rate=None,
            max_running=None,
            rerun=False,
            asked_by="test",
            actor=None,
        )

    async def hang(*_arguments, **_options):
        await asyncio.Event().wait()

    with monkeypatch.context() as stuck:
        stuck.setattr(f"penstock.flow_owner.{part}_loop.start", hang)
        with pytest.raises(Stalled, match="schedules: no progress for 5 s"):
            await in_time(create_app(settings)(asyncio.Event(), lambda: None))
    async with running_service(create_app(settings)):
        await wait_until(
            lambda: pool.fetchval(
                "SELECT count(*) FROM flow WHERE (backfill IS NULL) = $1", part == "schedule"
            )
        )
