"""`penstock schedules`, the client, the gateway and the loop together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from tests.support.gateways import Caller
from tests.support.invoking import Invoke, documents, invoker
from tests.support.waiting import wait_until

from penstock.client import Client, FlowFilter
from penstock.errors import Invalid
from penstock.flow_owner.schedule_loop import ScheduleLoop
from penstock.objects import ObjectStore
from penstock.settings import Platform

TASK_TYPES = ()

NIGHTLY = {
    "flow": "nightly",
    "version": 1,
    "inputs": {"day": {}},
    "nodes": {"load": {"kind": "task", "type": "media", "input": "inputs.day"}},
}


@pytest.fixture
async def url(gateway: Caller) -> str:
    async with Client(gateway.url) as client:
        await client.put_flow_definition(NIGHTLY)
    return gateway.url


@pytest.fixture
def schedules(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_GATEWAY", url)
    return invoker("schedules")


@pytest.fixture
async def pool(pool: asyncpg.Pool, database: str, tmp_path: Path) -> AsyncIterator[asyncpg.Pool]:
    """A pool beside a running loop."""
    loop = ScheduleLoop(Platform(postgres=database), pool, ObjectStore((tmp_path / "objects").as_uri()))
    running = asyncio.create_task(loop.run())
    yield pool
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def end_flows(pool: asyncpg.Pool, status: str, number: int) -> None:
    """Ends the first flows, as their owner would."""

    async def have_started() -> bool:
        return await pool.fetchval("SELECT count(*) FROM flow WHERE backfill IS NOT NULL") >= number

    await wait_until(have_started)
    await pool.execute("UPDATE flow SET status = $1, finished_at = now() WHERE status = 'running'", status)


NIGHT = ("add", "night", "--flow", "nightly", "--cron", "30 2 * * *", "--input", '{"day": local_tick}')


async def test_a_schedule_from_the_command_line(schedules: Invoke, pool: asyncpg.Pool) -> None:
    """F4: created, listed, shown, previewed, paused, resumed, replaced and removed."""
    added = await schedules(*NIGHT, "--zone", "Europe/Berlin", "--overlap", "queue_one", "--label", "a=b")
    assert "flow nightly by 30 2 * * *, Europe/Berlin; next at " in added.output
    ticks = documents(
        await schedules("next", "night", "--after", "2026-10-24T12:00:00+0000", "--count", "2", "--json")
    )
    assert [tick["local"] for tick in ticks] == ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]
    assert (
        "2026-10-25T00:30:00Z"
        in (await schedules("next", "night", "--after", "2026-10-24T12:00:00+0000")).output
    )
    [shown] = documents(await schedules("get", "night", "--json"))
    assert (shown["overlap"], shown["catch_up"], shown["labels"]) == ("queue_one", "latest", {"a": "b"})
    assert "local_tick" in (await schedules("get", "night")).output
    assert "is paused" in (await schedules("pause", "night")).output
    # A deployment that puts its schedules again does not resume one.
    [kept] = documents(await schedules(*NIGHT, "--json"))
    assert (kept["paused"], kept["zone"], kept["overlap"]) == (True, "UTC", "skip")
    assert [each["name"] for each in documents(await schedules("list", "--json"))] == ["night"]
    assert "paused" in (await schedules("list", "--flow", "nightly")).output
    assert "goes on, next at" in (await schedules("resume", "night")).output
    assert "no tick was skipped" in (await schedules("skips", "night")).output
    # A tick that has passed starts a flow by the running loop.
    await pool.execute(
        "UPDATE schedule SET position = now() - interval '3 days', next_tick = now() - interval '2 days', next_at = now()"
    )
    assert "goes on" in (await schedules("resume", "night")).output
    await pool.execute("SELECT pg_notify('penstock_schedules', '')")
    await wait_until(lambda: pool.fetchval("SELECT count(*) FROM flow WHERE schedule = 'night'"))
    assert "catch_up" in (await schedules("skips", "night")).output
    assert "is removed" in (await schedules("remove", "night")).output
    gone = await schedules("get", "night")
    assert gone.exit_code != 0
    assert "penstock schedules list" in gone.output
    assert (await schedules("remove", "night")).exit_code == gone.exit_code


async def test_a_schedule_of_tasks_makes_its_definition(
    schedules: Invoke, url: str, pool: asyncpg.Pool
) -> None:
    """F4: the same tasks keep their version; an error names the option at fault."""
    tasks = ("add", "clips", "--type", "media", "--cron", "0 * * * *")
    [first] = documents(await schedules(*tasks, "--input", "[tick, 1]", "--json"))
    assert (first["flow"], first["version"]) == ("clips", 1)
    [same] = documents(await schedules(*tasks, "--json"))
    assert (same["version"], same["input"]) == (1, None)
    [other] = documents(await schedules(*tasks, "--stage", "cut", "--json"))
    assert other["version"] == 2
    async with Client(url) as client:
        stored = await client.flow_definition("clips", 2)
    assert stored["definition"]["nodes"]["task"]["stage"] == "cut"
    for given, words in (
        (("--type", "unknown"), "--type: there is no task type 'unknown'"),
        (("--type", "media", "--flow", "nightly"), "one of them"),
        (("--flow", "nightly", "--stage", "cut"), "--stage"),
        (("--type", "media", "--version", "1"), "--version"),
        (("--type", "media", "--input", "nothing"), "--input"),
        (("--type", "media", "--input", f"'{'x' * 4_090}'"), "--input"),
        ((), "one of them"),
    ):
        refused = await schedules("add", "clips", "--cron", "0 * * * *", *given)
        assert refused.exit_code != 0, given
        assert words in refused.output, given
    refused = await schedules("add", "nightly", "--type", "media", "--cron", "0 * * * *")
    assert "choose another name" in refused.output
    assert await pool.fetchval("SELECT version FROM schedule") == 2


async def test_the_history_of_a_schedule_has_runs_and_skips(
    schedules: Invoke, url: str, pool: asyncpg.Pool
) -> None:
    """F4: what became of each tick, the latest first: runs also from the history of flows, with
    the task of a schedule of tasks, and skips between them. Pages neither repeat nor miss one."""
    assert (await schedules("add", "clips", "--type", "media", "--cron", "0 * * * *")).exit_code == 0
    assert "no tick has passed" in (await schedules("history", "clips")).output

    async def run(hour: int, status: str, **columns: object) -> int:
        fields = {
            "name": "clips",
            "version": 1,
            "unfinished": 1,
            "schedule": "clips",
            "status": status,
            "tick": datetime(2026, 11, 1, hour, tzinfo=UTC),
            **columns,
        }
        slots = ", ".join(f"${number}" for number in range(2, len(fields) + 2))
        names = ", ".join(fields)
        flow_id: int = await pool.fetchval("SELECT coalesce(max(id), 100) + 1 FROM flow")
        await pool.execute(
            f"INSERT INTO flow (id, root_id, {names}) VALUES ($1, $1, {slots})", flow_id, *fields.values()
        )
        return flow_id

    failed = await run(5, "failed")
    old = await run(0, "succeeded")
    again = await run(5, "running", rerun_of=failed)
    filled = await run(4, "cancelled", backfill=7)
    task = await pool.fetchval(
        "INSERT INTO task (type, state, stage, content_type, context, flow_id, flow_root_id, flow_node, flow_generation)"
        " VALUES ('media', 'succeeded', 'cut', 'json', 'null', $1, $1, 'task', 0) RETURNING id",
        filled,
    )
    await pool.execute("SELECT penstock.history_open((now() AT TIME ZONE 'UTC')::date)")
    await pool.execute(
        "INSERT INTO flow_history (id, root_id, finished_at, flow, nodes, past_nodes, callbacks_owed, schedule, tick)"
        " SELECT id, root_id, now(), to_jsonb(f), '[]', '[]', '[]', schedule, tick FROM flow f WHERE id = $1",
        old,
    )
    await pool.execute("DELETE FROM flow WHERE id = $1", old)
    await pool.execute(
        "INSERT INTO schedule_skip (schedule, first_tick, last_tick, ticks, reason, detail) VALUES"
        " ('clips', '2026-11-01T01:00Z', '2026-11-01T03:00Z', 3, 'catch_up', NULL),"
        " ('clips', '2026-11-01T04:00Z', '2026-11-01T04:00Z', 1, 'error', 'no input')"
    )
    records = documents(await schedules("history", "clips", "--json"))
    shown = [(each["outcome"], each["flow_id"], each["task_id"], each["status"]) for each in records]
    assert shown == [
        ("rerun", again, None, "running"),
        ("started", failed, None, "failed"),
        ("backfilled", filled, task, "cancelled"),
        ("skipped", None, None, None),
        ("skipped", None, None, None),
        ("started", old, None, "succeeded"),
    ]
    output = (await schedules("history", "clips")).output
    for words in (f"rerun of {failed}", "backfill 7", "error: no input", "(3 ticks)", "catch_up"):
        assert words in " ".join(output.split()), output
    async with Client(url) as client:
        paged, cursor = [], ""
        while cursor is not None:
            query = [("limit", "1"), *([("cursor", cursor)] if cursor else [])]
            page = await client._request("GET", "/schedules/clips/history", query=query)
            paged += page["records"]
            cursor = page["next"]
        assert paged == records
        for wrong in ("1.3.5", "x", "1.1", "9" * 40 + ".1.1", "1.1.0"):
            with pytest.raises(Invalid, match="cursor"):
                await client._request("GET", "/schedules/clips/history", query=[("cursor", wrong)])


async def test_the_flows_of_a_schedule_have_its_callbacks_and_are_listed(
    schedules: Invoke, pool: asyncpg.Pool, url: str, tmp_path: Path
) -> None:
    """F4: a schedule gives its flows the events and callbacks that a start gives; the values of
    headers are secrets. Lists and operations take the schedule as a filter."""
    target = {"url": "https://example.com/done", "headers": {"x-token": "secret"}}
    (tmp_path / "target.json").write_text(json.dumps(target))
    [stored] = documents(
        await schedules(*NIGHT, "--callback", f"@{tmp_path / 'target.json'}", "--events", "all", "--json")
    )
    assert stored["events"] == "all"
    assert stored["callbacks"] == [{**target, "headers": {"x-token": "***"}}]
    shown = (await schedules("get", "night")).output
    assert "https://example.com/done" in shown
    assert "secret" not in shown
    refused = await schedules(*NIGHT, "--callback", "ftp://example.com")
    assert refused.exit_code != 0
    assert "--callback" in refused.output
    assert documents(await schedules("get", "night", "--json"))[0]["events"] == "all"
    await pool.execute(
        "UPDATE schedule SET position = now() - interval '1 day', next_tick = now() - interval '2 s', next_at = now()"
    )
    await pool.execute("SELECT pg_notify('penstock_schedules', '')")
    row = await wait_until(lambda: pool.fetchrow("SELECT * FROM flow WHERE schedule = 'night'"))
    assert row["events"] == "all"
    assert [json.loads(each) for each in row["callbacks"]] == [target]
    since = datetime.now(UTC) - timedelta(days=3)
    async with Client(url) as client:
        other = await client.submit_flow("nightly", {"day": "monday"})
        backfill = await client.backfill("night", since, max_running=1, wait=False)
        started = await wait_until(
            lambda: pool.fetchrow("SELECT * FROM flow WHERE backfill = $1", backfill["id"])
        )
        assert (started["events"], started["callbacks"]) == ("all", row["callbacks"])
        found = [flow.id async for flow in client.list_flows(schedule="night")]
        assert found == sorted([row["id"], started["id"]], reverse=True)
        assert other.id not in found
        operated = await client.operate_flows("pause", FlowFilter(schedule="night"), dry_run=True)
        assert operated.count == 2
    # Missing options mean defaults.
    [replaced] = documents(await schedules(*NIGHT, "--json"))
    assert (replaced["events"], replaced["callbacks"]) == ("final", [])


async def test_a_schedule_that_cannot_work_is_refused(schedules: Invoke) -> None:
    """F4, O8: where it is created, with the option at fault. One attempt names every option at
    fault."""
    nightly = ("--flow", "nightly", "--cron")
    for arguments, option, text in (
        ((*nightly, "0 0 LW * */8"), "--cron", "never runs"),
        ((*nightly, "99 * * * *"), "--cron", "wrong minute"),
        ((*nightly, "0 0 * * *", "--zone", "Mars"), "--zone", "no time zone"),
        (("--flow", "absent", "--cron", "0 0 * * *"), "--flow", "absent"),
        ((*nightly, "0 0 * * *"), "--input", "needs the input 'day'"),
        ((*nightly, "0 0 * * *", "--input", "tick +"), "--input", "Syntax error"),
        ((*nightly, "0 0 * * *", "--input", "tick"), "--input", "an object"),
        ((*nightly, "0 0 * * *", "--catch-up", "all"), "--overlap", "queue_all"),
    ):
        refused = await schedules("add", "night", *arguments)
        assert refused.exit_code == 3, (arguments, refused.output)
        assert f"{option}:" in refused.output, arguments
        assert text in refused.output, arguments
    rules = ("--catch-up", "all", "--overlap", "skip", "--callback", "ftp://x")
    refused = await schedules(
        *("add", "night", "--flow", "absent", "--cron", "99 * * * *", "--zone", "Mars", "--input", "tick +"),
        *rules,
    )
    assert refused.exit_code == 3, refused.output
    options = [line.split()[1] for line in refused.stderr.splitlines()]
    assert options == ["--cron:", "--zone:", "--overlap:", "--callback", "--input:"]
    refused = await schedules("add", "night", "--flow", "absent", "--cron", "99 * * * *", "--zone", "Mars")
    assert [line.split()[1] for line in refused.stderr.splitlines()] == ["--cron:", "--zone:", "--flow:"]
    refused = await schedules(
        "add", "night", "--flow", "nightly", "--cron", "0 0 LW * */8", "--input", '{"dya": 1}'
    )
    assert [line.split()[1] for line in refused.stderr.splitlines()] == ["--input", "--input:", "--cron:"]


async def test_a_backfill_from_the_command_line(schedules: Invoke, pool: asyncpg.Pool) -> None:
    """F4: dry run, progress to the end, a status that tells of a failure, the list, and a stop."""
    assert (await schedules(*NIGHT)).exit_code == 0
    day = ("backfill", "night", "--since", "2026-01-01T00:00:00+0000", "--until", "2026-01-10T00:00:00+0000")
    assert "9 of 9 ticks would start a flow; 0 have one" in (await schedules(*day, "--dry-run")).output
    running = asyncio.create_task(schedules(*day, "--by", "ann"))
    await end_flows(pool, "succeeded", 9)
    done = await running
    assert (done.exit_code, "9 of 9 ticks started a flow (9 succeeded)" in done.output) == (0, True), (
        done.output
    )
    rerun = asyncio.create_task(schedules(*day, "--rerun", "--max-running", "9", "--json"))
    await end_flows(pool, "failed", 18)
    failed = await rerun
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["flows"] == {"failed": 9}
    [again] = documents(await schedules(*day, "--json"))
    assert (again["started"], again["already_run"], again["state"]) == (0, 9, "done")
    [slow] = documents(
        await schedules(
            "backfill",
            "night",
            "--since",
            "2026-05-01",
            "--until",
            "2026-06-01",
            "--rate",
            "1",
            "--no-wait",
            "--json",
        )
    )
    stopped = await schedules("stop", str(slow["id"]), "--cancel", "--by", "bob")
    assert f"backfill {slow['id']} is stopped" in stopped.output
    listed = documents(await schedules("backfills", "--schedule", "night", "--json"))
    assert [(each["by"], each["state"]) for each in listed][-1] == ("ann", "done")
    assert "stopped" in (await schedules("backfills")).output
    future = await schedules("backfill", "night", "--since", "2026-01-01", "--until", "2096-01-01")
    assert "--until: it is in the future" in future.stderr
    assert (future.exit_code, "future" in future.output) == (3, True)
    assert (await schedules("stop", "999999")).exit_code == 4
