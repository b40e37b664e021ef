"""What the outputs of nodes and flows are, and what happens when one cannot be read."""

from __future__ import annotations

import orjson
import pytest
from tests.integration.flow_owner.support import Owner, definition, running_with, task
from tests.support.services import running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.flow_owner import ending, result_lists
from penstock.flow_owner.app import create_app
from penstock.flow_owner.evaluation import Scope
from penstock.flow_owner.settings import FlowsSettings
from penstock.postgres import tasks, types
from penstock.worker import Child, Done, Fail, Spawn, Worker, WorkerSettings


@pytest.fixture
def settings(where):
    return FlowsSettings(**where, flow_own_retry_s=0.2, flow_sweep_s=1.0)


@pytest.fixture
async def store(pool):
    return Owner(pool)


async def live(store, count=1, flow_id=None):
    """The live tasks, once there are `count`."""

    async def find():
        found = await store.tasks(flow_id)
        return found if len(found) == count else None

    return await wait_until(find)


async def test_an_input_that_all_items_share_is_encoded_once(store, monkeypatch):
    """F2: as are the defaults of a child flow, and a list that a map only names is not copied."""
    encoded = []
    original = Scope.encoded

    def counted(self, value, namespace, text):
        encoded.append(text)
        return original(self, value, namespace, text)

    monkeypatch.setattr(Scope, "encoded", counted)
    child = definition("child", inputs={"n": {}, "m": {"default": 1}}, nodes={"t": task()})
    each = {
        "task": task(input='{"all": inputs.large}'),
        "flow": {"kind": "flow", "flow": "child", "input": '{"n": inputs.large}'},
        "item": task(input="[item]"),
    }
    parent = definition(
        "parent",
        inputs={"large": {}},
        nodes={name: {"kind": "map", "items": "inputs.large", "each": one} for name, one in each.items()},
    )
    await store.define(child, parent)
    flow_id = await store.start(parent, {"large": ["x" * 5_000, 1, 2]}, versions={"child": 1})
    await store.advance()
    assert sorted(encoded) == ["[item]"] * 3 + ['{"all": inputs.large}', '{"n": inputs.large}']
    given = await store.pool.fetch(
        "SELECT context_ref FROM task WHERE flow_id = $1 AND flow_node = 'task'", flow_id
    )
    assert len(given) == 3
    assert len(set(given)) == 1
    lists = await store.pool.fetch("SELECT DISTINCT list_ref FROM flow_node WHERE flow_id = $1", flow_id)
    assert len(lists) == 1


async def test_items_whose_flow_has_no_output_are_null(store):
    """F1: the output of a map has null for a child flow whose definition names no output."""
    child = definition("child", nodes={"t": task()})
    parent = definition(
        "parent",
        nodes={
            "m": {"kind": "map", "items": "[1, 2]", "each": {"kind": "flow", "flow": "child"}},
            "u": task("m", input="nodes.m.output"),
        },
    )
    await store.define(child, parent)
    flow_id = await store.start(parent, versions={"child": 1})
    ended = await store.run()
    assert orjson.loads(ended[-1]["context"]) == [None, None]
    assert (await store.flow(flow_id))["status"] == "succeeded"


async def test_a_flow_whose_output_cannot_be_evaluated_fails(store):
    """F1, F3: its parent does not go on with null. All its nodes have succeeded, so there is
    nothing to recover in it: the parent's node fails again."""
    child = definition("child", inputs={"n": {}}, nodes={"t": task()}, output="nodes.t.output / inputs.n")
    parent = definition(
        "parent",
        nodes={
            "c": {"kind": "flow", "flow": "child", "input": '{"n": 0}'},
            "u": task("c", input="nodes.c.output"),
        },
    )
    await store.define(child, parent)
    flow_id = await store.start(parent, versions={"child": 1})
    await store.run(lambda _one: ("succeeded", 6))
    row = await store.flow(flow_id)
    assert row["status"] == "failed"
    assert "the output: " in row["error"]
    [inner] = await store.pool.fetch("SELECT id, status, generation FROM flow WHERE parent_id = $1", flow_id)
    assert inner["status"] == "failed"
    await store.command(flow_id, "recover", generation=1)
    await store.run(lambda _one: ("succeeded", 6))
    found = await store.pool.fetch("SELECT status, generation FROM flow ORDER BY id")
    assert [tuple(one) for one in found] == [("failed", 1), ("failed", 0)]
    assert not await store.pool.fetchval("SELECT count(*) FROM flow_inbox")


