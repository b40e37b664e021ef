"""Operations on flows by filter, over HTTP on the real PostgreSQL: verbs, dry run, rate, audit, and
continuation by another gateway."""

from __future__ import annotations

import orjson
import pytest
from tests.integration.flow_owner.support import Owner, definition, task
from tests.support.gateways import running_gateway
from tests.support.waiting import wait_until

from penstock.core.flow.operations import FlowVerb
from penstock.postgres import operations, types

TASK_TYPES = (types.TaskType(name="a", partitions=1),)

SINGLE = definition("single", nodes={"work": task()}, inputs={"day": {"default": 1}})
INNER = definition("inner", nodes={"work": task()})
OUTER = definition("outer", nodes={"run": {"kind": "flow", "flow": "inner"}})


@pytest.fixture
async def owner(pool):
    owner = Owner(pool)
    await owner.define(SINGLE, INNER, OUTER)
    return owner


@pytest.fixture
def make_gateway(where):
    return lambda: running_gateway(**where)


async def insert(pool, count, status="running"):
    """Inserts flows of one node in a state."""
    rows = await pool.fetch(
        """INSERT INTO flow (name, version, unfinished, status, inputs, labels, finished_at)
           SELECT 'single', 1, 1, $2, '{"day": 7}', '{"team": "data"}', CASE WHEN $2 <> 'running' THEN now() END
           FROM generate_series(1, $1) RETURNING id""",
        count,
        status,
    )
    return [row["id"] for row in rows]


async def commands(pool):
    """The commands in the inbox, by flow."""
    rows = await pool.fetch("SELECT flow_id, kind, detail FROM flow_inbox WHERE kind <> 'began'")
    found = {row["flow_id"]: (row["kind"], row["detail"] and orjson.loads(row["detail"])) for row in rows}
    assert len(found) == len(rows)
    return found


async def ended(gateway, operation_id):
    async def find():
        body = (await gateway.get(f"/operations/{operation_id}")).body
        return body if body["state"] != "running" else None

    return await wait_until(find, what=f"operation {operation_id} ends")


async def operate(gateway, verb, which, **more):
    answer = await gateway.post("/flows/operations", {"verb": verb, "filter": which, "by": "ann@ops", **more})
    assert answer.status == 201, answer.body
    return await ended(gateway, answer.body["id"])


async def test_each_flow_that_matches_gets_the_command_once(gateway, pool, owner):
    """F5, O2c: of 2,300 flows the 2,100 that match get one command each, in several batches. The
    dry run has the same count and changes nothing; the audit lists the operation."""
    running = await insert(pool, 2_100)
    failed = await insert(pool, 100, "failed")
    await pool.execute(
        """INSERT INTO flow (name, version, unfinished, root_id, parent_id, parent_node, parent_generation)
           SELECT 'single', 1, 1, $1, $1, 'n' || i, 0 FROM generate_series(1, 100) AS i""",
        running[0],
    )
    which = {"name": "single", "labels": {"team": "data"}}
    dry = (await gateway.post("/flows/operations", {"verb": "pause", "filter": which, "dry_run": True})).body
    assert (dry["count"], dry["found_in"], dry["more"]) == (2_100, {"running": 2_100}, False)
    assert [flow["id"] for flow in dry["examples"]] == running[:5]
    assert await commands(pool) == {}
    done = await operate(gateway, "pause", which, id="pause-1")
    assert (done["changed"], done["found_in"], done["subject"]) == (2_100, {"running": 2_100}, "flow")
    assert await commands(pool) == dict.fromkeys(running, ("pause", None))
    again = await gateway.post(
        "/flows/operations", {"id": "pause-1", "verb": "pause", "filter": which, "by": "x"}
    )
    assert (again.status, again.body["changed"]) == (200, 2_100)
    other = await gateway.post(
        "/operations", {"id": "pause-1", "verb": "pause", "filter": {"type": "a"}, "by": "x"}
    )
    assert other.status == 409
    await pool.execute("DELETE FROM flow_inbox")
    recovered = await operate(gateway, "recover", {"name": "single"})
    assert recovered["found_in"] == {"failed": 100}
    assert await commands(pool) == dict.fromkeys(failed, ("recover", {"generation": 1}))
    await pool.execute("DELETE FROM flow_inbox")
    limited = await gateway.post(
        "/flows/operations", {"verb": "cancel", "filter": {"ids": running[:50]}, "by": "x", "rate": 1}
    )
    assert (limited.body["state"], limited.body["changed"]) == ("running", 1)
    stopped = await gateway.post(f"/operations/{limited.body['id']}/stop", {"by": "bob"})
    assert (stopped.body["state"], stopped.body["stopped_by"]) == ("stopped", "bob")
    listed = (await gateway.get("/operations?verb=recover")).body["operations"]
    assert [(each["id"], each["filter"]) for each in listed] == [(recovered["id"], {"name": "single"})]
    assert (await gateway.get("/operations?state=running")).body["operations"] == []
    for wrong in (
        {"verb": "recover", "filter": {"statuses": ["running"]}, "by": "x"},
        {"verb": "pause", "filter": {"name": "single"}, "by": "x", "version": "latest"},
        {"verb": "reprioritise", "filter": {"name": "single"}, "by": "x"},
    ):
        assert (await gateway.post("/flows/operations", wrong)).status == 422


