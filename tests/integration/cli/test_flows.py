"""`penstock flows` and the client's methods against a real gateway and the real service."""

from __future__ import annotations

import asyncio
import json
import os
import time

import pytest
from aiohttp import ClientSession
from tests.integration.cli.test_cli import penstock
from tests.integration.flow_owner.support import Owner, definition, task
from tests.support.invoking import documents
from tests.support.services import running_service
from tests.support.waiting import wait_until

from penstock.client import Client
from penstock.core.flow.state import FlowStatus
from penstock.errors import Conflict, NotFound, RecoveryRefused
from penstock.flow_owner.app import create_app
from penstock.flow_owner.settings import FlowsSettings
from penstock.postgres import types
from penstock.postgres.connection import open_pool

__all__ = ["penstock"]  # fixture

INNER = definition("inner", nodes={"work": task()})
OUTER = definition(
    "outer",
    nodes={
        "first": task(),
        "run": {"kind": "flow", "flow": "inner", "after": ["first"]},
        "each": {
            "kind": "map",
            "items": "[1, 2]",
            "each": {"kind": "task", "type": "a", "input": "item"},
            "after": ["run"],
        },
    },
)


@pytest.fixture
async def owner(where, penstock, database):
    """Rows of tests, beside the service that advances flows."""
    settings = FlowsSettings(**where)
    async with open_pool(database, "test") as pool, running_service(create_app(settings)):
        await types.register(pool, types.TaskType(name="a", partitions=1))
        owner = Owner(pool)
        await owner.define(INNER, OUTER)
        yield owner


async def next_tasks(owner, count=1):
    """Waits until so many tasks of flows are ready, and returns them."""

    async def found():
        tasks = await owner.tasks()
        return tasks if len(tasks) == count else None

    return await wait_until(found, what=f"{count} tasks of flows are ready")


async def test_a_flow_is_submitted_and_watched(penstock, owner):
    """The status of `submit --watch` is that of the flow."""
    submitted = asyncio.ensure_future(penstock("flows", "submit", "inner", "--watch"))
    [work] = await next_tasks(owner)
    await owner.end(work, "failed")
    shown = await submitted
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[:2] == [
        f"flow {work['flow_id']} submitted",
        f"flow {work['flow_id']} failed: 1 failed",
    ]


