"""`penstock check` about flows, with a real PostgreSQL: rows are lost or changed by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.integration.flow_owner.support import Owner, definition, task

from penstock.checks import flows
from penstock.checks.app import RULES, Rule
from penstock.checks.rule import System
from penstock.contracts.event import OutboxEntry
from penstock.postgres import flow_checks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.flow_starts import match_events
from penstock.settings import Platform

CHILD = definition("child", nodes={"work": task()})
# A chain in which each kind of node runs alone.
FLOW = definition(
    nodes={
        "first": task(),
        "items": {
            "kind": "map",
            "after": ["first"],
            "items": "[1, 2, 3]",
            "parallel": 2,
            "each": {"kind": "task", "type": "a"},
        },
        "below": {"kind": "flow", "after": ["items"], "flow": "child"},
        "approval": {"kind": "wait", "after": ["below"], "event": "ok", "key": '"k"'},
        "nap": {"kind": "timer", "after": ["approval"], "delay_s": 3600},
    }
)


@pytest.fixture
async def pool(database):
    async with open_pool(database, "test") as pool:
        await types.register(pool, types.TaskType(name="a", partitions=1))
        yield pool


@pytest.fixture
async def owner(pool):
    owner = Owner(pool)
    await owner.define(CHILD, FLOW)
    return owner


def searches(pool):
    system = System(Platform(), pool, None, 20)
    return [rule(system) for rule in RULES if rule.__module__ == flows.__name__]


async def offenders(pool):
    """The rules that are broken, and what each offender lacks."""
    return {
        of_rule.first[0].rule: [(one.what, one.id, one.lacks) for one in of_rule.first]
        for search in searches(pool)
        for of_rule in (await search.find()).values()
    }


async def repair(pool):
    """Repairs all offenders; returns how many by rule, and the outbox entries to publish."""
    entries: list[OutboxEntry] = []

    class Writers:
        async def publish(self, entry):
            entries.append(entry)

    broken = await offenders(pool)
    repaired = Counter()
    for search in searches(pool):
        if search.rule in broken:
            repaired[search.rule] += await search.repair(Writers())
    return dict(repaired), entries


async def end_tasks(owner, flow_id, before):
    """Ends the tasks of a node of a flow, or of its child flow, as they start."""
    place = (flow_id, "work" if before == "below" else before)
    while tasks := [one for one in await owner.tasks() if (one["flow_root_id"], one["flow_node"]) == place]:
        for one in tasks:
            await owner.end(one)
        await owner.advance()


async def reach(owner, node):
    """Starts the flow and ends what it runs until the node runs; returns the flow's id."""
    flow_id = await owner.start(FLOW, versions={"child": 1})
    if node is None:
        return flow_id
    await owner.advance()
    for before in FLOW["nodes"]:
        if before == node:
            return flow_id
        if before == "approval":
            await owner.pool.execute(
                "INSERT INTO flow_event (namespace, id, event, key) VALUES ('default', 'e', 'ok', 'k')"
                " ON CONFLICT DO NOTHING"
            )
            await match_events(owner.pool, flow_ids=[flow_id])
            await owner.advance()
        else:
            await end_tasks(owner, flow_id, before)
    raise AssertionError(node)


async def finish(owner, flow_id):
    """Asserts that the flow reaches its end."""
    await owner.advance()
    for before in FLOW["nodes"]:
        await end_tasks(owner, flow_id, before)
    await owner.pool.execute(
        "INSERT INTO flow_event (namespace, id, event, key) VALUES ('default', 'e', 'ok', 'k') ON CONFLICT DO NOTHING"
    )
    await match_events(owner.pool)
    await owner.advance()
    await owner.pool.execute("UPDATE flow_limit SET at = now()")
    await owner.advance()
    assert (await owner.flow(flow_id))["status"] == "succeeded"
    assert await offenders(owner.pool) == {}


