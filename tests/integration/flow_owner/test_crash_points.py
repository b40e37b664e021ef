"""The owner's process dies before and after each of its statements, and another one takes over.

A death after a statement is a death before the next one: between them the process changes only its
own memory. So a death after a statement of its own is tried for the last one only.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

from tests.integration.flow_owner.support import CrashError, FragileConnection, Owner, definition, task
from tests.support.flow_tasks import suspend
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.flow_submission import FlowEvent
from penstock.flow_owner import owner
from penstock.flow_owner.contents import Contents
from penstock.flow_owner.settings import FlowsSettings
from penstock.objects import ObjectStore
from penstock.postgres import flow_events
from penstock.postgres.flows import SHARDS
from penstock.postgres.queries import query
from penstock.postgres.session import open_session

CHILD = definition("child", nodes={"work": task()}, output="nodes.work.output")
LOAD = {**CHILD, "flow": "load"}
CASES = [{"case": "large", "when": "nodes.first.output > 100"}]
# The task of `risky` fails in the first generation, that of `spawns` waits for children, and the
# second item of `some` is cancelled when the first one suffices.
PARENT = definition(
    "parent",
    inputs={"key": {}},
    on_failure="continue",
    nodes={
        "first": task(finish_within_s=3_600),
        "risky": task(),
        "spawns": task(),
        "second": task("first", input="nodes.first.output"),
        "size": {"kind": "switch", "after": ["first"], "cases": CASES, "else": "small"},
        "never": task("size.large"),
        "approval": {"kind": "wait", "after": ["size.small"], "event": "go", "key": "inputs.key"},
        "loaded": {"kind": "wait", "flow": "load", "tick": "same"},
        "sub": {"kind": "flow", "flow": "child", "after": ["approval"]},
        "some": {"kind": "map", "items": "[1, 2]", "k": 1, "each": {"kind": "task", "type": "b"}},
        "joined": task("second", "risky", "spawns", "some"),
        "last": task("joined", "sub", "never", "loaded", input="nodes.sub.output"),
    },
    output="nodes.last.output",
)
TICK = datetime(2026, 11, 23, tzinfo=UTC)
# Statements at which the owner must die, or the flow above does not show what it is made for.
COVERED = [
    *("take", "write_nodes", "write_flows", "write_limits", "write_waits", "insert_tasks", "insert_children"),
    *("wake", "keep_history", "command_children", "unwait", "match_events", "match_runs", "events", "runs"),
]
# Everything that a run leaves, without ids and times.
LEFT = {
    "flows": """SELECT name, status, generation, live, unfinished, unsuccessful, output FROM flow
                WHERE id >= $1 ORDER BY name, id""",
    "nodes": """SELECT f.name, n.name, n.status, n.generation, n.arrivals, n.chosen_case, n.total, n.opened,
                       n.succeeded, n.unsuccessful, n.output
                FROM flow_node n JOIN flow f ON f.id = n.flow_id WHERE f.id >= $1 ORDER BY 1, 2""",
    "history": """SELECT name, flow_generation, status, generation FROM flow_node_history
                  WHERE flow_id >= $1 ORDER BY 1, 2""",
    "tasks": """SELECT f.name, t.flow_node, t.flow_item, t.flow_generation, t.state, t.step, t.context, t.result
                FROM task t JOIN flow f ON f.id = t.flow_id WHERE f.id >= $1 ORDER BY 1, 2, 3, 4""",
    "events": """WITH taken AS (DELETE FROM outbox RETURNING records),
                      event AS (SELECT convert_from(unnest(records), 'utf8')::json AS e FROM taken)
                 SELECT e ->> 'event', e #>> '{flow,name}', e #>> '{flow,generation}', e #>> '{task,type}'
                 FROM event ORDER BY 1, 2, 3, 4""",
    "callbacks": """WITH taken AS (DELETE FROM callback RETURNING target, body)
                    SELECT target, convert_from(body, 'utf8')::json ->> 'event' FROM taken ORDER BY 1, 2""",
    "open": "SELECT kind FROM flow_inbox UNION ALL SELECT node FROM flow_wait UNION ALL SELECT node FROM flow_limit",
}


async def end_task(store, each):
    """Ends a live task, as a worker does; False for the task that runs without end."""
    match each["flow_node"], each["flow_generation"], each["flow_item"], each["step"]:
        case "some", _, 1, _:
            return False
        case "risky", 0, _, _:
            await store.end(each, "failed")
        case "spawns", _, _, 0:
            await suspend(store.pool, each["id"], 2, "b")
        case _:
            await store.end(each, result=7)
    return True


async def work(store, settings, session, flow_id):
    """A new owner of all shards does what the loop of the service does, until nothing is left.

    The tasks end while the owner is idle. A failed flow is recovered once. The publisher publishes
    nothing, so the outbox keeps all events.
    """
    owning = owner.Owner(settings, session, Contents(ObjectStore(settings.objects)), Mock())
    owning._work.owned.update(range(SHARDS))
    await owning._sweep()
    while True:
        while owning._work:
            await owning._advance()
        if not any([await end_task(store, each) for each in await store.tasks()]):
            flow = await store.flow(flow_id)
            if (flow["status"], flow["generation"]) != ("failed", 0):
                return
            await store.command(flow_id, "recover", generation=1)
        # In place of the notifications.
        rows = await store.pool.fetch("SELECT DISTINCT shard FROM flow_inbox")
        owning._work.mark(row["shard"] for row in rows)


async def run(store, settings, successor, number=0, last=0, *, runs_last=False):
    """Flows whose first owner dies; returns its statements, and what the flows have left."""
    key, tick = str(number), {"tick": TICK + timedelta(days=number)}
    await flow_events.deliver(store.pool, [FlowEvent(id=key, event="go", key=key, data=Context.encode(1))])
    called = {"events": "all", "callbacks": ("http://a.test", "http://b.test")}
    flow_id = await store.start(PARENT, {"key": key}, {"child": 1}, schedule="parents", **tick, **called)
    await store.start(LOAD, schedule="loads", **tick)
    async with open_session(settings.postgres, "test", locks=False, generic_plans=True) as session:
        connection = session._connection

        async def kill():
            ended = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)"
            await store.pool.execute("SELECT pg_terminate_backend($1)", session.pid)
            await wait_until(lambda: store.pool.fetchval(ended, session.pid), every=0.002)
            connection.terminate()

        fragile = FragileConnection(connection, last, runs_last=runs_last, kill=kill)
        session._connection = fragile
        with suppress(CrashError):
            await work(store, settings, session, flow_id)
    if last:
        await work(store, settings, successor, flow_id)
    left = {}
    for name, text in LEFT.items():
        rows = await store.pool.fetch(text, *([flow_id] if "$1" in text else []))
        left[name] = [tuple(row) for row in rows]
    return fragile.statements, left


async def test_an_owner_may_die_before_and_after_each_of_its_statements(pool, database):
    """O1, F1, F2, F3: flows end as without the death. Each task, child flow, event and callback is
    there once, no arrival counts twice, and no event or run that a node waits for is lost."""
    settings, store = FlowsSettings(postgres=database, objects="memory:///"), Owner(pool)
    await store.define(CHILD, LOAD, PARENT)
    async with open_session(settings.postgres, "test", locks=False, generic_plans=True) as successor:
        statements, expected = await run(store, settings, successor)
        ends = {row[:2] for row in expected["flows"]}
        assert ends == {(name, "succeeded") for name in ("parent", "child", "load", "a")}
        assert not expected["open"]
        assert {query(f"flows.{name}") for name in COVERED} <= set(statements)
        points = [*((last, False) for last in range(1, len(statements) + 1)), (len(statements), True)]
        for number, (last, runs_last) in enumerate(points, 1):
            ran, left = await run(store, settings, successor, number, last, runs_last=runs_last)
            point = f"{'after' if runs_last else 'before'} statement {last}: {statements[last - 1][:80]}"
            assert ran == statements[:last], point
            assert left == expected, point