async def test_a_family_fails_is_explained_recovered_and_watched(penstock, owner):
    """F3, O8: the tree has the child flow; `why` leads to the task that failed; `recover` runs only
    what failed; `watch` ends with the flow and tells by its status whether it succeeded."""
    flow_id = await owner.start(OUTER, versions={"inner": 1}, labels={"team": "data"})
    flow = str(flow_id)
    [first] = await next_tasks(owner)
    explained = await penstock("flows", "why", flow)
    assert explained.stdout.startswith(
        f"flow {flow} (outer): node first runs task {first['id']} (a, ready): no task-sync owns its type"
    )
    await owner.end(first)
    [work] = await next_tasks(owner)
    shown = (await penstock("flows", "get", flow)).stdout
    child_id = next(
        node for node in documents(await penstock("flows", "get", flow, "--json"))[0]["nodes"] if node["flow"]
    )["flow"]["id"]
    assert [
        line.split()[:3] for line in shown.splitlines() if line.startswith(("first", "run", "  work", "each"))
    ] == [
        ["first", "task", "succeeded"],
        ["run", "flow", "running"],
        ["work", "task", "running"],
        ["each", "map", "pending"],
    ]
    watching = asyncio.ensure_future(penstock("flows", "watch", flow, "--json"))
    await owner.end(work, "failed")
    watched = await watching
    assert watched.exit_code == 1
    assert json.loads(watched.stdout.splitlines()[-1])["status"] == "failed"
    explained = (await penstock("flows", "why", flow)).stdout
    assert (
        f"  flow {child_id} (inner): it has failed, because node work failed (task {work['id']}, failed)"
        in explained
    )
    refused = await penstock("flows", "recover", str(child_id))
    assert (refused.exit_code, f"recover flow {flow}" in refused.stderr) == (3, True)
    assert (
        await penstock("flows", "recover", flow, "--dry-run")
    ).stdout == f"flow {flow}: run, each would run again\n"
    dry = await penstock("flows", "recover", flow, "--version", "latest", "--dry-run")
    assert dry.stdout == f"flow {flow}: run, each would run again in version 1\n"
    missing = await penstock("flows", "recover", flow, "--version", "7")
    assert "there is no version 7 of the definition 'outer'" in missing.stderr
    several = await penstock("flows", "recover", "--name", "outer", "--version", "latest", "--yes")
    assert (several.exit_code, "needs one id" in several.stderr) == (2, True)
    watching = asyncio.ensure_future(penstock("flows", "recover", flow, "--watch"))
    [again] = await next_tasks(owner)
    assert again["flow_id"] == child_id
    await owner.end(again)
    for item in await next_tasks(owner, 2):
        await owner.end(item)
    watched = await watching
    assert (watched.exit_code, watched.stdout) == (
        0,
        f"flow {flow}: run, each run again\nflow {flow} succeeded: 3 succeeded\n",
    )
    items = documents(await penstock("flows", "items", flow, "each", "--json"))
    for which, task_id in (
        (("first",), first["id"]),
        (("each", "--item", "1"), items[1]["task"]["id"]),
    ):
        lines = {"id": task_id, "step": 0, "attempt": 0, "run": "a", "first": 0}
        line = [int(time.time() * 1000), 20, "stdout", f"of {task_id}"]
        async with ClientSession() as session:
            body = {"worker": "w", "chunks": [{**lines, "lines": [line]}]}
            assert (await session.post(f"{os.environ['PENSTOCK_GATEWAY']}/logs", json=body)).status == 202
        [read] = documents(await penstock("logs", "--flow", flow, "--node", *which, "--json"))
        assert read["text"] == f"of {task_id}", which
    for which, words in (
        (("each",), "give --item"),
        (("each", "--item", "7"), "has no task"),
        (("run",), f"starts flow {child_id}"),
    ):
        refused = await penstock("logs", "--flow", flow, "--node", *which)
        assert (refused.exit_code > 0, words in refused.stderr) == (True, True), which
    assert [(item["item"], item["task"]["state"]) for item in items] == [(0, "succeeded"), (1, "succeeded")]
    assert "no such task" in (await penstock("flows", "items", flow, "each", "--state", "failed")).stdout
    listed = documents(
        await penstock("flows", "list", "--label", "team=data", "--status", "succeeded", "--json")
    )
    assert [each["id"] for each in listed] == [flow_id]
    assert str(flow_id) in (await penstock("flows", "list", "--name", "outer")).stdout
    assert (await penstock("flows", "list", "--name", "nothing")).stdout == "no flows\n"
    missing = await penstock("flows", "get", "7")
    assert (missing.exit_code, "`penstock flows list`" in missing.stderr) == (4, True)


async def test_a_flow_is_paused_resumed_cancelled_and_rerun(penstock, owner):
    """F3, F5: by one id each verb is a command to the owner; a rerun is a new flow."""
    flow_id = await owner.start(INNER)
    flow = str(flow_id)
    await next_tasks(owner)
    assert (await penstock("flows", "pause", flow)).stdout == f"flow {flow} is being paused\n"

    async def reason():
        return documents(await penstock("flows", "why", flow, "--json"))[0]["reason"]

    await wait_until(lambda: equals(reason(), "paused"))
    assert (await penstock("flows", "resume", flow)).exit_code == 0
    await wait_until(lambda: equals(reason(), "task"))
    assert (await penstock("flows", "cancel", flow)).exit_code == 0
    watched = await penstock("flows", "watch", flow)
    assert (watched.exit_code, watched.stdout.splitlines()[0]) == (1, f"flow {flow} cancelled: 1 cancelled")
    assert (await penstock("flows", "cancel", flow)).stdout == f"flow {flow} was cancelled before\n"
    late = await penstock("flows", "pause", flow)
    assert (late.exit_code, "can no longer be paused" in late.stderr) == (3, True)
    rerunning = asyncio.ensure_future(penstock("flows", "rerun", flow, "--watch"))
    [work] = await next_tasks(owner)
    await owner.end(work)
    rerun = await rerunning
    assert (rerun.exit_code, rerun.stdout.splitlines()) == (
        0,
        [
            f"flow {work['flow_id']} started: it repeats flow {flow}",
            f"flow {work['flow_id']} succeeded: 1 succeeded",
        ],
    )