async def test_only_nodes_that_succeeded_have_an_output(store):
    """F1: `has` is true for a node that succeeded, and false for one that failed or was skipped."""
    shown = "{" + ", ".join(f'"{name}": has(nodes.{name}.output)' for name in "abc") + "}"
    flow = definition(
        on_failure="continue",
        nodes={
            "a": task(),
            "b": task("a"),
            "c": task(),
            "d": task("a", "b", "c", join="all_done", input=shown),
        },
    )
    await store.define(flow)
    await store.start(flow)
    failing = await store.run(lambda one: ("failed" if one["flow_node"] == "a" else "succeeded", None))
    [last] = [one for one in failing if one["flow_node"] == "d"]
    assert orjson.loads(last["context"]) == {"a": False, "b": False, "c": True}


async def test_a_result_that_cannot_be_read_is_null_and_named(store, settings, monkeypatch):
    """F1: a map whose items have results above the limit ends, and its reason names the limit."""
    monkeypatch.setattr(result_lists, "LIMIT_BYTES", 1_000)
    flow = definition(
        inputs={"n": {}},
        nodes={
            "m": {"kind": "map", "items": "[1, 2]", "each": task(input="[inputs.n, inputs.n]")},
            "u": task("m", input="nodes.m.output"),
        },
    )
    await store.define(flow)
    async with running_service(create_app(settings)):
        flow_id = await store.start(flow, {"n": "x" * 3_000})
        large, small = await live(store, 2)
    await store.end(small, result=7)
    await end_with_its_context(store, large)
    # The second process has not kept the object.
    async with running_service(create_app(settings)):
        [last] = await live(store)
        assert orjson.loads(last["context"]) == [None, 7]
    reason = await store.pool.fetchval(
        "SELECT reason FROM flow_node WHERE flow_id = $1 AND name = 'm'", flow_id
    )
    assert "item 0: " in reason
    assert "1,000" in reason


async def end_with_its_context(store, one):
    """Ends a task whose result is the object that its context names."""
    await store.pool.execute(
        "UPDATE task SET state = 'succeeded', result_type = 'json', result_ref = context_ref, finished_at = now() WHERE id = $1",
        one["id"],
    )


async def test_an_object_is_fetched_beside_a_family_that_cannot_be_advanced(store, settings):
    """F1: a family that needs an object of another process goes on, though a faulty family is in
    the same transaction."""
    large = definition(
        "large",
        inputs={"n": {}},
        nodes={"t": task(input="[inputs.n, inputs.n]"), "u": task("t", input="size(nodes.t.output)")},
    )
    bad = definition("bad", nodes={"t": task()})
    await store.define(large, bad)
    async with running_service(create_app(settings)):
        flow_id = await store.start(large, {"n": "x" * 3_000})
        [given] = await live(store)
    await end_with_its_context(store, given)
    for _ in range(3):
        await store.start(bad)
    await store.pool.execute("DELETE FROM flow_definition WHERE name = 'bad'")
    async with running_service(create_app(settings)):
        [last] = await live(store, 1, flow_id)
        assert orjson.loads(last["context"]) == 2


async def test_results_of_children_survive_an_unreachable_k(store, settings, monkeypatch):
    """F6: the stage gets the results of the children that succeeded, also when `k` was missed, and
    also when they are more than a transaction reads."""
    monkeypatch.setattr(ending, "PART_ITEMS", 2)
    worker = Worker(WorkerSettings(kafka=settings.kafka, prefix=settings.prefix, objects=settings.objects))

    @worker.stage("a.start")
    async def start(given):
        return Spawn([Child("b", n) for n in range(5)], then="joined", k=4, parallel=1)

    @worker.stage("a.joined")
    async def joined(given):
        return Done(given.context["children"])

    @worker.stage("b.start")
    async def child(given):
        return Fail("odd", permanent=True) if given.context in (2, 3) else Done(given.context)

    async with running_with(settings, worker):
        for name in "ab":
            await types.register(store.pool, types.TaskType(name=name, partitions=1))
        [made] = await tasks.submit(
            store.pool, [Submission(type="a", stage="start", context=Context.encode(None))]
        )
        row = await wait_until(
            lambda: store.pool.fetchrow("SELECT * FROM task WHERE id = $1 AND state = 'succeeded'", made.id)
        )
    children = orjson.loads(row["result"])
    assert children["results"][:4] == [0, 1, None, None]
    assert "did not succeed" in children["error"]
