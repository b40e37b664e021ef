"""The owner's transaction with a real PostgreSQL: flows advance as their definitions say."""

from __future__ import annotations

import sys

import orjson
import pytest
from tests.integration.flow_owner.support import Owner, definition, task

from penstock.contracts.context import Context
from penstock.contracts.flow_submission import FlowEvent
from penstock.postgres import flow_events
from penstock.postgres.flow_starts import match_events


@pytest.fixture
async def owner(pool):
    return Owner(pool)


async def test_a_chain_passes_outputs_on(owner):
    """F1: a node starts after its ancestors, with their outputs; the flow has an output."""
    chain = definition(
        inputs={"day": {}},
        nodes={
            "first": task(input='{"day": inputs.day}'),
            "second": task("first", input="nodes.first.output"),
            "third": task("second", input='{"sum": nodes.first.output.n + nodes.second.output.n}'),
        },
        output='{"n": nodes.third.output}',
    )
    await owner.define(chain)
    flow_id = await owner.start(chain, {"day": "mon"})
    results = {"first": {"n": 1}, "second": {"n": 2}, "third": 3}
    ended = await owner.run(lambda each: ("succeeded", results[each["flow_node"]]))
    assert [(each["flow_node"], orjson.loads(each["context"])) for each in ended] == [
        ("first", {"day": "mon"}),
        ("second", {"n": 1}),
        ("third", {"sum": 3}),
    ]
    flow = await owner.flow(flow_id)
    assert (flow["status"], flow["live"], flow["unfinished"]) == ("succeeded", 0, 0)
    assert orjson.loads(flow["output"]) == {"n": 3}
    events = [
        orjson.loads(record)
        for row in await owner.pool.fetch("SELECT records FROM outbox")
        for record in row["records"]
    ]
    assert [event["event"] for event in events if "flow" in event] == ["flow.succeeded"]


async def test_nested_flows_in_a_map_with_a_switch_and_a_wait(owner):
    """F1, F2: a fan-out over child flows, a switch with a dead branch, an event before its wait."""
    child = definition(
        "child",
        inputs={"n": {}, "factor": {"default": 10}},
        nodes={"work": task(input="inputs.n * inputs.factor")},
        output="nodes.work.output",
    )
    parent = definition(
        "parent",
        inputs={"numbers": {}},
        nodes={
            "each": {
                "kind": "map",
                "items": "inputs.numbers",
                "parallel": 2,
                "each": {"kind": "flow", "flow": "child", "input": '{"n": item}'},
            },
            "size": {
                "kind": "switch",
                "after": ["each"],
                "cases": [{"case": "large", "when": "nodes.each.output[0] > 100"}],
                "else": "small",
            },
            "approval": {"kind": "wait", "after": ["size.small"], "event": "ok", "key": '"k"'},
            "never": task("size.large"),
            "last": task("approval", "never", input="nodes.approval.output"),
        },
    )
    await owner.define(child, parent)
    await owner.pool.execute(
        "INSERT INTO flow_event (namespace, id, event, key, data) VALUES ('default', 'e', 'ok', 'k', '{\"by\": 7}')"
    )
    flow_id = await owner.start(parent, {"numbers": [1, 2, 3]}, {"child": 1})
    ended = await owner.run(lambda each: ("succeeded", orjson.loads(each["context"])))
    assert [orjson.loads(each["context"]) for each in ended] == [10, 20, 30, {"by": 7}]
    assert (await owner.flow(flow_id))["status"] == "succeeded"
    assert await owner.nodes(flow_id) == {
        "each": "succeeded",
        "size": "succeeded",
        "approval": "succeeded",
        "never": "skipped",
        "last": "succeeded",
    }


