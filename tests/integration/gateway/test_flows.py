"""Flow definitions, starts of flows, and events for them, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import orjson
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import Answer, Caller
from tests.support.services import make_topics
from tests.support.waiting import wait_until

from penstock.core.access import Role

TASK_TYPES = ()

LARGE = "x" * 5_000


def definition(name: str, version: int = 1, **fields: Any) -> dict[str, Any]:
    return {"flow": name, "version": version, "nodes": {"first": {"kind": "task", "type": "media"}}, **fields}


def parent(name: str, version: int, **children: int | None) -> dict[str, Any]:
    nodes = {
        f"run_{child}": {"kind": "flow", "flow": child} | ({} if pinned is None else {"version": pinned})
        for child, pinned in children.items()
    }
    return definition(name, version, nodes=nodes)


async def upload(gateway: Caller, document: Any, **more: Any) -> Answer:
    return await gateway.post("/flow-definitions", document, **more)


async def test_a_version_is_stored_once_and_never_changes(gateway: Caller) -> None:
    """F1: the same content again is no change, another content is refused with advice; the order
    of the nodes is content, that of all other fields is none."""
    first = definition("nightly", inputs={"day": {}}, description="Loads a day.")
    first["nodes"]["second"] = {"kind": "task", "type": "media", "input": "inputs.day"}
    answer = await upload(gateway, first)
    assert (answer.status, answer.headers["Location"]) == (201, "/flow-definitions/nightly/versions/1")
    again = await upload(gateway, dict(reversed(first.items())) | {"version": 1.0})
    assert (again.status, again.body) == (200, answer.body)
    for other in (
        {**first, "nodes": dict(reversed(first["nodes"].items()))},
        {**first, "inputs": {"day": {"default": True}}},
    ):
        refused = await upload(gateway, other)
        assert refused.status == 409
        assert "raise `version`" in refused.body["detail"]
    assert (await upload(gateway, {**first, "version": 7})).status == 201
    assert (await upload(gateway, definition("other"))).status == 201
    listed = (await gateway.get("/flow-definitions?limit=1")).body
    assert [(each["name"], each["version"], each["versions"]) for each in listed["definitions"]] == [
        ("nightly", 7, 2)
    ]
    rest = (await gateway.get(f"/flow-definitions?cursor={listed['next']}")).body
    assert ([each["name"] for each in rest["definitions"]], rest["next"]) == (["other"], None)
    versions = (await gateway.get("/flow-definitions/nightly?limit=1")).body
    assert [(each["version"], each["description"]) for each in versions["versions"]] == [(7, "Loads a day.")]
    older = (await gateway.get(f"/flow-definitions/nightly?cursor={versions['next']}")).body
    assert [each["version"] for each in older["versions"]] == [1]
    stored = (await gateway.get("/flow-definitions/nightly/versions/1")).body["definition"]
    assert stored == first
    assert list(stored["nodes"]) == ["first", "second"]
    for path in ("nightly/versions/2", "nightly/versions/9999999999999", "none", "none/versions/1"):
        assert (await gateway.get(f"/flow-definitions/{path}")).status == 404


async def test_all_faults_of_a_definition_are_answered_at_once(gateway: Caller) -> None:
    """F1: with a pointer each, also those of task types, child flows and expressions; nothing is
    stored."""
    faulty = definition("faulty", colour="red", output="inputs.absent")
    faulty["nodes"] |= {
        "second": {"kind": "task", "type": "no-such-type", "after": ["gone"]},
        "child": {"kind": "flow", "flow": "no-such-flow"},
    }
    answer = await upload(gateway, faulty)
    assert answer.status == 422
    assert set(answer.pointers) == {
        "",
        "/nodes/second/after/0",
        "/nodes/second/type",
        "/nodes/child/flow",
        "/output",
    }
    assert any("of the expression" in error["detail"] for error in answer.body["errors"])
    nul = await upload(gateway, definition("faulty", inputs={"a": {"default": ["\0"]}}))
    assert (nul.status, nul.pointers) == (422, ["/inputs/a/default/0"])
    for document in ([], 5, {}, {"flow": 1, "version": "1", "nodes": []}, {"flow": "f", "version": 10**12}):
        assert (await upload(gateway, document)).status == 422
    assert (await gateway.get("/flow-definitions")).body["definitions"] == []


async def test_a_name_that_stands_twice_is_a_fault(gateway: Caller, pool: asyncpg.Pool) -> None:
    """F1, F4: in a definition, in the start of a flow and in a command, as in files for the command
    line. The last value replaced the first one without a word."""
    headers = {"Content-Type": "application/json"}

    async def refused(path: str, body: bytes) -> Answer:
        answer = await gateway.post(path, data=body, headers=headers)
        assert answer.status == 422
        assert "stands twice: remove one, or rename it" in orjson.dumps(answer.body).decode()
        return answer

    node = b'{"kind": "task", "type": "media"}'
    twice = b'{"flow": "f", "version": 1, "nodes": {"a": %s, "a": %s}}' % (node, node)
    assert (await refused("/flow-definitions", twice)).pointers == ["/nodes/a"]
    assert (await upload(gateway, definition("f", inputs={"day": {}}))).status == 201
    start = b'{"flow": "f", "inputs": {"day": 1, "day": 2}}'
    assert (await refused("/flows", start)).pointers == ["/inputs/day"]
    assert (await refused("/flows", b"[%s]" % start)).pointers == ["/0/inputs/day"]
    good = b'{"flow": "f", "inputs": {"day": 1}}'
    batch = await gateway.post("/flows", data=b"[%s, %s]" % (good, start), headers=headers)
    assert batch.status == 207
    accepted, rejected = batch.body["flows"]
    assert rejected["errors"][0]["pointer"] == "/1/inputs/day"
    recovery = b'{"nodes": ["first"], "nodes": []}'
    assert (await refused(f"/flows/{accepted['id']}/recover", recovery)).pointers == ["/nodes"]
    assert await pool.fetchval("SELECT count(*) FROM flow") == 1


async def test_definitions_cannot_contain_each_other(gateway: Caller) -> None:
    """F1: also when a later version closes the circle, and when two are uploaded at once."""
    for document in (definition("a"), definition("b"), parent("a", 2, b=None)):
        assert (await upload(gateway, document)).status == 201
    answer = await upload(gateway, parent("b", 2, a=None))
    assert (answer.status, answer.pointers) == (422, ["/nodes/run_a/flow"])
    assert "contains itself: b → a → b" in answer.body["detail"]
    assert (await upload(gateway, parent("b", 2, a=2))).status == 422
    await upload(gateway, definition("c"))
    await upload(gateway, definition("d"))
    together = await asyncio.gather(
        upload(gateway, parent("c", 2, d=None)), upload(gateway, parent("d", 2, c=None))
    )
    assert sorted(answer.status for answer in together) == [201, 422]


async def test_a_start_has_its_versions_and_inputs(
    gateway: Caller, pool: asyncpg.Pool, tmp_path: Path
) -> None:
    """F4: a flow is pinned to the newest version, or the named one, with all definitions below it.
    Defaults fill the inputs, and large inputs go to the object store."""
    inputs = {"day": {}, "size": {"default": 5}, "note": {"default": None}}
    for document in (
        definition("leaf"),
        definition("leaf", 2),
        definition("leaf", 3),
        parent("middle", 1, leaf=2),
        parent("middle", 2, leaf=None),
        {**parent("nightly", 1, middle=None), "inputs": inputs},
        {**parent("nightly", 2, middle=1), "inputs": inputs},
    ):
        assert (await upload(gateway, document)).status == 201
    one = {
        "flow": "nightly",
        "inputs": {"day": "monday", "size": 6},
        "priority": "HIGH",
        "idempotency_key": "k",
        "labels": {"team": "data"},
        "events": "all",
        "callbacks": ["https://hooks.example/x"],
    }
    answer = await gateway.post("/flows", one)
    assert (answer.status, answer.headers["Location"]) == (201, f"/flows/{answer.body['id']}")
    assert (await gateway.post("/flows", one)).body == {"id": answer.body["id"], "created": False}
    batch = await gateway.post(
        "/flows", [{"flow": "nightly", "version": 1, "inputs": {"day": LARGE}}, {"flow": "leaf"}]
    )
    assert batch.status == 201
    # A version that was uploaded since is the newest for the next start.
    await upload(gateway, definition("leaf", 4))
    later = await gateway.post("/flows", {"flow": "nightly", "version": 1, "inputs": {"day": 1}})
    rows = {row["id"]: row for row in await pool.fetch("SELECT * FROM flow")}
    first, second, third = (
        rows[each] for each in (answer.body["id"], *(flow["id"] for flow in batch.body["flows"]))
    )
    assert (first["version"], orjson.loads(first["versions"])) == (2, {"middle": 1, "leaf": 2})
    assert orjson.loads(first["inputs"]) == {"day": "monday", "size": 6, "note": None}
    assert (first["priority"], first["events"], first["unfinished"]) == (1, "all", 1)
    assert (first["callbacks"], orjson.loads(first["labels"])) == (
        ["https://hooks.example/x"],
        {"team": "data"},
    )
    assert (second["version"], orjson.loads(second["versions"])) == (1, {"middle": 2, "leaf": 3})
    assert second["inputs"] is None
    stored = tmp_path / "objects" / orjson.loads(second["inputs_ref"])["key"]
    assert orjson.loads(stored.read_bytes()) == {"day": LARGE, "size": 5, "note": None}
    assert (third["version"], third["versions"], orjson.loads(third["inputs"])) == (3, None, {})
    assert orjson.loads(rows[later.body["id"]]["versions"]) == {"middle": 2, "leaf": 4}


async def test_faulty_starts_are_refused_each_alone(gateway: Caller, pool: asyncpg.Pool) -> None:
    """T5, F4: unknown and missing inputs, definitions and versions have precise errors; the entries
    beside them start."""
    await upload(gateway, definition("nightly", inputs={"day": {}, "hour": {}, "size": {"default": 1}}))
    single = await gateway.post("/flows", {"flow": "nightly", "inputs": {"dya": 1, "size": 2}})
    assert (single.status, single.pointers) == (422, ["/inputs/dya", "/inputs", "/inputs"])
    assert "its inputs are day, hour, size" in single.body["errors"][0]["detail"]
    good = {"flow": "nightly", "inputs": {"day": 1, "hour": 2}}
    faulty = [
        {"flow": "no-such-flow"},
        {"flow": "nightly", "version": 2},
        {"flow": "nightly", "inputs": {"day": 1}, "priority": "URGENT", "colour": 1},
        {"flow": "nightly", "inputs": {"day": "x" * 900_000, "hour": 2}},
        {"flow": "nightly", "inputs": {"day": [[[]]], "hour": 2}, "callbacks": ["ftp://x"]},
        "text",
    ]
    answer = await gateway.post("/flows", [good, *faulty, good])
    assert answer.status == 207
    [first, *refused, last] = answer.body["flows"]
    assert first["created"]
    assert last["created"]
    assert [[error["pointer"] for error in each["errors"]] for each in refused] == [
        ["/1/flow"],
        ["/2/version"],
        ["/3/priority", "/3"],
        ["/4/inputs"],
        ["/5/callbacks/0"],
        ["/6"],
    ]
    assert await pool.fetchval("SELECT count(*) FROM flow") == 2


async def test_an_event_counts_once(gateway: Caller, pool: asyncpg.Pool, tmp_path: Path) -> None:
    """F1: an event is stored once per id and namespace, with large data in the object store, and
    ends the wait with its key."""
    await pool.execute(
        "INSERT INTO flow_wait (flow_id, node, generation, root_id, namespace, event, key) "
        "VALUES (5, 'approval', 0, 5, 'default', 'report.approved', 'monday')"
    )
    event = {"id": "e1", "key": "monday", "data": {"by": "ana"}}
    first = await gateway.post("/events/report.approved", event)
    assert (first.status, first.body) == (201, {"id": "e1", "created": True})
    again = await gateway.post("/events/report.approved", {**event, "data": 2})
    assert (again.status, again.body) == (200, {"id": "e1", "created": False})
    batch = await gateway.post(
        "/events/report.approved",
        [{"id": "e2", "data": LARGE}, {"id": "e2"}, {"id": ""}, {"id": "e3", "event": "x"}, 5, {"id": "e1"}],
    )
    assert batch.status == 207
    assert [each.get("created", "refused") for each in batch.body["events"]] == [
        True,
        False,
        "refused",
        "refused",
        "refused",
        False,
    ]
    assert [e["pointer"] for each in batch.body["events"][2:5] for e in each["errors"]] == [
        "/2/id",
        "/3/event",
        "/4",
    ]
    assert (await gateway.post("/events/acme--report", {"id": "e1"})).status == 201
    assert (await gateway.post("/events/a%20b", {"id": "e1"})).status == 422
    rows = await pool.fetch("SELECT * FROM flow_event ORDER BY namespace, id")
    assert [(row["namespace"], row["id"], row["event"], row["key"], row["data"]) for row in rows] == [
        ("acme", "e1", "acme--report", "", None),
        ("default", "e1", "report.approved", "monday", b'{"by":"ana"}'),
        ("default", "e2", "report.approved", "", None),
    ]
    assert (tmp_path / "objects" / orjson.loads(rows[2]["data_ref"])["key"]).read_bytes() == orjson.dumps(
        LARGE
    )
    inbox = await pool.fetch("SELECT flow_id, kind, node, detail FROM flow_inbox")
    assert [(row["flow_id"], row["kind"], row["node"]) for row in inbox] == [(5, "event", "approval")]
    assert orjson.loads(inbox[0]["detail"]) == {"namespace": "default", "id": "e1"}


async def test_namespaces_and_roles_limit_definitions_starts_and_events(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path
) -> None:
    """O5: definitions, starts and events of another namespace are refused or do not exist, and a
    definition may name only types and flows that its sender sees."""
    await make_topics(kafka_servers, prefix)
    _, everything = await make_key(database, Role.ADMIN)
    _, acme = await make_key(database, Role.ADMIN, ["acme"])
    _, submitter = await make_key(database, Role.SUBMITTER, ["acme"])
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:

        async def keys_are_loaded() -> bool:
            tokens = (everything, acme, submitter)
            answers = [await caller.get("/flow-definitions", headers=sent(token)) for token in tokens]
            return all(answer.status == 200 for answer in answers)

        await wait_until(keys_are_loaded)
        for name in ("acme--media", "beta--media"):
            assert (await caller.post("/types", {"name": name}, headers=sent(everything))).status == 201

        def of(flow: str, type_: str) -> dict[str, Any]:
            return definition(flow, nodes={"first": {"kind": "task", "type": type_}})

        assert (await upload(caller, of("beta--f", "beta--media"), headers=sent(everything))).status == 201
        assert (await upload(caller, of("beta--g", "acme--media"), headers=sent(acme))).status == 403
        foreign = await upload(caller, of("acme--f", "beta--media"), headers=sent(acme))
        assert (foreign.status, foreign.pointers) == (422, ["/nodes/first/type"])
        child = definition("acme--f", nodes={"c": {"kind": "flow", "flow": "beta--f"}})
        foreign = await upload(caller, child, headers=sent(acme))
        assert (foreign.status, foreign.pointers) == (422, ["/nodes/c/flow"])
        own = await upload(caller, of("acme--f", "acme--media"), headers=sent(acme))
        assert own.status == 201
        assert own.body["created_by"].startswith("key:")
        assert (await upload(caller, of("acme--g", "acme--media"), headers=sent(submitter))).status == 403
        listed = await caller.get("/flow-definitions", headers=sent(submitter))
        assert [each["name"] for each in listed.body["definitions"]] == ["acme--f"]
        for path in ("beta--f", "beta--f/versions/1"):
            assert (await caller.get(f"/flow-definitions/{path}", headers=sent(acme))).status == 404
        starts = [{"flow": "acme--f"}, {"flow": "beta--f"}]
        answer = await caller.post("/flows", starts, headers=sent(submitter))
        assert answer.status == 207
        assert answer.body["flows"][1]["errors"][0]["pointer"] == "/1/flow"
        for name, status in (("acme--done", 201), ("beta--done", 403), ("done", 403)):
            assert (
                await caller.post(f"/events/{name}", {"id": "e"}, headers=sent(submitter))
            ).status == status