async def test_no_moment_of_a_flow_is_an_offender(owner):
    """F1, O2b: flows are clean between any two transactions, and paused, cancelled or recovered."""
    pool = owner.pool
    for node in (None, *FLOW["nodes"]):
        flow_id = await reach(owner, node)
        assert await offenders(pool) == {}
        await owner.command(flow_id, "pause")
        await owner.advance()
        for one in await owner.tasks():
            await owner.end(one, "failed" if node == "items" else "succeeded")
            assert await offenders(pool) == {}
            while await owner.advance_once(1):
                assert await offenders(pool) == {}
        await owner.command(flow_id, "resume")
        await owner.command(flow_id, "cancel")
        while await owner.advance_once(1):
            assert await offenders(pool) == {}
        for one in await owner.tasks():
            await owner.end(one, "cancelled")
        await owner.advance()
        flow = await owner.flow(flow_id)
        assert flow["status"] in ("cancelled", "failed")
        await owner.command(flow_id, "recover", generation=flow["generation"] + 1)
        while await owner.advance_once(1):
            assert await offenders(pool) == {}
        # A flow that ended while it was paused is still paused.
        await owner.command(flow_id, "resume")
        await pool.execute("DELETE FROM flow_event")
        await finish(owner, flow_id)
        await pool.execute("DELETE FROM flow_event")


async def test_a_lost_end_of_a_task_is_noted_again(owner):
    """O2b: a running node whose task has ended without an inbox row is an offender; the repair lets
    the owner decide, also twice."""
    flow_id = await reach(owner, "first")
    [one] = await owner.tasks()
    await owner.end(one)
    await owner.pool.execute("DELETE FROM flow_inbox")
    lacks = "has the running node first without a live task, child flow, wait or timer"
    assert await offenders(owner.pool) == {Rule.STALLED: [("flow", flow_id, lacks)]}
    repaired, _ = await repair(owner.pool)
    assert repaired == {Rule.STALLED: 1}
    await owner.pool.execute(
        "INSERT INTO flow_inbox (root_id, flow_id, kind, node, generation, state, task_id)"
        " SELECT root_id, flow_id, kind, node, generation, state, task_id FROM flow_inbox"
    )
    await finish(owner, flow_id)


async def test_a_node_whose_task_does_not_exist_starts_again(owner):
    """O2b: a running node without a task is an offender; the repair makes it ready, and the owner
    submits one new task, also after two repairs. A pause holds it."""
    pool = owner.pool
    flow_id = await reach(owner, "first")
    await pool.execute("DELETE FROM task")
    lacks = "has the running node first without a live task, child flow, wait or timer"
    assert await offenders(pool) == {Rule.STALLED: [("flow", flow_id, lacks)]}
    await owner.command(flow_id, "pause")
    await owner.advance()
    assert (await repair(pool))[0] == {Rule.STALLED: 1}
    assert await flow_checks.revive(pool, [flow_id]) == 1
    await owner.advance()
    assert (await owner.tasks(), await offenders(pool)) == ([], {})
    await owner.command(flow_id, "resume")
    await owner.advance()
    [one] = await owner.tasks()
    assert (one["flow_node"], one["flow_generation"]) == ("first", 0)
    # A live task, and one whose end is noted, has no second one.
    assert await flow_checks.revive(pool, [flow_id]) == 1
    await owner.advance()
    await owner.end(one)
    await pool.execute("DELETE FROM task")
    assert await flow_checks.revive(pool, [flow_id]) == 1
    await owner.advance()
    assert {each["flow_node"] for each in await owner.tasks()} == {"items"}
    await finish(owner, flow_id)


async def test_a_node_whose_limit_has_passed_without_a_task_starts_again(owner):
    """O2b: the limit has nothing to cancel, so no end came. It counts from the new start."""
    pool = owner.pool
    limited = definition("limited", nodes={"only": task(finish_within_s=3_600)})
    await owner.define(limited)
    flow_id = await owner.start(limited)
    await owner.advance()
    await pool.execute("DELETE FROM task")
    await pool.execute("UPDATE flow_limit SET at = now()")
    await owner.advance()
    assert (await owner.nodes(flow_id), await owner.tasks()) == ({"only": "running"}, [])
    assert (await repair(pool))[0] == {Rule.STALLED: 1}
    await owner.advance()
    [one] = await owner.tasks()
    assert await pool.fetchval("SELECT count(*) FROM flow_limit WHERE at > now()") == 1
    await owner.end(one)
    await owner.advance()
    assert (await owner.flow(flow_id))["status"] == "succeeded"