@pytest.mark.parametrize(
    ("budget", "transactions", "outcome"),
    [(sys.maxsize, 2, "succeeded"), (3, 6, "failed"), (0, 14, "succeeded")],
)
async def test_a_deep_family_ends_the_same_with_any_budget(pool, budget, transactions, outcome):
    """F2: a transaction that has decided enough tells parents and children by the inbox."""
    levels = [
        definition(
            f"l{level}", nodes={"n": {"kind": "flow", "flow": f"l{level + 1}"}}, output="nodes.n.output"
        )
        for level in range(6)
    ]
    levels.append(definition("l6", nodes={"n": task()}, output="nodes.n.output"))
    owner = Owner(pool, budget=budget)
    await owner.define(*levels)
    flow_id = await owner.start(levels[0], versions={each["flow"]: 1 for each in levels})
    made = 0
    while await owner.advance_once():
        made += 1
    [leaf] = await owner.tasks()
    await owner.end(leaf, outcome, {"n": 1})
    while await owner.advance_once():
        made += 1
    assert made == transactions
    rows = await pool.fetch("SELECT * FROM flow WHERE root_id = $1 ORDER BY id", flow_id)
    assert [row["status"] for row in rows] == [outcome] * 7
    if outcome == "succeeded":
        assert {row["output"] for row in rows} == {b'{"n":1}'}
    else:
        reasons = [f"flow {row['id']}: " for row in rows[1:]]
        expected = "node 'n' failed: ".join(["", *reasons, f"task {leaf['id']} failed: it broke"])
        assert rows[0]["error"] == expected


async def test_the_cause_of_a_failure_in_deep_flows_is_kept_and_its_path_is_cut(owner):
    """F2: each level would add to the reason of the one below, and repeat it in the rows above."""
    levels = [
        definition(f"l{level}", nodes={"n": {"kind": "flow", "flow": f"l{level + 1}"}}) for level in range(99)
    ]
    levels.append(definition("l99", nodes={"n": task()}))
    await owner.define(*levels)
    flow_id = await owner.start(levels[0], versions={each["flow"]: 1 for each in levels})
    await owner.run(lambda _: ("failed", None))
    rows = await owner.pool.fetch("SELECT id, error FROM flow WHERE root_id = $1 ORDER BY id", flow_id)
    assert len(rows) == 100
    assert max(len(row["error"]) for row in rows) < 1_100
    assert rows[0]["error"].startswith(f"node 'n' failed: flow {rows[1]['id']}: node 'n' failed: ")
    assert rows[0]["error"].endswith(" failed: it broke")


async def test_a_wait_for_an_event_that_can_never_come_fails(owner):
    """An event is matched in the namespace of its name, so this wait would have no end."""
    waiting = definition("acme--f", nodes={"w": {"kind": "wait", "event": "ok"}})
    await owner.define(waiting)
    flow_id = await owner.start(waiting)
    await owner.advance()
    flow = await owner.flow(flow_id)
    assert flow["status"] == "failed"
    assert "the event 'ok' is in the namespace default" in flow["error"]


async def test_an_event_ends_each_wait_once(owner):
    """An event that comes twice, or after its wait has ended, changes nothing."""
    waiting = definition(nodes={"w": {"kind": "wait", "event": "ok"}})
    await owner.define(waiting)
    flow_id = await owner.start(waiting)
    await owner.advance()
    for _ in range(2):
        await owner.pool.execute(
            "INSERT INTO flow_event (namespace, id, event) VALUES ('default', 'e', 'ok') ON CONFLICT DO NOTHING"
        )
        await match_events(owner.pool, ["e"])
    await owner.advance()
    assert (await owner.flow(flow_id))["status"] == "succeeded"
    assert await owner.pool.fetchval("SELECT count(*) FROM flow_wait") == 0


async def test_an_event_and_the_timeout_of_its_wait_have_one_outcome(owner):
    """F6: the event came before the wait, together with its timeout, or after it."""
    waiting = definition(
        inputs={"key": {}},
        nodes={"w": {"kind": "wait", "event": "ok", "key": "inputs.key", "finish_within_s": 60}},
    )
    await owner.define(waiting)

    async def send(key):
        await flow_events.deliver(owner.pool, [FlowEvent(id=key, event="ok", key=key)])

    async def time_out():
        await owner.pool.execute("UPDATE flow_limit SET at = now()")

    await send("before")
    flows = {"before": await owner.start(waiting, {"key": "before"})}
    await owner.advance()
    for key, steps in (
        ("together", (send, time_out, owner.advance)),
        ("after", (time_out, owner.advance, send, owner.advance)),
    ):
        flows[key] = await owner.start(waiting, {"key": key})
        await owner.advance()
        for step in steps:
            await (step(key) if step is send else step())
    found = {key: await owner.flow(flow_id) for key, flow_id in flows.items()}
    assert {key: flow["status"] for key, flow in found.items()} == {
        "before": "succeeded",
        "together": "succeeded",
        "after": "failed",
    }
    assert found["after"]["error"] == "node 'w' failed: finish_within_s is over"
    for table in ("flow_wait", "flow_limit", "flow_inbox"):
        assert await owner.pool.fetchval(f"SELECT count(*) FROM {table}") == 0, table