async def test_a_run_is_drawn_and_compared_with_other_versions(penstock, owner, tmp_path):
    """F3, O8: the picture has the states; `diff` replays the run, and its status is for CI."""
    flow = str(await owner.start(OUTER, versions={"inner": 1}))
    for count in (1, 1, 2):
        for each in await next_tasks(owner, count):
            await owner.end(each)
    assert (await penstock("flows", "watch", flow)).exit_code == 0
    drawn = await penstock("flows", "graph", flow)
    assert "succeeded, 2 of 2 items" in drawn.stdout
    assert 'class="part succeeded"' in (await penstock("flows", "graph", flow, "--svg")).stdout
    each = {**OUTER["nodes"]["each"], "after": ["first"]}
    await owner.define({**OUTER, "version": 2, "nodes": {**OUTER["nodes"], "each": each}})
    same = await penstock("flows", "diff", flow, "--version", "1")
    assert (same.exit_code, same.stdout) == (0, f"version 1 decides flow {flow} as version 1 did: 3 nodes\n")
    differing = await penstock("flows", "diff", flow, "--version", "2")
    assert (differing.exit_code, differing.stdout) == (
        1,
        (
            "node each starts after run, and ends as succeeded; in the other version it starts after first, "
            "and ends as succeeded\n"
        ),
    )
    file = tmp_path / "new.json"
    file.write_text(json.dumps({**OUTER, "version": 3, "nodes": {**OUTER["nodes"], "more": task("each")}}))
    [found] = documents(await penstock("flows", "diff", flow, "--file", str(file), "--json"))
    assert (found["equal"], found["differences"][0]["node"]) == (False, "more")
    file.write_text(file.read_text().replace('"flow": "outer"', '"flow": "another"'))
    another = await penstock("flows", "diff", flow, "--file", str(file))
    assert (another.exit_code, "defines flow 'another'" in another.stderr) == (3, True)
    assert (await penstock("flows", "diff", flow)).exit_code == 2
    assert (await penstock("flows", "diff", flow, "--version", "9")).exit_code == 4


async def test_flows_are_operated_by_filter(penstock, owner):
    """F5, O8: a filter counts first, and needs --yes without a terminal; the audit lists it."""
    ids = [await owner.start(INNER, labels={"team": "data"}) for _ in range(3)]
    await next_tasks(owner, 3)
    refused = await penstock("flows", "cancel", "--label", "team=data")
    assert (refused.exit_code, "3 flows would be cancelled (3 running)" in refused.stderr) == (2, True)
    dry = await penstock("flows", "cancel", "--name", "inner", "--dry-run")
    assert dry.stdout.splitlines() == [
        "3 flows would be cancelled (3 running)",
        *(f"  {flow_id} (inner, version 1, running)" for flow_id in ids),
    ]
    done = await penstock("flows", "cancel", "--name", "inner", "--yes")
    assert done.stdout.startswith("3 flows to be cancelled (before: 3 running), operation ")
    for flow_id in ids:
        assert (await penstock("flows", "watch", str(flow_id))).exit_code == 1
    nothing = await penstock("flows", "pause", "--name", "inner", "--yes")
    assert (nothing.exit_code, "no flow matches" in nothing.stderr) == (4, True)
    [rerun] = documents(
        await penstock("flows", "rerun", *map(str, ids), "--version", "latest", "--rate", "1000", "--json")
    )
    assert (rerun["count"], rerun["found_in"]) == (3, {"cancelled": 3})
    assert "rerun flows" in (await penstock("audit", "--verb", "rerun")).stdout
    assert (await penstock("flows", "resume")).exit_code == 2


async def equals(awaitable, value):
    return await awaitable == value


async def test_the_client_shows_and_steers_flows(penstock, owner, monkeypatch):
    """F3, F5: the methods of the client, asynchronous as in the SDK; the command line uses the
    synchronous ones."""
    flow_id = await owner.start(OUTER, versions={"inner": 1})
    async with Client() as client:
        with pytest.raises(TimeoutError):
            await client.wait_for_flow(flow_id, timeout_s=0.1)
        [first] = await next_tasks(owner)
        flow = await client.get_flow(flow_id, definition=True)
        assert (flow.status, flow.ended, flow.counts) == (
            FlowStatus.RUNNING,
            False,
            {"running": 1, "pending": 2},
        )
        assert flow.raw["definition"] == OUTER
        assert [child["task"]["id"] async for child in client.flow_children(flow_id, "first")] == [
            first["id"]
        ]
        assert (await client.flow_node(flow_id, "first"))["status"] == "running"
        with pytest.raises(RecoveryRefused) as refused:
            await client.recover_flow(flow_id)
        assert (refused.value.code, refused.value.nodes) == ("nothing_to_recover", ())
        await client.cancel_flow(flow_id)
        ended = await client.wait_for_flow(flow_id, timeout_s=10)
        assert (ended.status, ended.ended) == (FlowStatus.CANCELLED, True)
        assert [each.id async for each in client.list_flows(status="cancelled", limit=1)] == [flow_id]
        with pytest.raises(Conflict):
            await client.resume_flow(flow_id)
        started = await client.rerun_flow(flow_id, idempotency_key="k")
        assert (await client.rerun_flow(flow_id, idempotency_key="k")).id == started.id
        with pytest.raises(NotFound):
            await client.why_flow(7)