async def test_a_lost_task_of_a_recovered_or_cancelled_flow_keeps_no_flow_open(owner):
    """O2b: after a recovery the new task has its generation, beside the failed one. A flow that is
    being cancelled ends."""
    pool = owner.pool
    flow_id = await reach(owner, "first")
    [failed] = await owner.tasks()
    await owner.end(failed, "failed")
    await owner.advance()
    for generation in (1, 2):
        await owner.command(flow_id, "recover", generation=generation)
        await owner.advance()
        await pool.execute("DELETE FROM task WHERE flow_generation = $1", generation)
        if generation == 2:
            await owner.command(flow_id, "cancel")
            await owner.advance()
        assert [*await offenders(pool)] == [Rule.STALLED]
        await repair(pool)
        await owner.advance()
        if generation == 1:
            [again] = await owner.tasks()
            assert again["flow_generation"] == 1
            await owner.end(again, "failed")
            await owner.advance()
    flow = await owner.flow(flow_id)
    assert (flow["status"], flow["live"], await offenders(pool)) == ("cancelled", 0, {})


async def test_a_lost_end_of_an_item_is_counted_again(owner):
    """O2b: a map that counts an item as live whose task has ended is an offender; the repair counts
    it, and the map goes on."""
    flow_id = await reach(owner, "items")
    one, _other = await owner.tasks()
    await owner.end(one)
    await owner.pool.execute("DELETE FROM flow_inbox")
    lacks = "counts 2 live items of its map items, and there are 1"
    assert await offenders(owner.pool) == {Rule.MISCOUNTED_FLOW: [("flow", flow_id, lacks)]}
    repaired, _ = await repair(owner.pool)
    assert repaired == {Rule.MISCOUNTED_FLOW: 1}
    await owner.advance()
    assert len(await owner.tasks()) == 2
    await finish(owner, flow_id)


async def test_a_flow_whose_beginning_is_lost_begins(owner):
    """O2b: a flow without nodes and inbox rows is an offender; the repair begins it."""
    flow_id = await reach(owner, None)
    await owner.pool.execute("DELETE FROM flow_inbox")
    lacks = "runs without a running node, and its inbox is empty: nothing will advance it"
    assert await offenders(owner.pool) == {Rule.STALLED: [("flow", flow_id, lacks)]}
    await repair(owner.pool)
    await finish(owner, flow_id)


async def test_what_a_repair_cannot_bring_back_stays_an_offender(owner):
    """O2b: a wait that is gone is reported before and after a repair."""
    flow_id = await reach(owner, "approval")
    await owner.pool.execute("DELETE FROM flow_wait")
    for _ in range(2):
        [(_, found, lacks)] = (await offenders(owner.pool))[Rule.STALLED]
        assert (found, "running node approval" in lacks) == (flow_id, True)
        await repair(owner.pool)
        await owner.advance()


async def test_an_owner_that_does_not_run_is_named(owner):
    """O2b: inbox rows, limits and events that no owner applies for a minute are offenders, and the
    repair brings events to their waits."""
    pool = owner.pool
    began = await reach(owner, None)
    await pool.execute("UPDATE flow_inbox SET created_at = now() - interval '90 seconds'")
    [(_, found, lacks)] = (await offenders(pool))[Rule.UNAPPLIED]
    assert (found, "has 1 inbox rows or limits" in lacks, "for 90 s" in lacks) == (began, True, True)
    assert (await repair(pool))[0] == {Rule.UNAPPLIED: 1}
    await owner.advance()
    await pool.execute(
        "INSERT INTO flow_limit (root_id, flow_id, generation, kind, at)"
        " VALUES ($1, $1, 0, 'warn_after', now() - interval '2 minutes')",
        began,
    )
    assert [each[1] for each in (await offenders(pool))[Rule.UNAPPLIED]] == [began]
    await pool.execute("DELETE FROM flow_limit")
    await finish(owner, began)
    await pool.execute("DELETE FROM flow_event")
    waiting = await reach(owner, "approval")
    await pool.execute(
        "INSERT INTO flow_event (namespace, id, event, key, created_at)"
        " VALUES ('default', 'e', 'ok', 'k', now() - interval '2 minutes')"
    )
    lacks = "waits at node approval for event ok with key 'k', which is there"
    assert await offenders(pool) == {Rule.UNMATCHED: [("flow", waiting, lacks)]}
    assert (await repair(pool))[0] == {Rule.UNMATCHED: 1}
    assert await pool.fetchval("SELECT kind FROM flow_inbox") == "event"
    await finish(owner, waiting)