async def test_an_event_ends_the_wait_that_is_there_in_its_own_transaction(owner, monkeypatch):
    """The flow goes on after one commit; an event without a wait changes nothing."""

    async def match_none(*_arguments):
        return 0

    monkeypatch.setattr(flow_events, "match_events", match_none)
    waiting = definition(nodes={"w": {"kind": "wait", "event": "ok", "key": '"k"'}}, output="nodes.w.output")
    await owner.define(waiting)
    flow_id = await owner.start(waiting)
    await owner.advance()
    events = [
        FlowEvent(id=name, event="ok", key=key, data=Context.encode(name))
        for name, key in (("a", "other"), ("b", "k"), ("c", "k"))
    ]
    for is_new in (True, False):
        delivered = await flow_events.deliver(owner.pool, events)
        assert [each.created for each in delivered] == [is_new] * 3
    await owner.advance()
    flow = await owner.flow(flow_id)
    assert (flow["status"], flow["output"]) == ("succeeded", b'"b"')
    assert await owner.pool.fetchval("SELECT count(*) FROM flow_event") == 3


@pytest.mark.parametrize("items", [0, 1, 2_000, 2_001])
async def test_a_map_ends_when_all_its_items_have_ended(owner, items):
    """F6: it opens at most `parallel` items, in chunks, and tolerates failures. Equal items are
    each one. Items that have all ended before the next chunk opens do not end it.
    """
    fan = definition(
        inputs={"n": {}},
        nodes={
            "m": {
                "kind": "map",
                "items": "inputs.n",
                "parallel": 100_000,
                "tolerate": 1,
                "each": {"kind": "task", "type": "a", "input": "item"},
            },
            "after": task("m", input="size(nodes.m.output)"),
        },
    )
    await owner.define(fan)
    flow_id = await owner.start(fan, {"n": [number % 3 for number in range(items)]})

    async def end_items():
        await owner.pool.execute(
            """UPDATE task SET state = CASE WHEN flow_item > 0 THEN 'succeeded' ELSE 'failed' END, result_type = 'json',
                               result = 'null' WHERE flow_item IS NOT NULL AND state = 'ready'"""
        )

    first = 0
    if items > 2_000:
        while not first:
            assert await owner.advance_once()
            first = len(await owner.tasks())
        assert first < items
        await end_items()
    await owner.advance()
    assert len(await owner.tasks()) == (items or 1) - first
    await end_items()
    await owner.advance()
    [last] = await owner.tasks()
    assert orjson.loads(last["context"]) == items
    await owner.end(last)
    await owner.advance()
    assert (await owner.flow(flow_id))["status"] == "succeeded"
    row = await owner.pool.fetchrow("SELECT * FROM flow_node WHERE name = 'm'")
    assert (row["total"], row["unsuccessful"]) == (items, min(items, 1))


async def test_k_items_suffice_and_the_others_are_cancelled(owner):
    """The k-th success and a failure in one transaction."""
    fan = definition(
        nodes={"m": {"kind": "map", "items": "[1, 2, 3, 4]", "k": 2, "each": {"kind": "task", "type": "a"}}}
    )
    await owner.define(fan)
    flow_id = await owner.start(fan)
    await owner.advance()
    first, second, third, _ = await owner.tasks()
    await owner.end(first)
    await owner.end(second, "failed")
    await owner.end(third)
    await owner.advance()
    assert (await owner.flow(flow_id))["status"] == "succeeded"
    assert await owner.pool.fetchval("SELECT count(*) FROM task WHERE state = 'cancelled'") == 1