async def test_a_simulation_takes_durations_from_real_runs(penstock, owner, tmp_path):
    """F1: the percentiles of the tasks of each type and stage, found behind those of other types; a
    duration of the assumptions holds, and types that have not run keep the default."""
    await types.register(owner.pool, types.TaskType(name="b", partitions=1))
    # Task n of 1 to 100 takes n seconds in `cut`; those up to 90 take another second in `join`.
    await owner.pool.execute(
        """
        WITH t AS (
            INSERT INTO task (type, state, stage, content_type, context, finished_at)
            SELECT CASE WHEN n <= 100 THEN 'a' ELSE 'other' END,
                   CASE WHEN n = 100 THEN 'failed' ELSE 'succeeded' END,
                   'join', 'json', 'null', now() - make_interval(secs => 2000 - n)
            FROM generate_series(1, 1500) AS n RETURNING id, type, finished_at
        ), n AS (
            SELECT id, finished_at, row_number() OVER (ORDER BY finished_at) AS n FROM t WHERE type = 'a'
        )
        INSERT INTO attempt (task_id, step, attempt, stage, outcome, started_at, finished_at)
        SELECT id, 0, 1, 'cut', 'retry', finished_at - interval '1 hour', finished_at FROM n
        UNION ALL
        SELECT id, 0, 2, 'cut', CASE WHEN n <= 90 THEN 'next' ELSE 'done' END,
               finished_at - make_interval(secs => n), finished_at FROM n
        UNION ALL
        SELECT id, 1, 1, 'join', 'done', finished_at - interval '1 second', finished_at FROM n WHERE n <= 90
        """
    )
    [found] = documents(await penstock("types", "durations", "a", "--json"))
    assert found["tasks"] == [{"first_stage": "cut", "count": 99, "p50_s": 51.0, "p95_s": 94.1}]
    assert found["stages"] == [
        {"stage": "cut", "count": 99, "p50_s": 50.0, "p95_s": 94.1},
        {"stage": "join", "count": 90, "p50_s": 1.0, "p95_s": 1.0},
    ]
    nodes = {
        "first": task(),
        "same": task(stage="cut"),
        "elsewhere": task(stage="join"),
        "fixed": task(),
        "new": task(type="b"),
        "each": {
            "kind": "map",
            "items": "[1, 2]",
            "parallel": 1,
            "each": {"kind": "task", "type": "a", "input": "item"},
            "after": ["first"],
        },
    }
    (tmp_path / "flow.json").write_text(json.dumps(definition("timed", nodes=nodes)))
    (tmp_path / "assume.yaml").write_text("takes_s: 7\nnodes: {fixed: {takes_s: 3}, each: {items: 2}}")
    simulate = ("flows", "simulate", str(tmp_path / "flow.json"), "--assume", str(tmp_path / "assume.yaml"))
    [shown] = documents(await penstock(*simulate, "--from-history", "p50", "--json"))
    ends = {node["node"]: node["ended_s"] for node in shown["nodes"]}
    assert ends == {"first": 51, "same": 51, "elsewhere": 7, "fixed": 3, "new": 7, "each": 153}
    assert (shown["critical_path"], shown["slots"]) == (["first", "each"], 5)
    assert shown["history"]["first"] == {"type": "a", "count": 99}
    text = " ".join((await penstock(*simulate, "--from-history", "p95")).stdout.split())
    assert "durations: p95 of a (99 tasks)" in text
    assert "no task has succeeded lately: a, b" in text
    # Without the option no deployment is asked.
    assert "history" not in documents(await penstock(*simulate, "--json"))[0]
    assert (await penstock("types", "durations", "b")).exit_code == 0
    assert (await penstock("types", "durations", "absent")).exit_code != 0