async def test_what_is_left_of_a_flow_that_has_ended_is_ended(owner):
    """O2b: tasks, child flows, limits and waits under a final flow are offenders; the repair
    cancels tasks and child flows with their events, and deletes the rest."""
    pool = owner.pool
    with_task = await reach(owner, "first")
    with_child = await reach(owner, "below")
    [child] = await pool.fetch("SELECT id FROM flow WHERE parent_id = $1", with_child)
    with_wait = await reach(owner, "approval")
    with_limit = await reach(owner, "nap")
    await pool.execute("DELETE FROM flow_event")
    running = await reach(owner, "approval")
    await pool.execute(
        "UPDATE flow SET status = 'failed', finished_at = now() WHERE id = ANY ($1)",
        [with_task, with_child, with_wait, with_limit],
    )
    [of_task] = await owner.tasks(with_task)
    found = (await offenders(pool))[Rule.LEFTOVER]
    assert [(flow_id, lacks.partition(", ")[2]) for _, flow_id, lacks in found] == [
        (with_task, f"and task {of_task['id']} of its node first has not"),
        (with_child, f"and child flow {child['id']} of its node below has not"),
        (with_wait, "and still has a wait of its node approval"),
        (with_limit, "and still has a limit of its node nap"),
    ]
    repaired, entries = await repair(pool)
    assert repaired == {Rule.LEFTOVER: 4}
    assert [b'"task.cancelled"' in event for entry in entries for event in entry.events] == [True]
    assert await pool.fetchval("SELECT flow_id FROM flow_wait") == running
    await owner.advance()
    for one in await owner.tasks(child["id"]):
        await owner.end(one, "cancelled")
    await owner.advance()
    assert (await owner.flow(child["id"]))["status"] == "cancelled"
    assert Rule.LEFTOVER not in await offenders(pool)


async def test_a_flow_that_no_task_waits_for_is_cancelled(owner):
    """F6, O2b: a flow whose waiting task has ended is an offender until it is being cancelled."""
    pool = owner.pool
    flow_id = await reach(owner, "approval")
    [ended] = await pool.fetch("SELECT id FROM task WHERE flow_node = 'first'")
    await pool.execute("UPDATE flow SET task_id = $2, task_step = 0 WHERE id = $1", flow_id, ended["id"])
    lacks = "runs, and the task that waited for it has ended"
    assert await offenders(pool) == {Rule.LEFTOVER: [("flow", flow_id, lacks)]}
    assert (await repair(pool))[0] == {Rule.LEFTOVER: 1}
    assert await offenders(pool) == {}
    assert await pool.fetch("DELETE FROM flow_inbox RETURNING flow_id, kind") == [(flow_id, "cancel")]
    await pool.execute("UPDATE flow SET stop = 'cancel' WHERE id = $1", flow_id)
    assert await offenders(pool) == {}


async def test_counters_of_a_flow_are_recounted(owner):
    """O2b: counters that differ from the nodes are offenders, and are corrected; a flow that its
    owner changes at this moment is left to it."""
    flow_id = await reach(owner, "items")
    await owner.pool.execute("UPDATE flow SET unfinished = 9, live = 0 WHERE id = $1", flow_id)
    lacks = "counts 9 unfinished nodes, and there are 4; it counts 0 live nodes, and there are 1"
    expected = {Rule.MISCOUNTED_FLOW: [("flow", flow_id, lacks)]}
    assert await offenders(owner.pool) == expected
    async with owner.pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT FROM flow WHERE id = $1 FOR UPDATE", flow_id)
        assert (await repair(owner.pool))[0] == {Rule.MISCOUNTED_FLOW: 0}
    assert await offenders(owner.pool) == expected
    assert (await repair(owner.pool))[0] == {Rule.MISCOUNTED_FLOW: 1}
    await finish(owner, flow_id)
