"""Ends of tasks that come together, late, or beside a command: the flow ends the same."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson
import pytest
from tests.integration.flow_owner.support import Owner, definition, task

from penstock.postgres.connection import open_pool
from penstock.postgres.flows import FlowsLocked


@pytest.fixture
async def owner(pool):
    return Owner(pool)


async def advance_beside_others(owner):
    """One transaction, which a flow that another owner holds may end, as in the service."""
    with suppress(FlowsLocked):
        await owner.advance_once()


@pytest.mark.parametrize("owners", [1, 2])
@pytest.mark.parametrize("pairs", [8])
async def test_the_last_two_parents_may_end_in_the_same_moment(database, pool, owners, pairs):
    """F1: two connections commit the ends of both parents together, while one or two owners read:
    the join starts once, and after both."""
    join = definition(nodes={"a": task(), "b": task(), "c": task("a", "b")})
    every = [Owner(pool) for _ in range(owners)]
    await every[0].define(join)
    flows = [await every[0].start(join) for _ in range(pairs)]
    await every[0].advance()
    for flow_id in flows:
        async with (
            open_pool(database, "ends", size=2) as workers,
            workers.acquire() as first,
            workers.acquire() as second,
        ):
            transactions = []
            for connection, parent in zip((first, second), await every[0].tasks(flow_id), strict=True):
                transactions.append(connection.transaction())
                await transactions[-1].start()
                await connection.execute(
                    "UPDATE task SET state = 'succeeded', finished_at = now(), result_type = 'json', result = '1' WHERE id = $1",
                    parent["id"],
                )
            # No end is visible before its commit.
            assert not await every[0].advance_once()
            await asyncio.gather(
                *(transaction.commit() for transaction in transactions),
                *(advance_beside_others(each) for each in every),
            )
        await every[0].advance()
    joins = await every[0].tasks()
    assert sorted(each["flow_id"] for each in joins) == flows
    assert {each["flow_node"] for each in joins} == {"c"}


@pytest.mark.parametrize(
    ("command", "ended", "expected"),
    [
        # The command was there first, or the end was.
        ("cancel", "after", "cancelled"),
        ("cancel", "before", "cancelled"),
        ("cancel", "together", "cancelled"),
        ("pause", "after", "running"),
    ],
)
async def test_a_child_ends_while_its_parent_is_cancelled_or_paused(owner, command, ended, expected):
    """F1, F5: the end is counted once, and nothing starts after it."""
    child = definition("child", nodes={"work": task(), "more": task("work")})
    parent = definition("parent", nodes={"sub": {"kind": "flow", "flow": "child"}, "late": task("sub")})
    await owner.define(child, parent)
    flow_id = await owner.start(parent, versions={"child": 1})
    await owner.advance()
    [work] = await owner.tasks()
    if ended == "before":
        await owner.end(work)
    await owner.command(flow_id, command)
    if ended == "together":
        await owner.end(work)
    await owner.advance()
    if ended == "after":
        # Cancelled tasks have ended already.
        await owner.pool.execute(
            "UPDATE task SET state = 'succeeded' WHERE id = $1 AND state = 'ready'", work["id"]
        )
        await owner.advance()
    assert await owner.tasks() == []
    assert (await owner.flow(flow_id))["status"] == expected
    if expected == "running":
        await owner.command(flow_id, "resume")
        assert [each["flow_node"] for each in await owner.run()] == ["more", "late"]
        assert (await owner.flow(flow_id))["status"] == "succeeded"
    rows = await owner.pool.fetch("SELECT status, live, unfinished FROM flow ORDER BY id")
    assert {row["live"] for row in rows} == {0}


async def test_a_late_end_of_an_old_generation_ends_no_new_one(owner):
    """F1, F3: a task fails, its node is recovered, and the result of the old attempt arrives."""
    flow = definition(on_failure="continue", nodes={"a": task(), "b": task(), "c": task("a", "b")})
    await owner.define(flow)
    flow_id = await owner.start(flow)
    await owner.advance()
    old, other = await owner.tasks()
    await owner.end(old, "failed")
    await owner.advance()
    await owner.command(flow_id, "recover", generation=1, nodes=["a"])
    await owner.advance()
    # A late result revives a failed task.
    await owner.end(old, "succeeded", "old")
    await owner.end(other)
    await owner.advance()
    assert await owner.nodes(flow_id) == {"a": "running", "b": "succeeded", "c": "pending"}
    [new] = await owner.tasks()
    assert (new["flow_node"], new["flow_generation"]) == ("a", 1)
    await owner.end(new, "succeeded", "new")
    ended = await owner.run()
    assert [each["flow_node"] for each in ended] == ["c"]
    assert (await owner.flow(flow_id))["status"] == "succeeded"


async def test_a_late_result_reaches_no_flow_that_has_ended(owner):
    """F1: it revives the task; the flow and its event stay as they are."""
    flow = definition(nodes={"a": task(), "b": task("a")})
    await owner.define(flow)
    flow_id = await owner.start(flow)
    await owner.advance()
    [only] = await owner.tasks()
    await owner.end(only, "failed")
    await owner.advance()
    before = dict(await owner.flow(flow_id))
    await owner.end(only, "succeeded", 1)
    await owner.advance()
    assert await owner.tasks() == []
    assert dict(await owner.flow(flow_id)) == before


async def test_a_recovery_in_a_deep_family_runs_only_what_failed(owner):
    """F3: 50 levels, of which each has a branch that succeeded."""
    levels = [
        definition(
            f"l{level}",
            on_failure="continue",
            nodes={"ok": task(), "sub": {"kind": "flow", "flow": f"l{level + 1}"}, "end": task("ok", "sub")},
        )
        for level in range(49)
    ]
    levels.append(definition("l49", nodes={"bad": task()}))
    await owner.define(*levels)
    flow_id = await owner.start(levels[0], versions={each["flow"]: 1 for each in levels})
    first = await owner.run(lambda each: ("failed" if each["flow_node"] == "bad" else "succeeded", None))
    assert len(first) == 50
    assert (await owner.flow(flow_id))["status"] == "failed"
    await owner.command(flow_id, "recover", generation=1)
    again = await owner.run()
    assert [each["flow_node"] for each in again] == ["bad", *["end"] * 49]
    rows = await owner.pool.fetch("SELECT status FROM flow WHERE root_id = $1", flow_id)
    assert [row["status"] for row in rows] == ["succeeded"] * 50


async def test_a_map_that_is_cancelled_between_two_chunks_opens_no_more(owner):
    """F5, F6: its items are opened by 2,000 in a transaction."""
    fan = definition(
        inputs={"n": {}},
        nodes={
            "m": {
                "kind": "map",
                "items": "inputs.n",
                "parallel": 100_000,
                "each": {"kind": "task", "type": "a"},
            }
        },
    )
    await owner.define(fan)
    flow_id = await owner.start(fan, {"n": list(range(4_001))})
    while not await owner.tasks():
        assert await owner.advance_once()
    opened = await owner.pool.fetchval("SELECT count(*) FROM task")
    assert 0 < opened < 4_001
    await owner.command(flow_id, "cancel")
    await owner.advance()
    assert (await owner.flow(flow_id))["status"] == "cancelled"
    states = await owner.pool.fetch("SELECT state, count(*) FROM task GROUP BY state")
    assert [tuple(row) for row in states] == [("cancelled", opened)]


@pytest.mark.parametrize(("size", "stored"), [(4_096, False), (4_097, True)])
async def test_an_output_above_the_limit_is_a_reference(owner, size, stored):
    """F1, T2: 4,096 bytes are in the row, 4,097 in the object store; both reach what follows."""
    # In JSON, with its quotes.
    text = "x" * (size - 2)
    child = definition("child", inputs={"text": {}}, nodes={"n": task()}, output="inputs.text")
    parent = definition(
        "parent",
        inputs={"text": {}},
        nodes={
            "sub": {"kind": "flow", "flow": "child", "input": '{"text": inputs.text}'},
            "after": task("sub", input="size(nodes.sub.output)"),
        },
        output="nodes.sub.output",
    )
    await owner.define(child, parent)
    flow_id = await owner.start(parent, {"text": text}, {"child": 1})
    ended = await owner.run()
    assert orjson.loads(ended[-1]["context"]) == size - 2
    flow = await owner.flow(flow_id)
    assert flow["status"] == "succeeded"
    assert ((flow["output"] is None), (flow["output_ref"] is not None)) == (stored, stored)


async def test_a_new_version_changes_no_flow_that_runs(owner):
    """F1: a flow and its child flows keep the versions with which they started."""
    child = definition("child", nodes={"old": task()})
    parent = definition(
        "parent", nodes={"a": task(), "sub": {"kind": "flow", "flow": "child", "after": ["a"]}}
    )
    await owner.define(child, parent)
    running = await owner.start(parent, versions={"child": 1})
    await owner.advance()
    new_child = {**definition("child", nodes={"new": task()}), "version": 2}
    new_parent = {**parent, "version": 2, "nodes": {"b": task(), **parent["nodes"]}}
    await owner.define(new_child, new_parent)
    started = await owner.start(new_parent, versions={"child": 2})
    ended = await owner.run()
    nodes = {flow_id: [] for flow_id in (running, started)}
    for each in ended:
        root = await owner.pool.fetchval("SELECT root_id FROM flow WHERE id = $1", each["flow_id"])
        nodes[root].append(each["flow_node"])
    assert nodes == {running: ["a", "old"], started: ["b", "a", "new"]} or nodes == {
        running: ["a", "old"],
        started: ["a", "b", "new"],
    }