async def test_reruns_by_filter_start_each_flow_once(gateway, pool, owner):
    """F3: with the same version or the newest, which leaves out a flow whose inputs it refuses."""
    first = await insert(pool, 3, "failed")
    done = await operate(gateway, "rerun", {"ids": first})
    assert (done["changed"], done["version"]) == (3, "same")
    rows = await pool.fetch(
        "SELECT rerun_of, version, inputs, labels FROM flow WHERE rerun_of IS NOT NULL ORDER BY id"
    )
    assert [tuple(row) for row in rows] == [(each, 1, b'{"day": 7}', '{"team": "data"}') for each in first]
    await owner.run()
    await owner.define({**SINGLE, "version": 2, "inputs": {"day": {}, "size": {"default": 2}}})
    await pool.execute("UPDATE flow SET inputs = '{\"gone\": 1}' WHERE id = $1", first[0])
    done = await operate(gateway, "rerun", {"ids": first}, version="latest")
    assert (done["changed"], done["found_in"]) == (2, {"failed": 2})
    rows = await pool.fetch("SELECT rerun_of, inputs FROM flow WHERE version = 2 ORDER BY id")
    assert [(row["rerun_of"], orjson.loads(row["inputs"])) for row in rows] == [
        (each, {"day": 7, "size": 2}) for each in first[1:]
    ]


async def test_another_gateway_continues_an_operation_on_flows(make_gateway, pool, owner):
    """F5: a gateway adopts the operation after a crash."""
    flows = await insert(pool, 10)
    row = await operations.create(pool, "left", FlowVerb.CANCEL, "ann", '{"name": "single"}', None, None)
    assert row is not None
    async with make_gateway() as gateway:
        assert (await ended(gateway, "left"))["changed"] == 10
    assert await commands(pool) == dict.fromkeys(flows, ("cancel", None))


async def test_families_are_recovered_by_their_roots_and_tasks_by_their_flows(gateway, pool, owner):
    """F3: a filter recovers roots, and a task of a flow is never recovered alone: by filter it is
    left out, by id the refusal names the flow."""
    roots = [await owner.start(OUTER, versions={"inner": 1}) for _ in range(2)]
    await owner.run(lambda _: ("failed", None))
    children = await pool.fetch("SELECT id FROM flow WHERE parent_id IS NOT NULL ORDER BY id")
    failed = await pool.fetch("SELECT id, flow_id FROM task WHERE state = 'failed' ORDER BY id")
    refused = await gateway.post(
        "/operations", {"verb": "recover", "filter": {"ids": [failed[0]["id"]]}, "by": "x"}
    )
    assert refused.status == 409
    assert f"task {failed[0]['id']} belongs to flow {failed[0]['flow_id']}" in refused.body["detail"]
    answer = await gateway.post("/operations", {"verb": "recover", "filter": {"type": "a"}, "by": "x"})
    assert (answer.status, answer.body["changed"]) == (201, 0)
    nothing = await operate(gateway, "recover", {"ids": [child["id"] for child in children]})
    assert nothing["changed"] == 0
    done = await operate(gateway, "recover", {"statuses": ["failed"]})
    assert done["changed"] == 2
    await owner.run()
    assert [(await owner.flow(root))["status"] for root in roots] == ["succeeded"] * 2
