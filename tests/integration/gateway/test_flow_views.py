"""Flows over HTTP, advanced by the owner's code on the real PostgreSQL: what they show, why they
stand, and commands."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import orjson
import pytest
from tests.integration.flow_owner.support import Owner, definition, task
from tests.support.waiting import in_time, wait_until

from penstock.flow_owner.owner import GROUP
from penstock.gateway import end_listener, flow_operations
from penstock.http.preferences import LONGEST_WAIT_S
from penstock.objects import ObjectStore
from penstock.postgres import flow_commands, flow_views, schedule_claims, types
from penstock.postgres.flow_starts import match_events
from penstock.postgres.flows import SHARDS
from penstock.postgres.ownership import lock
from penstock.postgres.queries import query
from penstock.postgres.session import open_session
from penstock.task_sync.history import History
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = (types.TaskType(name="a", partitions=1),)

# A map, then a child flow that waits for an event, then a switch with a branch that is not taken.
PUBLISHING = definition(
    "publishing",
    nodes={"approve": {"kind": "wait", "event": "approved", "key": "inputs.day"}},
    inputs={"day": {}},
)
NIGHTLY = definition(
    "nightly",
    nodes={
        "list_files": task(),
        "load_all": {
            "kind": "map",
            "items": "nodes.list_files.output.files",
            "parallel": 3,
            "tolerate": 1,
            "each": {"kind": "task", "type": "a", "input": "item"},
            "after": ["list_files"],
        },
        "publish": {"kind": "flow", "flow": "publishing", "input": "inputs", "after": ["load_all"]},
        "pick": {
            "kind": "switch",
            "cases": [{"case": "big", "when": "false"}],
            "else": "small",
            "after": ["publish"],
        },
        "tell": task("pick.small"),
        "shout": task("pick.big"),
        "rest": {"kind": "timer", "delay_s": 3600, "after": ["tell"]},
    },
    inputs={"day": {}},
    output="inputs.day",
)
TWO = definition("two", on_failure="continue", nodes={"left": task(), "right": task(), "last": task("left")})


@pytest.fixture
async def owner(pool):
    owner = Owner(pool)
    await owner.define(PUBLISHING, NIGHTLY, TWO)
    return owner


async def why(gateway, flow_id):
    answer = await gateway.get(f"/flows/{flow_id}/why")
    assert answer.status == 200, answer.body
    return answer.body


async def nodes_of(gateway, flow_id):
    answer = await gateway.get(f"/flows/{flow_id}")
    assert answer.status == 200, answer.body
    return {node["name"]: node for node in answer.body["nodes"]}


async def test_a_family_shows_its_nodes_its_items_and_the_leaf_that_blocks(
    gateway, owner, pool, database, monkeypatch
):
    """F1, F2, O8: at each step of a flow with a map, a child flow and a switch, the views
    agree with its rows, and `why` names the leaf."""
    flow_id = await owner.start(
        NIGHTLY, {"day": "monday"}, versions={"publishing": 1}, labels={"team": "data"}, idempotency_key="k"
    )
    path = f"/flows/{flow_id}"
    found = await why(gateway, flow_id)
    assert found["reason"] == "unapplied"
    assert found["path"][0]["figures"]["unapplied"] == 1
    assert "is `flows` running?" in found["sentence"]
    async with open_session(database, "flows owner host-1-42") as session:
        assert await lock(session, GROUP, str(flow_id % SHARDS))
        found = await why(gateway, flow_id)
        assert "the service `flows` on host-1-42 is about to apply it" in found["sentence"]
    await owner.advance()
    [first] = await owner.tasks(flow_id)
    found = await why(gateway, flow_id)
    assert found["sentence"].startswith(
        f"node list_files runs task {first['id']} (a, ready): no task-sync owns"
    )
    assert (found["reason"], found["path"][0]["task"]) == ("task", first["id"])
    assert found["task"] == (await gateway.get(f"/tasks/{first['id']}/why")).body
    await owner.end(first, result={"files": list(range(5))})
    await owner.advance()

    items = await owner.tasks(flow_id)
    await owner.end(items[0], "failed")
    await owner.end(items[1])
    await owner.advance()
    load = (await nodes_of(gateway, flow_id))["load_all"]
    assert load["items"] == {
        "total": 5,
        "opened": 5,
        "live": 3,
        "succeeded": 1,
        "unsuccessful": 1,
        "retry": 0,
    }
    found = await why(gateway, flow_id)
    assert found["sentence"].startswith(
        "node load_all has 3 of 5 items live, 1 have succeeded, 1 have not succeeded; the first live one is item 2, "
        f"task {items[2]['id']} (a, ready): no task-sync owns its type"
    )
    assert (found["reason"], found["task"]["reason"]) == ("map", "no_owner")
    page = (await gateway.get(f"{path}/nodes/load_all?limit=2")).body
    assert [child["item"] for child in page["children"]] == [0, 1]
    rest = (await gateway.get(f"{path}/nodes/load_all?cursor={page['next']}")).body
    assert ([child["item"] for child in rest["children"]], rest["next"]) == ([2, 3, 4], None)
    assert rest["children"][0]["task"]["id"] == items[2]["id"]
    assert rest["children"][0]["logs"] == f"/tasks/{items[2]['id']}/logs"
    failed = (await gateway.get(f"{path}/nodes/load_all?state=failed,cancelled")).body
    assert [child["item"] for child in failed["children"]] == [0]
    # A part of the children that has no match is an empty page, and not the end.
    monkeypatch.setattr(flow_views, "CHILDREN_PER_PART", 1)
    empty = (await gateway.get(f"{path}/nodes/load_all?state=succeeded")).body
    assert (empty["children"], empty["next"]) == ([], "0.0")
    monkeypatch.undo()

    for each in await owner.tasks(flow_id):
        await owner.end(each)
    await owner.advance()
    publish = (await nodes_of(gateway, flow_id))["publish"]
    child_id = publish["flow"]["id"]
    assert publish["flow"]["status"] == "running"
    found = await why(gateway, flow_id)
    assert [(step["flow"], step["node"], step["reason"]) for step in found["path"]] == [
        (flow_id, "publish", "flow"),
        (child_id, "approve", "event"),
    ]
    assert found["sentence"] == "node approve waits for the event approved with the key monday"
    assert found["task"] is None
    family = (await gateway.get(f"/flows?family={flow_id}")).body["flows"]
    assert [(flow["id"], flow["parent"] and flow["parent"]["node"]) for flow in family] == [
        (child_id, "publish"),
        (flow_id, None),
    ]
    child = (await gateway.get(f"{path}/nodes/publish")).body["children"][0]
    assert (child["item"], child["flow"]["id"]) == (None, child_id)

    await pool.execute(
        "INSERT INTO flow_event (namespace, id, event, key, data) VALUES ('default', 'e', 'approved', 'monday', '{}')"
    )
    await owner.advance()
    assert await match_events(pool) == 1
    await owner.run()
    found = await why(gateway, flow_id)
    assert found["reason"] == "timer"
    states = {name: node["status"] for name, node in (await nodes_of(gateway, flow_id)).items()}
    assert states == {
        "list_files": "succeeded",
        "load_all": "succeeded",
        "publish": "succeeded",
        "pick": "succeeded",
        "tell": "succeeded",
        "shout": "skipped",
        "rest": "running",
    }
    await pool.execute("UPDATE flow_limit SET at = now() - interval '1 minute' WHERE kind = 'timer'")
    found = await why(gateway, flow_id)
    assert (found["reason"], found["path"][0]["node"]) == ("unapplied", "rest")
    await owner.advance()
    shown = (await gateway.get(f"{path}?definition=true")).body
    assert (shown["status"], shown["inputs"], shown["output"]) == ("succeeded", {"day": "monday"}, "monday")
    assert (shown["labels"], shown["versions"]) == ({"team": "data"}, {"publishing": 1})
    assert shown["definition"] == NIGHTLY
    assert (await why(gateway, flow_id))["sentence"] == "it has succeeded"


async def test_lists_are_filtered_and_paged(gateway, owner, pool, monkeypatch):
    """O8: by name, state, label, idempotency key and time; child flows only with their family. A
    search without an index goes on in parts."""
    ids = [await owner.start(TWO, labels={"n": str(n)}, idempotency_key=f"k{n}") for n in range(5)]
    other = await owner.start(NIGHTLY, {"day": "x"}, versions={"publishing": 1})
    await owner.advance()
    await owner.run(lambda task: ("failed" if task["flow_id"] == ids[0] else "succeeded", None))

    async def listed(query=""):
        answer = await gateway.get(f"/flows?{query}")
        assert answer.status == 200, answer.body
        return [flow["id"] for flow in answer.body["flows"]]

    page = (await gateway.get("/flows?limit=4")).body
    following = (await gateway.get(f"/flows?limit=4&cursor={page['next']}")).body
    assert [flow["id"] for flow in page["flows"] + following["flows"]] == [other, *reversed(ids)]
    monkeypatch.setattr(flow_views, "ROWS_PER_PART", 2)
    rows, searched_to = [], None
    while True:
        found = await flow_views.find(pool, name="two", before_id=searched_to, within_s=0.0)
        rows += found.rows
        assert len(found.rows) <= 2
        if (searched_to := found.searched_to) is None:
            break
    assert [row["id"] for row in rows] == [*reversed(ids)]
    assert await listed("name=two&status=failed") == [ids[0]]
    assert await listed("label=n:3") == [ids[3]]
    assert await listed("name=two&idempotency_key=k2") == [ids[2]]
    # Its map has no list.
    assert await listed("since=2026-01-01T00:00:00Z&status=failed&status=cancelled") == [other, ids[0]]
    assert await listed("since=2099-01-01T00:00:00Z") == []
    assert (await gateway.get("/flows?since=yesterday")).status == 422
    assert (await gateway.get("/flows?status=ready")).status == 422
    assert (await gateway.get("/flows/77/why")).status == 404
    assert (await gateway.get(f"/flows/{other}/nodes/unknown")).status == 404


async def test_a_list_is_filtered_by_the_states_that_running_flows_show(gateway, owner):
    """O8: the command line shows these states, and its filter refused them."""
    paused, cancelling, running = [await owner.start(TWO) for _ in range(3)]
    await owner.command(paused, "pause")
    await owner.advance()
    await owner.command(cancelling, "cancel")
    # It is cancelling until its owner has read the ends of its tasks.
    assert await owner.advance_once()

    async def listed(query):
        return [flow["id"] for flow in (await gateway.get(f"/flows?{query}")).body["flows"]]

    assert await listed("status=paused") == [paused]
    assert await listed("status=cancelling") == [cancelling]
    assert await listed("status=paused,cancelling,failed") == [cancelling, paused]
    assert await listed("status=running") == [running, cancelling, paused]


async def test_commands_reach_the_owner_and_a_refused_recovery_says_why(gateway, owner, pool):
    """F3, F5: pause, resume, cancel and recover are applied by the owner. A recovery that cannot
    happen is refused at once with its code, its nodes and what to do; each keeps its history."""
    flow_id = await owner.start(TWO)
    await owner.advance()
    path = f"/flows/{flow_id}"
    assert (await gateway.post(f"{path}/pause")).status == 202
    await owner.advance()
    assert (await why(gateway, flow_id))["sentence"] == (
        "it is paused until it is resumed; 2 nodes that run go on to the end"
    )
    left, right = sorted(await owner.tasks(flow_id), key=lambda each: each["flow_node"])
    await owner.end(left)
    await owner.advance()
    assert (await nodes_of(gateway, flow_id))["last"]["status"] == "ready"
    assert (await gateway.post(f"{path}/resume")).status == 202
    await owner.advance()
    assert (await nodes_of(gateway, flow_id))["last"]["status"] == "running"

    refused = await gateway.post(f"{path}/recover", {"nodes": ["left"]})
    assert (refused.status, refused.body["code"], refused.body["nodes"]) == (409, "node_running", ["last"])
    assert "wait for the end" in refused.body["detail"]
    refused = await gateway.post(f"{path}/recover", {"nodes": ["lost"]})
    assert (refused.status, refused.body["code"]) == (409, "unknown_node")
    refused = await gateway.post(f"{path}/recover")
    assert (refused.status, refused.body["code"]) == (409, "nothing_to_recover")
    await owner.end(right, "failed")
    await owner.advance()
    tried = await gateway.post(f"{path}/recover", {"dry_run": True})
    assert (tried.status, tried.body["nodes"], tried.body["generation"]) == (200, ["right"], 1)
    assert (await gateway.post(f"{path}/recover")).body["nodes"] == ["right"]
    await owner.advance()
    node = (await gateway.get(f"{path}/nodes/right")).body
    assert (node["node"]["status"], node["node"]["generation"]) == ("running", 1)
    assert [(past["flow_generation"], past["status"]) for past in node["node"]["history"]] == [(0, "failed")]
    assert [child["generation"] for child in node["children"]] == [0, 1]

    assert (await gateway.post(f"{path}/cancel")).status == 202
    await owner.advance()
    shown = (await gateway.get(path)).body
    assert (shown["status"], shown["generation"]) == ("cancelled", 1)
    assert shown["history"][0]["name"] == "right"
    again = await gateway.post(f"{path}/cancel")
    assert (again.status, again.body["accepted"]) == (200, False)
    assert (await gateway.post(f"{path}/pause")).status == 409
    recovered = await gateway.post(f"{path}/recover")
    assert recovered.body["nodes"] == ["right", "last"]
    await owner.run()
    assert (await gateway.get(path)).body["status"] == "succeeded"


async def failed_flow(owner):
    """A flow whose last node has failed."""
    flow_id = await owner.start(TWO)
    await owner.advance()
    while tasks := await owner.tasks(flow_id):
        for each in tasks:
            await owner.end(each, "failed" if each["flow_node"] == "last" else "succeeded")
        await owner.advance()
    return flow_id


async def cancelled_flow(owner):
    """A flow that was cancelled while it was paused, before its last node."""
    flow_id = await owner.start(TWO)
    await owner.advance()
    await owner.command(flow_id, "pause")
    await owner.advance()
    for each in await owner.tasks(flow_id):
        await owner.end(each)
    await owner.advance()
    await owner.command(flow_id, "cancel")
    await owner.advance()
    return flow_id


async def test_of_two_recoveries_at_once_one_is_applied(gateway, owner, monkeypatch):
    """F3: a recovery is for the generation that it was decided for. Another one, which is applied
    before its command is written, makes it void."""
    flow_id, send = await failed_flow(owner), flow_commands.command

    async def send_late(*arguments):
        await owner.command(flow_id, "recover", nodes=["left"], generation=1)
        await owner.run()
        return await send(*arguments)

    monkeypatch.setattr(flow_commands, "command", send_late)
    answer = await gateway.post(f"/flows/{flow_id}/recover", {"nodes": ["left"]})
    assert (answer.status, answer.body["generation"]) == (202, 1)
    await owner.run()
    shown = (await gateway.get(f"/flows/{flow_id}")).body
    assert (shown["status"], shown["generation"]) == ("succeeded", 1)


@pytest.fixture
def announced_only(monkeypatch):
    """The gateway notices an end by its announcement, and not by reading again."""
    monkeypatch.setattr(end_listener, "RECHECK_S", 600.0)
    monkeypatch.setattr(end_listener, "RENEW_S", 600.0)


async def listening(gateway, owner, flow_id):
    """A request that waits for the end of a flow."""
    held = {"Prefer": f"wait={LONGEST_WAIT_S}"}
    waiting = asyncio.ensure_future(gateway.get(f"/flows/{flow_id}", headers=held))
    await wait_until(lambda: owner.pool.fetchval("SELECT count(*) FROM end_listener"))
    assert not waiting.done()
    return waiting


@pytest.mark.usefixtures("announced_only")
async def test_an_accepted_recovery_counts_before_it_is_applied(gateway, owner):
    """F3, F5: the flow runs for each request that reads it or waits for its end, and a command
    after the recovery follows it. The answers had the old end, and refused to cancel."""
    flow_id = await failed_flow(owner)
    path = f"/flows/{flow_id}"
    assert (await gateway.get(path)).body["error"]
    assert (await gateway.post(f"{path}/recover")).status == 202
    shown = (await gateway.get(path)).body
    assert (shown["status"], shown["error"], shown["stop"], shown["finished_at"]) == (
        "running",
        None,
        None,
        None,
    )
    found = await why(gateway, flow_id)
    assert (found["status"], found["reason"]) == ("running", "unapplied")
    waiting = await listening(gateway, owner, flow_id)
    assert (await gateway.post(f"{path}/cancel")).status == 202
    await owner.run()
    shown = (await in_time(waiting)).body
    assert (shown["status"], shown["generation"]) == ("cancelled", 1)
    assert (await gateway.post(f"{path}/pause")).status == 409


@pytest.mark.usefixtures("announced_only")
async def test_a_recovery_that_its_owner_refuses_leaves_the_old_end(gateway, owner):
    """F3: a request that waits gets the old end when the owner has refused the recovery. One for a
    generation that has ended never counts."""
    flow_id = await failed_flow(owner)
    path = f"/flows/{flow_id}"
    await owner.command(flow_id, "recover", nodes=["last"], generation=0)
    assert (await gateway.get(path)).body["status"] == "failed"
    await owner.command(flow_id, "recover", nodes=["nowhere"], generation=1)
    waiting = await listening(gateway, owner, flow_id)
    await owner.advance()
    shown = (await in_time(waiting)).body
    assert (shown["status"], shown["generation"]) == ("failed", 0)
    assert shown["error"]
    assert (await gateway.post(f"{path}/cancel")).status == 409


async def test_a_recovery_is_decided_by_one_snapshot(gateway, owner, monkeypatch):
    """F3: another recovery may be applied while a request is read. It is refused then, instead of
    being accepted for no node at all."""
    flow_id, read = await cancelled_flow(owner), flow_operations.visible_flow

    async def read_early(*arguments):
        flow = await read(*arguments)
        await owner.command(flow_id, "recover", nodes=[], generation=1)
        await owner.advance()
        return flow

    monkeypatch.setattr(flow_operations, "visible_flow", read_early)
    refused = await gateway.post(f"/flows/{flow_id}/recover")
    assert (refused.status, refused.body["code"]) == (409, "nothing_to_recover")


async def test_a_recovery_names_the_nodes_that_a_cancellation_kept_from_starting(gateway, owner):
    """F3: a paused flow that is cancelled has a node that is ready, and none that failed."""
    flow_id = await cancelled_flow(owner)
    answer = await gateway.post(f"/flows/{flow_id}/recover", {"dry_run": True})
    assert (answer.status, answer.body["nodes"]) == (200, ["last"])


async def test_a_child_flow_that_has_ended_is_recovered_through_its_root(gateway, owner, pool):
    """F3: its parent has counted its end, so the refusal names the root; `why` of a failed family
    leads to the node that failed."""
    inner = definition("inner", nodes={"work": task()})
    outer = definition("outer", nodes={"run": {"kind": "flow", "flow": "inner"}})
    await owner.define(inner, outer)
    root_id = await owner.start(outer, versions={"inner": 1})
    await owner.advance()
    [work] = await owner.tasks()
    await owner.end(work, "failed")
    await owner.advance()
    found = await why(gateway, root_id)
    assert [(step["node"], step["reason"]) for step in found["path"]] == [
        ("run", "failed"),
        ("work", "failed"),
    ]
    assert f"(task {work['id']}, failed)" in found["sentence"]
    child_id = found["path"][1]["flow"]
    refused = await gateway.post(f"/flows/{child_id}/recover")
    assert (refused.status, refused.body["code"]) == (409, "child_flow")
    assert f"recover flow {root_id}" in refused.body["detail"]
    assert (await gateway.post(f"/flows/{root_id}/recover")).status == 202
    await owner.run()
    assert (await gateway.get(f"/flows/{root_id}")).body["status"] == "succeeded"


async def test_the_path_leads_through_a_task_that_waits_for_its_children(gateway, owner, pool):
    """F6: a task that waits leads to the flow that wakes it. Such a flow is not listed, and is
    neither recovered nor rerun without its task."""
    single = definition("single", nodes={"work": task()})
    await owner.define(single)
    flow_id = await owner.start(single)
    await owner.advance()
    [work] = await owner.tasks(flow_id)
    await pool.execute("UPDATE task SET state = 'waiting' WHERE id = $1", work["id"])
    own = definition("a", version=0, nodes={"event": {"kind": "wait", "event": "go"}})
    made = await pool.fetchval(
        """INSERT INTO flow (name, version, definition, unfinished, task_id, task_step, task_stage)
           VALUES ('a', 0, $1, 1, $2, 0, 's') RETURNING id""",
        orjson.dumps(own).decode(),
        work["id"],
    )
    await pool.execute("INSERT INTO flow_inbox (root_id, flow_id, kind) VALUES ($1, $1, 'began')", made)
    await owner.advance()
    found = await why(gateway, flow_id)
    assert [(step["flow"], step["task"], step["reason"]) for step in found["path"]] == [
        (flow_id, work["id"], "task"),
        (made, None, "event"),
    ]
    assert found["path"][0]["sentence"] == (
        f"node work runs task {work['id']} (waiting), which waits for flow {made}"
    )
    assert (await gateway.get(f"/tasks/{work['id']}/why")).body["sentence"] == f"it waits for flow {made}"
    assert (await nodes_of(gateway, made))["event"]["status"] == "running"
    assert [flow["id"] for flow in (await gateway.get("/flows")).body["flows"]] == [flow_id]
    refused = await gateway.post(f"/flows/{made}/recover", {"nodes": ["event"]})
    assert (refused.status, refused.body["code"]) == (409, "child_flow")
    assert (await gateway.post(f"/flows/{made}/rerun")).status == 409


async def test_a_recovery_goes_on_in_another_version(gateway, owner, pool):
    """F3: by default in its own. In another one, what has begun is carried if it is the same there;
    otherwise the refusal names the difference. New nodes and inputs are taken in, and the counters
    are those of the new version."""
    first = definition(
        "report",
        inputs={"day": {}},
        nodes={
            "load": task(),
            "many": {
                "kind": "map",
                "items": "[1, 2, 3]",
                "each": {"kind": "task", "type": "a", "input": "item"},
                "after": ["load"],
            },
            "send": task("many"),
        },
    )
    inner = definition("inner", nodes={"work": task()})
    nodes = first["nodes"]
    second = {**first, "version": 2, "nodes": {**nodes, "load": task(key="inputs.day")}}
    third = {
        **first,
        "version": 3,
        "inputs": {"day": {}, "size": {"default": 7}},
        "nodes": {
            "load": nodes["load"],
            "check": {"kind": "flow", "flow": "inner", "after": ["load"]},
            "many": {**nodes["many"], "items": "[inputs.size, 8]", "after": ["check"]},
            "last": task("many"),
        },
    }
    fourth = {**first, "version": 4, "inputs": {"month": {}}}
    await owner.define(first, second, third, fourth, inner)
    flow_id = await owner.start(first, {"day": "monday"})
    await owner.run(lambda each: ("failed" if each["flow_item"] == 1 else "succeeded", None))
    assert await owner.nodes(flow_id) == {"load": "succeeded", "many": "failed", "send": "blocked"}

    async def recover(status, **body):
        answer = await gateway.post(f"/flows/{flow_id}/recover", body)
        assert answer.status == status, answer.body
        return answer.body

    refused = await recover(409, version=2)
    assert (refused["code"], refused["nodes"]) == ("node_changed", ["load"])
    assert 'load differs (key without a value is "inputs.day")' in refused["detail"]
    assert "declares no input 'day'" in (await recover(422, version="latest"))["detail"]
    unknown = await recover(422, version=9)
    assert (
        unknown["errors"][0]["pointer"] == "/version" if "errors" in unknown else "version 9" in str(unknown)
    )
    assert (await recover(200, dry_run=True))["version"] == 1
    dry = await recover(200, version=3, dry_run=True)
    assert (dry["version"], dry["nodes"]) == (3, ["check", "many", "last"])
    assert (await owner.flow(flow_id))["version"] == 1
    await recover(202, version=3)
    ended = await owner.run()
    assert [(each["flow_node"], each["context"]) for each in ended] == [
        ("work", b"null"),
        ("many", b"7"),
        ("many", b"8"),
        ("last", b"null"),
    ]
    shown = (await gateway.get(f"/flows/{flow_id}?definition=true")).body
    assert (shown["status"], shown["version"], shown["generation"]) == ("succeeded", 3, 1)
    assert (shown["versions"], shown["inputs"]) == ({"inner": 1}, {"day": "monday", "size": 7})
    assert shown["definition"] == third
    assert {node["name"]: node["status"] for node in shown["nodes"]} == dict.fromkeys(
        third["nodes"], "succeeded"
    )
    assert {(node["name"], node["status"]) for node in shown["history"]} == {
        ("many", "failed"),
        ("send", "blocked"),
    }
    # A node that succeeded and differs is chosen, and runs again with what is behind it.
    await owner.define({**second, "version": 5, "inputs": third["inputs"]})
    assert (await recover(409, version=5, nodes=["send"]))["nodes"] == ["check", "last", "load", "many"]
    assert (await recover(202, version=5, nodes=["load"]))["nodes"] == ["load", "many", "send"]
    await owner.run()
    assert await owner.nodes(flow_id) == dict.fromkeys(nodes, "succeeded")
    report = await checked(pool)
    assert report == []
    rerun = await gateway.post(f"/flows/{flow_id}/rerun", {"version": 3})
    assert (rerun.status, rerun.body["version"]) == (201, 3)
    assert (await owner.flow(rerun.body["id"]))["versions"] == '{"inner": 1}'
    assert (await gateway.post(f"/flows/{flow_id}/rerun", {"version": 9})).status == 422


async def checked(pool):
    """The flows whose counters differ from their nodes."""
    return await pool.fetch(query("flow_checks.miscounted"), 0, 2**62)


async def test_a_child_flow_keeps_the_version_that_its_parent_gave_it(gateway, owner, pool):
    """F3: only a flow without a parent changes its version."""
    inner = definition("inner", on_failure="continue", nodes={"work": task(), "slow": task()})
    outer = definition("outer", nodes={"run": {"kind": "flow", "flow": "inner"}})
    await owner.define(
        inner, outer, {**inner, "version": 2, "nodes": {"work": task(key="'k'"), "slow": task()}}
    )
    flow_id = await owner.start(outer, versions={"inner": 1})
    await owner.advance()
    child = next(node["flow"]["id"] for node in (await gateway.get(f"/flows/{flow_id}")).body["nodes"])
    for each in await owner.tasks(child):
        if each["flow_node"] == "work":
            await owner.end(each, "failed")
    await owner.advance()
    refused = await gateway.post(f"/flows/{child}/recover", {"version": "latest"})
    assert (refused.status, refused.body["code"]) == (409, "child_flow")
    assert (await gateway.post(f"/flows/{child}/recover")).status == 202


async def test_a_rerun_is_a_new_flow_of_the_same_or_the_newest_version(gateway, owner, pool):
    """F3: it has the inputs, labels and priority of the first flow, and its versions unless the
    newest is asked for; a repeated request with an idempotency key returns it."""
    inner = definition("inner", nodes={"work": task()})
    outer = definition("outer", nodes={"run": {"kind": "flow", "flow": "inner"}}, inputs={"day": {}})
    await owner.define(inner, outer, {**inner, "version": 2})
    first = await owner.start(outer, {"day": "monday"}, versions={"inner": 1}, labels={"team": "data"})
    await owner.run()
    same = await gateway.post(f"/flows/{first}/rerun", {"idempotency_key": "again"})
    assert (same.status, same.body["version"], same.body["rerun_of"]) == (201, 1, first)
    again = await gateway.post(f"/flows/{first}/rerun", {"idempotency_key": "again"})
    assert (again.status, again.body["id"], again.body["created"]) == (200, same.body["id"], False)
    await owner.define({**outer, "version": 2, "inputs": {"day": {}, "size": {"default": 3}}})
    latest = await gateway.post(f"/flows/{first}/rerun", {"version": "latest"})
    assert (latest.status, latest.body["version"]) == (201, 2)
    await owner.run()
    for started, versions, inputs in (
        (same, {"inner": 1}, {"day": "monday"}),
        (latest, {"inner": 2}, {"day": "monday", "size": 3}),
    ):
        shown = (await gateway.get(f"/flows/{started.body['id']}")).body
        assert (shown["status"], shown["versions"], shown["inputs"]) == ("succeeded", versions, inputs)
        assert (shown["rerun_of"], shown["labels"]) == (first, {"team": "data"})
    child = (await gateway.get(f"/flows/{first}/nodes/run")).body["children"][0]["flow"]["id"]
    alone = (await gateway.post(f"/flows/{child}/rerun")).body["id"]
    assert (await gateway.get(f"/flows/{alone}")).body["parent"] is None
    await owner.define({**outer, "version": 3, "inputs": {"month": {}}})
    refused = await gateway.post(f"/flows/{first}/rerun", {"version": "latest"})
    assert refused.status == 422
    assert "declares no input 'day'" in refused.body["detail"]


async def test_a_rerun_of_a_tick_is_a_run_of_it_and_no_overlap(gateway, owner, pool, database):
    """F3, F4: a rerun keeps the schedule and the tick, so that flows which wait for the run of the
    tick get the latest one. It does not count as a running flow of the schedule, so it skips no
    tick, and no tick cancels it. A tick can be run again any number of times."""
    waiting = definition("waiting", nodes={"wait": {"kind": "wait", "flow": "two", "tick": "same"}})
    await owner.define(waiting)
    place = {"schedule": "night", "tick": datetime(2026, 11, 23, tzinfo=UTC)}
    first = await owner.start(TWO, **place)
    await owner.run(lambda task: ("failed", None))
    reruns = [(await gateway.post(f"/flows/{first}/rerun")).body["id"] for _ in range(2)]
    keyed = [await gateway.post(f"/flows/{first}/rerun", {"idempotency_key": "again"}) for _ in range(2)]
    assert [answer.status for answer in keyed] == [201, 200]
    assert len({first, *reruns, *(answer.body["id"] for answer in keyed)}) == 4
    for flow_id in reruns:
        shown = (await gateway.get(f"/flows/{flow_id}")).body
        assert (shown["schedule"], shown["tick"], shown["rerun_of"]) == (
            "night",
            "2026-11-23T00:00:00Z",
            first,
        )
    listed = (await gateway.get("/flows?schedule=night")).body["flows"]
    assert {flow["id"] for flow in listed} == {first, *reruns, keyed[0].body["id"]}
    assert await schedule_claims.running(pool, ["night"]) == set()
    await schedule_claims.cancel_running(pool, ["night"])
    waits = await owner.start(waiting, schedule="later", tick=place["tick"])
    await owner.run()
    assert (await owner.flow(waits))["status"] == "succeeded"
    assert {(await owner.flow(flow_id))["status"] for flow_id in reruns} == {"succeeded"}


async def test_a_family_in_history_is_still_shown_and_can_be_rerun(gateway, owner, pool, database):
    """O6, F3: nodes, earlier generations, child flows and tasks stay visible; only a recovery is
    refused."""
    inner = definition("inner", nodes={"work": task()})
    outer = definition("outer", nodes={"run": {"kind": "flow", "flow": "inner"}, "other": task()})
    await owner.define(inner, outer)
    flow_id = await owner.start(outer, versions={"inner": 1})
    await owner.run(lambda task: ("failed" if task["flow_node"] == "other" else "succeeded", None))
    await owner.command(flow_id, "recover", generation=1)
    await owner.run(lambda _: ("failed", None))
    before = (await gateway.get(f"/flows/{flow_id}")).body
    await pool.execute("UPDATE flow SET finished_at = now() - interval '9 days'")
    await pool.execute("UPDATE task SET finished_at = now() - interval '9 days'")
    child_id = next(node["flow"]["id"] for node in before["nodes"] if node["flow"])
    settings = TaskSyncSettings(
        postgres=database, objects="memory:///", history_keep_days=7.0, history_rate=1e6
    )
    service = History(settings, ObjectStore(settings.objects))
    while await service.round():
        pass
    assert await pool.fetchval("SELECT count(*) FROM flow") == 0
    shown = (await gateway.get(f"/flows/{flow_id}")).body
    moved = {"in_history", "finished_at", "nodes"}
    assert {**shown, **dict.fromkeys(moved)} == {**before, **dict.fromkeys(moved)}
    assert shown["in_history"]
    assert shown["nodes"] == before["nodes"]
    assert (await gateway.get(f"/flows/{child_id}")).body["parent"]["flow"] == flow_id
    node = (await gateway.get(f"/flows/{flow_id}/nodes/other")).body
    assert (node["node"]["history"][0]["status"], node["next"]) == ("failed", None)
    assert [child["generation"] for child in node["children"]] == [0, 1]
    refused = await gateway.post(f"/flows/{flow_id}/recover")
    assert (refused.status, refused.body["code"]) == (409, "in_history")
    assert (await gateway.post(f"/flows/{flow_id}/cancel")).status == 409
    rerun = await gateway.post(f"/flows/{flow_id}/rerun")
    assert (rerun.status, (await owner.flow(rerun.body["id"]))["versions"]) == (201, '{"inner": 1}')


@pytest.mark.parametrize("moved", ["flow", "all"])
async def test_items_and_the_path_to_the_leaf_are_shown_from_history(gateway, owner, pool, database, moved):
    """O6, O8: tasks and child flows of each node are as before, with filters and pages. So are the
    family and the path to the task that failed, also while only the root has moved."""
    inner = definition("inner", nodes={"work": task(input="inputs.n")}, inputs={"n": {"default": 0}})
    outer = definition(
        "outer",
        on_failure="continue",
        nodes={
            "flows": {
                "kind": "map",
                "items": "[1, 2, 3]",
                "each": {"kind": "flow", "flow": "inner", "input": "{'n': item}"},
            },
            "single": {"kind": "flow", "flow": "inner"},
            "tasks": {
                "kind": "map",
                "items": "[1, 2, 3, 4, 5]",
                "tolerate": 5,
                "each": {"kind": "task", "type": "a", "input": "item"},
            },
        },
    )
    await owner.define(inner, outer)
    flow_id = await owner.start(outer, versions={"inner": 1})

    def outcome(task):
        is_item = task["flow_node"] == "tasks" and task["flow_item"] == 3
        return ("failed" if is_item or task["context"] == b"2" else "succeeded", None)

    await owner.run(outcome)
    queries = [
        "nodes/flows",
        "nodes/flows?state=failed",
        "nodes/single",
        "nodes/tasks",
        "nodes/tasks?state=failed",
        "nodes/tasks?limit=2",
        "nodes/tasks?limit=2&cursor=1.0",
        "why",
    ]

    async def shown():
        answers = {path: await gateway.get(f"/flows/{flow_id}/{path}") for path in queries}
        assert {answer.status for answer in answers.values()} == {200}
        family = [
            flow["id"] for flow in (await gateway.get(f"/flows?family={flow_id}&limit=2")).body["flows"]
        ]
        return {path: without_moments(answer.body) for path, answer in answers.items()} | {"family": family}

    before = await shown()
    assert [step["node"] for step in before["why"]["path"]] == ["flows", "work"]
    assert len(before["nodes/tasks"]["children"]) == 5
    only = "true" if moved == "all" else f"id = {flow_id}"
    await pool.execute(f"UPDATE flow SET finished_at = now() - interval '9 days' WHERE {only}")
    if moved == "all":
        await pool.execute("UPDATE task SET finished_at = now() - interval '9 days'")
    settings = TaskSyncSettings(
        postgres=database, objects="memory:///", history_keep_days=7.0, history_rate=1e6
    )
    service = History(settings, ObjectStore(settings.objects))
    while await service.round():
        pass
    assert await pool.fetchval("SELECT count(*) FROM flow") == (0 if moved == "all" else 4)
    assert await pool.fetchval("SELECT count(*) FROM task") == (0 if moved == "all" else 9)
    assert await shown() == before


def without_moments(document):
    """A document without the moments that the test moves, and without what depends on the clock."""
    if isinstance(document, dict):
        moving = {"finished_at", "updated_at", "since", "figures"}
        return {name: without_moments(value) for name, value in document.items() if name not in moving}
    return [without_moments(each) for each in document] if isinstance(document, list) else document