async def test_a_failure_stops_the_flow_and_a_recovery_goes_on(owner):
    """F3: only what failed and what is behind it runs again; the history of both is kept."""
    child = definition("child", nodes={"ok": task(), "bad": task("ok")})
    parent = definition(
        "parent",
        nodes={
            "one": task(),
            "sub": {"kind": "flow", "flow": "child", "after": ["one"]},
            "m": {"kind": "map", "items": "[1, 2]", "after": ["sub"], "each": {"kind": "task", "type": "b"}},
        },
    )
    await owner.define(child, parent)
    flow_id = await owner.start(parent, versions={"child": 1})
    await owner.run(lambda each: ("failed" if each["flow_node"] == "bad" else "succeeded", None))
    flow = await owner.flow(flow_id)
    assert flow["status"] == "failed"
    assert "it broke" in flow["error"]
    await owner.command(flow_id, "recover", generation=1)
    failing = [{"flow_item": 1, "flow_generation": 1}]

    def outcome(each):
        fails = any(all(each[key] == value for key, value in fail.items()) for fail in failing)
        return ("failed" if fails else "succeeded", None)

    ended = await owner.run(outcome)
    assert [(each["flow_node"], each["flow_item"]) for each in ended] == [("bad", None), ("m", 0), ("m", 1)]
    assert (await owner.flow(flow_id))["status"] == "failed"
    await owner.command(flow_id, "recover", generation=2)
    ended = await owner.run()
    assert [(each["flow_node"], each["flow_item"]) for each in ended] == [("m", 1)]
    flow = await owner.flow(flow_id)
    assert (flow["status"], flow["generation"], flow["error"]) == ("succeeded", 2, None)
    history = await owner.pool.fetch(
        "SELECT name, flow_generation, status FROM flow_node_history WHERE flow_id = $1 ORDER BY 2, 1",
        flow_id,
    )
    assert [tuple(row) for row in history] == [
        ("m", 0, "blocked"),
        ("sub", 0, "failed"),
        ("m", 1, "failed"),
    ]


async def failed_parent(owner, **fields):
    """A flow with a child flow, in a node with these fields, both of which have failed."""
    child = definition("child", nodes={"work": task()})
    below = {"kind": "flow", "flow": "child", **fields}
    parent = definition("parent", nodes={"below": below, "next": task("below")})
    await owner.define(child, parent)
    flow_id = await owner.start(parent, versions={"child": 1})
    await owner.run(lambda each: ("failed", None))
    return flow_id


async def recovered_parent(owner, *commands, limit=2_000):
    """A flow whose child flow has failed, after a recovery and these commands.

    Transactions take at most `limit` rows of each shard. Returns the rows of both flows.
    """
    flow_id = await failed_parent(owner)
    await owner.command(flow_id, "recover", generation=1)
    for kind in commands:
        await owner.command(flow_id, kind)
    await owner.advance(limit)
    return await owner.pool.fetch("SELECT * FROM flow WHERE root_id = $1 ORDER BY id", flow_id)


# A recovery whose child flow is recovered in the same transaction, or in a later one; and commands
# that are read with the recovery, or alone.
TRANSACTIONS = pytest.mark.parametrize(
    ("budget", "limit"), [(sys.maxsize, 2_000), (0, 2_000), (sys.maxsize, 1), (0, 1)]
)


@TRANSACTIONS
async def test_a_cancellation_behind_a_recovery_is_applied_after_it(pool, budget, limit):
    """F3: a cancellation reaches the children that a recovery starts again. In one transaction with
    the recovery it was applied first, to a flow that had ended, and had no effect."""
    rows = await recovered_parent(Owner(pool, budget=budget), "cancel", limit=limit)
    assert [(row["status"], row["generation"]) for row in rows] == [("cancelled", 1), ("cancelled", 1)]


async def test_a_command_before_a_recovery_is_applied_before_it(owner):
    """F3: a cancellation that found its flow ended does not cancel the recovery that followed."""
    flow_id = await failed_parent(owner)
    await owner.command(flow_id, "cancel")
    await owner.command(flow_id, "recover", generation=1)
    await owner.run()
    assert (await owner.flow(flow_id))["status"] == "succeeded"


