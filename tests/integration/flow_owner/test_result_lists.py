"""Lists of results that are too long, or too large, for one transaction."""

from __future__ import annotations

from unittest.mock import Mock

import orjson
import pytest
from tests.integration.flow_owner.support import SHARDS, Owner, definition, task
from tests.support.waiting import wait_until

from penstock.core.flow import result_parts
from penstock.flow_owner import contents, ending, owner, result_lists
from penstock.flow_owner.result_lists import ResultLists
from penstock.flow_owner.settings import FlowsSettings
from penstock.objects import ObjectStore
from penstock.postgres.session import open_session


@pytest.fixture
async def store(pool, tmp_path):
    return Owner(pool, f"file://{tmp_path}/objects")


def joined(name="parent", **fields):
    """A map over the input `items`, and a task that gets the results."""
    each = fields.pop("each", task())
    nodes = {"m": {"kind": "map", "items": "inputs.items", "parallel": 100_000, "each": each, **fields}}
    nodes["u"] = task("m", input="nodes.m.output")
    nodes["size"] = task("m", input='{"n": size(nodes.m.output)}')
    return definition(name, inputs={"items": {}}, nodes=nodes)


async def end_items(store, result="to_json(flow_item)::text"):
    """Ends all live items, the second of which fails."""
    return await store.pool.execute(
        f"""UPDATE task SET state = CASE flow_item WHEN 1 THEN 'failed' ELSE 'succeeded' END,
                   result_type = 'json', result = convert_to({result}, 'utf8'), finished_at = now()
            WHERE flow_item IS NOT NULL AND state = 'ready'"""
    )


async def context_behind(store, flow_id, node="u"):
    """The value of the context of a task behind the map, and its key in the object store."""
    [last] = await store.pool.fetch("SELECT * FROM task WHERE flow_id = $1 AND flow_node = $2", flow_id, node)
    if last["context_ref"] is None:
        return orjson.loads(last["context"]), None
    ref = orjson.loads(last["context_ref"])
    data = await store.contents._objects.range(ref["key"], 0, ref["size"])
    return orjson.loads(data), ref["key"]


async def test_a_list_of_any_length_has_each_result_once(store):
    """F2: none, one, as many as a transaction reads, and one more; null where an item failed."""
    flow = joined(tolerate=1)
    await store.define(flow)
    for total in (0, 1, result_parts.PART_ITEMS, result_parts.PART_ITEMS + 1):
        flow_id = await store.start(flow, {"items": list(range(total))})
        await store.advance()
        await end_items(store)
        await store.advance()
        assert (await context_behind(store, flow_id))[0] == [n if n != 1 else None for n in range(total)]


@pytest.fixture
def small_parts(monkeypatch):
    """Bounds that three items exceed."""
    for module in (result_parts, ending):
        monkeypatch.setattr(module, "PART_ITEMS", 2)
    monkeypatch.setattr(result_lists, "HELD_BYTES", 1_000)
    monkeypatch.setattr(contents, "PINNED_BYTES", 1_000)


@pytest.mark.usefixtures("small_parts")
async def test_a_long_list_has_the_outputs_of_child_flows_that_end_with_their_map(store):
    """F2: the list is read beside the transaction in which the last child flow ends."""
    child = definition("child", inputs={"n": {}}, nodes={"t": task()}, output="inputs.n")
    flow = joined(each={"kind": "flow", "flow": "child", "input": '{"n": item}'})
    await store.define(child, flow)
    given = ["x" * 600, "y" * 600, "z" * 600]
    for _ in range(2):
        flow_id = await store.start(flow, {"items": given}, versions={"child": 1})
        await store.run()
        assert (await context_behind(store, flow_id))[0] == given
    assert not store.contents.lists.committed_first


@pytest.mark.usefixtures("small_parts")
async def test_all_lists_of_a_family_are_collected_at_once(store, monkeypatch):
    """F2: a list at a time, a transaction would begin again for each of thousands. The lists are
    forgotten once their decisions are committed."""
    child = joined("child", tolerate=1)
    flow = definition(
        "parent",
        nodes={
            "all": {
                "kind": "map",
                "items": "[1, 2, 3]",
                "each": {"kind": "flow", "flow": "child", "input": '{"items": [1, 2, 3]}'},
            }
        },
    )
    await store.define(child, flow)
    root = await store.start(flow, {}, versions={"child": 1})
    await store.advance()
    collected = []
    lists = store.contents.lists

    async def collect(results, fetch):
        collected.append(results)
        await ResultLists.collect(lists, results, fetch)

    monkeypatch.setattr(lists, "collect", collect)
    await end_items(store)
    await store.advance_once()
    assert len(collected) == 3
    await store.advance()
    assert len(collected) == 3
    lists.release([root])
    assert not lists._collected


@pytest.mark.usefixtures("small_parts")
async def test_a_list_beyond_its_bound_is_null_and_the_reason_says_so(store, monkeypatch):
    """F2: a list that cannot be written would hold its family without end."""
    monkeypatch.setattr(result_lists, "LIST_BYTES", 1_000)
    flow = joined(tolerate=1)
    await store.define(flow)
    flow_id = await store.start(flow, {"items": [1, 2, 3]})
    await store.advance()
    await end_items(store, result="to_json(repeat('x', 600))::text")
    await store.advance()
    assert await context_behind(store, flow_id) == (None, None)
    reason = await store.pool.fetchval(
        "SELECT reason FROM flow_node WHERE flow_id = $1 AND name = 'm'", flow_id
    )
    assert reason.startswith("the results have more than 1,000 bytes together")


@pytest.mark.usefixtures("small_parts")
async def test_an_owner_that_dies_before_the_join_leaves_the_same_object(store, database, tmp_path):
    """F2, O1: results that are larger together than the owner keeps are all in the list, and the
    next owner writes the list to the same key. They became null. The size of the list is known
    without them."""
    settings = FlowsSettings(postgres=database, objects=f"file://{tmp_path}/objects")
    flow = joined()
    await store.define(flow)
    flow_id = await store.start(flow, {"items": list(range(5))})
    await store.advance()
    results = ["x" * 5_000 + str(n) for n in range(5)]
    for one, result in zip(await store.tasks(), results, strict=True):
        kept = store.contents.refer(contents.Context.encode(result), "default", unstored := {})
        await store.contents.store(unstored.values())
        await store.pool.execute(
            """UPDATE task SET state = 'succeeded', result_type = 'json', result_ref = $2, finished_at = now()
               WHERE id = $1""",
            one["id"],
            orjson.dumps(kept.ref.to_wire()).decode(),
        )
    written = []

    class Objects(ObjectStore):
        async def put_chunks(self, object_key, chunks):
            await super().put_chunks(object_key, chunks)
            written.append(object_key)

    for owners in (1, 2):
        async with open_session(settings.postgres, "test", generic_plans=True) as session:
            owning = owner.Owner(settings, session, contents.Contents(Objects(settings.objects)), Mock())
            owning._work.owned.update(SHARDS)
            await owning._sweep()
            await owning._advance()
            await wait_until(lambda owners=owners, owning=owning: len(written) == owners and not owning.held)
            if owners == 2:
                owning._work.mark(SHARDS)
                await owning._advance()
    assert await context_behind(store, flow_id) == (results, written[0])
    assert written[0] == written[1]
    assert (await context_behind(store, flow_id, "size"))[0] == {"n": 5}