async def test_a_limit_reaches_a_child_flow_whose_recovery_is_in_the_inbox(pool):
    """F5: the child flow does not run yet when its node is cancelled, and is cancelled after its
    recovery. It ran to its end, and kept its parent."""
    owner = Owner(pool, budget=0)
    flow_id = await failed_parent(owner, finish_within_s=3_600)
    await owner.command(flow_id, "recover", generation=1)
    await owner.advance_once()
    assert await pool.fetchval("SELECT flow_id FROM flow_inbox WHERE kind = 'recover'") > flow_id
    await pool.execute("UPDATE flow_limit SET at = now()")
    await owner.advance()
    rows = await pool.fetch("SELECT status FROM flow WHERE root_id = $1 ORDER BY id", flow_id)
    assert [row["status"] for row in rows] == ["failed", "cancelled"]


@TRANSACTIONS
async def test_a_pause_behind_a_recovery_reaches_the_children_that_it_recovers(pool, budget, limit):
    """F3: the children run only when the recovery is applied, in this transaction or a later one.
    Commands keep their order."""
    owner = Owner(pool, budget=budget)
    rows = await recovered_parent(owner, "resume", "pause", limit=limit)
    assert [(row["status"], row["paused"]) for row in rows] == [("running", True), ("running", True)]
    await owner.command(rows[0]["id"], "resume")
    await owner.run()
    assert (await owner.flow(rows[0]["id"]))["status"] == "succeeded"


async def test_a_cancellation_reaches_every_descendant(owner):
    """F5: a flow is cancelled only when all its descendants are final; nothing starts meanwhile."""
    leaf = definition(
        "leaf",
        nodes={"t": task(), "w": {"kind": "wait", "event": "x"}, "d": {"kind": "timer", "delay_s": 900}},
    )
    middle = definition("middle", nodes={"sub": {"kind": "flow", "flow": "leaf"}, "late": task("sub")})
    top = definition(
        "top",
        nodes={
            "m": {"kind": "map", "items": "[1, 2]", "each": {"kind": "flow", "flow": "middle"}},
            "late": task("m"),
        },
    )
    await owner.define(leaf, middle, top)
    flow_id = await owner.start(top, versions={"middle": 1, "leaf": 1})
    await owner.advance()
    assert len(await owner.tasks()) == 2
    await owner.command(flow_id, "cancel")
    await owner.advance()
    rows = await owner.pool.fetch("SELECT status, live FROM flow")
    assert [tuple(row) for row in rows] == [("cancelled", 0)] * 5
    assert {row["state"] for row in await owner.pool.fetch("SELECT state FROM task")} == {"cancelled"}
    for table in ("flow_wait", "flow_limit", "flow_inbox"):
        assert await owner.pool.fetchval(f"SELECT count(*) FROM {table}") == 0


async def test_a_paused_family_starts_nothing_and_counts_its_ends(owner):
    """F5: child flows are paused with their parent."""
    child = definition("child", nodes={"a": task(), "b": task("a")})
    parent = definition("parent", nodes={"sub": {"kind": "flow", "flow": "child"}})
    await owner.define(child, parent)
    flow_id = await owner.start(parent, versions={"child": 1})
    await owner.advance()
    await owner.command(flow_id, "pause")
    await owner.run()
    assert await owner.pool.fetchval("SELECT count(*) FROM task") == 1
    await owner.command(flow_id, "resume")
    ended = await owner.run()
    assert [each["flow_node"] for each in ended] == ["b"]
    assert (await owner.flow(flow_id))["status"] == "succeeded"


async def test_a_limit_ends_its_node(owner):
    """The task of a node that is late is cancelled, and the node fails with the limit."""
    late = definition(nodes={"t": task(finish_within_s=0.001)})
    await owner.define(late)
    flow_id = await owner.start(late)
    await owner.advance()
    await owner.advance()
    flow = await owner.flow(flow_id)
    assert (flow["status"], flow["error"]) == ("failed", "node 't' failed: finish_within_s is over")


async def test_a_claimed_task_has_started_in_time(owner):
    """`start_within_s` ends only nodes whose task no worker has claimed."""
    late = definition(nodes={"a": task(start_within_s=60), "b": task(start_within_s=60)})
    await owner.define(late)
    flow_id = await owner.start(late)
    await owner.advance()
    await owner.pool.execute("UPDATE task SET step = 1 WHERE flow_node = 'a'")
    await owner.pool.execute("UPDATE flow_limit SET at = now()")
    await owner.advance()
    rows = await owner.pool.fetch("SELECT name, status FROM flow_node WHERE flow_id = $1", flow_id)
    assert dict(rows) == {"a": "running", "b": "failed"}


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (task(input="inputs.missing"), "there is no field 'missing'"),
        ({"kind": "map", "items": '"no list"', "each": {"kind": "task", "type": "a"}}, "are a list"),
        ({"kind": "flow", "flow": "unknown"}, "no definition 'unknown'"),
        ({"kind": "timer", "until": '"soon"'}, '"soon" is no moment'),
        ({"kind": "timer", "until": "null"}, "null is no moment"),
        (
            {"kind": "map", "items": "[1]", "k": 3, "each": {"kind": "task", "type": "a"}},
            "k is 3, and the list has 1",
        ),
        (
            {"kind": "switch", "cases": [{"case": "c", "when": "inputs"}], "else": "d"},
            "a condition is true or false",
        ),
    ],
)
async def test_an_expression_that_fails_fails_its_node(owner, node, reason):
    """F1: the error names the expression, and the flow never hangs."""
    failing = definition(nodes={"n": node})
    await owner.define(failing)
    flow_id = await owner.start(failing)
    await owner.advance()
    flow = await owner.flow(flow_id)
    assert flow["status"] == "failed"
    assert reason in flow["error"]


async def test_a_node_that_another_version_does_not_have_leaves_no_limit(owner):
    """F3: the limits of a node are deleted with it. The owner could not apply a limit of a node
    that the flow does not have any more, and held the family without end."""
    waiting = {"kind": "wait", "event": "go"}
    first = definition(
        "moved",
        on_failure="continue",
        nodes={"gone": task(warn_after_s=3_600), "kept": waiting},
    )
    second = {**first, "version": 2, "nodes": {"new": task(), "kept": waiting}}
    await owner.define(first, second)
    flow_id = await owner.start(first)
    await owner.run(lambda each: ("failed", None))
    await owner.command(flow_id, "recover", generation=1, nodes=["new"], version=2)
    await owner.advance()
    assert (await owner.flow(flow_id))["version"] == 2
    await owner.pool.execute("UPDATE flow_limit SET at = now()")
    await owner.run()
    assert await owner.nodes(flow_id) == {"new": "succeeded", "kept": "running"}
    assert await owner.pool.fetchval("SELECT count(*) FROM flow_limit") == 0


async def test_a_reason_may_have_a_character_that_postgresql_cannot_store(owner):
    """F1: the error of a task is JSON, and may have a NUL. The owner could not write the reason,
    and held the family."""
    failing = definition("nul", nodes={"fails": task()})
    await owner.define(failing)
    flow_id = await owner.start(failing)
    await owner.advance()
    await owner.pool.execute(
        "UPDATE task SET state = 'failed', finished_at = now(), error = $1",
        orjson.dumps({"kind": "E", "message": "c\0d"}).decode(),
    )
    await owner.advance()
    flow = await owner.flow(flow_id)
    assert (flow["status"], "c\ufffdd" in flow["error"]) == ("failed", True)
    assert "c\ufffdd" in await owner.pool.fetchval("SELECT reason FROM flow_node")


async def test_a_child_flow_that_has_ended_meanwhile_is_not_recovered_alone(owner):
    """F3: the parent has counted its end. The child flow ran again below a flow that had ended."""
    child = definition("child", on_failure="continue", nodes={"a": task(), "b": task()})
    parent = definition("parent", nodes={"sub": {"kind": "flow", "flow": "child"}})
    await owner.define(child, parent)
    flow_id = await owner.start(parent, versions={"child": 1})
    await owner.advance()
    first, second = await owner.tasks()
    await owner.end(first, "failed")
    await owner.advance()
    # The gateway still sees that the child flow runs.
    await owner.end(second)
    await owner.command(first["flow_id"], "recover", generation=1)
    await owner.advance()
    rows = await owner.pool.fetch("SELECT status, generation FROM flow ORDER BY id")
    assert [tuple(row) for row in rows] == [("failed", 0), ("failed", 0)]
    await owner.command(flow_id, "recover", generation=1)
    await owner.run()
    rows = await owner.pool.fetch("SELECT status, generation FROM flow ORDER BY id")
    assert [tuple(row) for row in rows] == [("succeeded", 1), ("succeeded", 1)]
