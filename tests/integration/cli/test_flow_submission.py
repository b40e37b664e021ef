"""`penstock flows` and the client upload definitions, start flows and send events."""

from __future__ import annotations

import json
from pathlib import Path

import asyncpg
import pytest
from tests.support.gateways import Caller
from tests.support.invoking import Invoke, documents, invoker

from penstock.client import Client, FlowDraft, SubmissionsRefused
from penstock.errors import Conflict, InvalidRecord, NotFound
from penstock.flows import Flow

TASK_TYPES = ()

NIGHTLY = """\
flow: nightly
version: {version}
description: Loads a day.
inputs:
  day: {{}}
  size: {{default: 5}}
nodes:
  load:
    kind: task
    type: {type}
    input: inputs.day
"""


@pytest.fixture
def url(gateway: Caller) -> str:
    return gateway.url


@pytest.fixture
def flows(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_GATEWAY", url)
    return invoker("flows")


async def test_files_are_uploaded_and_flows_started(
    flows: Invoke, pool: asyncpg.Pool, tmp_path: Path
) -> None:
    """F4, O8: a definition is uploaded from YAML, its versions are listed, and a flow is started
    with texts and JSON values; the errors name the line of the file, or the option."""
    assert "upload one" in (await flows("definitions")).stdout
    file = tmp_path / "nightly.yaml"
    file.write_text(NIGHTLY.format(version=1, type="media"))
    done = await flows("upload", "nightly.yaml")
    assert (done.exit_code, done.stdout) == (0, "nightly.yaml: flow nightly, version 1 is stored\n")
    assert documents(await flows("upload", "nightly.yaml", "--json"))[0]["version"] == 1
    file.write_text(NIGHTLY.format(version=1, type="media").replace("size", "length"))
    changed = await flows("upload", "nightly.yaml")
    assert (changed.exit_code, "raise `version`" in changed.stderr) == (3, True)
    file.write_text(NIGHTLY.format(version=2, type="no-such-type"))
    refused = await flows("upload", "nightly.yaml")
    assert refused.exit_code == 3
    assert "nightly.yaml:10:11 (/nodes/load/type): there is no task type 'no-such-type'" in refused.stderr
    file.write_text(NIGHTLY.format(version=2, type="media").replace("inputs.day", "inputs.dya"))
    refused = await flows("upload", "nightly.yaml")
    assert (refused.exit_code, "nightly.yaml:11:12: unknown_input" in refused.stdout) == (3, True)
    file.write_text(NIGHTLY.format(version=2, type="media"))
    assert (await flows("upload", "nightly.yaml")).exit_code == 0
    assert [each["version"] for each in documents(await flows("versions", "nightly", "--json"))] == [2, 1]
    assert "Loads a day." in (await flows("versions", "nightly")).stdout
    assert (await flows("versions", "nihgtly")).exit_code == 4
    [line] = (await flows("definitions")).stdout.splitlines()[1:]
    assert line.split()[:3] == ["nightly", "2", "2"]

    options = (
        "--input",
        "day=2026-11-23",
        "--input",
        "size:=7",
        "--idempotency-key",
        "k",
        "--priority",
        "high",
    )
    [first] = documents(await flows("submit", "nightly", *options, "--label", "team=data", "--json"))
    again = await flows("submit", "nightly", *options)
    assert again.stdout.startswith(f"flow {first['id']} existed already, with the same idempotency key; ")
    assert again.stdout.endswith("; its first inputs stay\n")
    whole = await flows("submit", "nightly", "--version", "1", "--inputs", "-", input='{"day": [1]}')
    assert whole.exit_code == 0
    rows = await pool.fetch("SELECT version, inputs, priority, labels FROM flow ORDER BY id")
    assert [(row["version"], json.loads(row["inputs"]), row["priority"]) for row in rows] == [
        (2, {"day": "2026-11-23", "size": 7}, 1),
        (1, {"day": [1], "size": 5}, 2),
    ]
    for arguments, words in (
        (("nightly",), "--inputs: flow 'nightly', version 2, needs the input 'day'"),
        (("nightly", "--input", "day"), "write --input NAME=TEXT or --input NAME:=JSON"),
        (("nightly", "--input", "day:=x"), "not JSON"),
        (("nightly", "--input", "day=1", "--input", "day=2"), "given twice"),
        (("nightly", "--inputs", "[]"), "no JSON object"),
        (("nightly", "--input", "day=1", "--version", "3"), "--version: there is no version 3"),
        (("nihgtly",), "there is no flow definition 'nihgtly'"),
    ):
        failed = await flows("submit", *arguments)
        assert (failed.exit_code, words in failed.stderr) == (3, True), failed.stderr

    sent = await flows("send-event", "approved", "--id", "e1", "--key", "k", "--data", '{"by": "ana"}')
    assert sent.stdout == "event approved sent\n"
    assert documents(await flows("send-event", "approved", "--id", "e1", "--json")) == [{"created": False}]
    assert (await flows("send-event", "a b")).exit_code == 3
    assert await pool.fetchval("SELECT data FROM flow_event WHERE id = 'e1'") == b'{"by":"ana"}'


CHAIN = {
    "top": "flow: top\nversion: 1\nnodes:\n  a: {kind: flow, flow: middle}\n",
    "middle": "flow: middle\nversion: 1\nnodes:\n  a: {kind: flow, flow: leaf}\n",
    "leaf": "flow: leaf\nversion: 1\nnodes:\n  a: {kind: task, type: media}\n",
    "other": "flow: other\nversion: 1\nnodes:\n  a: {kind: task, type: media}\n",
}


async def test_several_files_are_uploaded_in_any_order(flows: Invoke, tmp_path: Path) -> None:
    """F1, O8: child flows go first. A refused file names each fault with its place; the files that
    do not depend on it are uploaded."""
    for name, text in CHAIN.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    leaf = tmp_path / "leaf.yaml"
    leaf.write_text(CHAIN["leaf"].replace("media", "no-type") + "  b: {kind: task, type: nor-this}\n")
    files = ("top.yaml", "middle.yaml", "leaf.yaml", "other.yaml")
    refused = await flows("upload", *files)
    assert refused.exit_code == 3
    assert refused.stdout.splitlines() == [
        "leaf.yaml:4:25 (/nodes/a/type): there is no task type 'no-type': register it, or correct the name",
        "leaf.yaml:5:25 (/nodes/b/type): there is no task type 'nor-this': register it, or correct the name",
        "middle.yaml:1:1: not uploaded, because its child flow 'leaf' in leaf.yaml is not",
        "top.yaml:1:1: not uploaded, because its child flow 'middle' in middle.yaml is not",
        "other.yaml: flow other, version 1 is stored",
    ]
    leaf.write_text(CHAIN["leaf"])
    done = await flows("upload", *files)
    assert done.exit_code == 0, done.output
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["leaf,", "middle,", "top,", "other,"]
    leaf.write_text(CHAIN["leaf"].replace("kind: task, type: media", "kind: flow, flow: top"))
    refused = await flows("upload", *files)
    assert (refused.exit_code, "top → middle → leaf → top" in refused.stdout) == (3, True)


async def test_the_client_uploads_starts_and_sends(url: str, pool: asyncpg.Pool) -> None:
    """F4: a definition of the builder; many flows, of which the faulty ones are refused alone; an
    event without an id."""
    flow = Flow("nightly", version=1)
    flow.declare("day")
    flow.task("load", type="media")
    async with Client(url) as client:
        stored = await client.put_flow_definition(flow.definition())
        assert (stored["name"], stored["version"]) == ("nightly", 1)
        with pytest.raises(Conflict, match="raise `version`"):
            await client.put_flow_definition({**flow.definition(), "description": "other"})
        with pytest.raises(InvalidRecord, match="no task type") as caught:
            await client.put_flow_definition(
                {"flow": "f", "version": 1, "nodes": {"a": {"kind": "task", "type": "no"}}}
            )
        assert caught.value.pointer == "/nodes/a/type"
        assert [each["name"] async for each in client.flow_definitions()] == ["nightly"]
        assert [each["version"] async for each in client.flow_versions("nightly")] == [1]
        assert (await client.flow_definition("nightly", 1))["definition"] == flow.definition()
        with pytest.raises(NotFound):
            await client.flow_definition("nightly", 2)
        one = await client.submit_flow("nightly", {"day": "monday"}, idempotency_key="k", events="all")
        assert (await client.submit_flow("nightly", {"day": 1}, idempotency_key="k")).id == one.id
        done: list[int] = []
        drafts = [FlowDraft(flow="nightly", inputs={"day": day}) for day in range(600)]
        submitted = await client.submit_flows(drafts, progress=done.append)
        assert (len({each.id for each in submitted}), sum(done)) == (600, 600)
        with pytest.raises(SubmissionsRefused) as refused:
            await client.submit_flows([*drafts[:501], {"flow": "nightly"}, {"flow": "no"}])
        assert [fault.pointer for fault in refused.value.faults] == ["/501/inputs", "/502/flow"]
        assert sum(each is not None for each in refused.value.submitted) == 501
        with pytest.raises(InvalidRecord, match="not JSON"):
            await client.submit_flow("nightly", {"day": object()})
        assert await client.send_event("approved", {"by": "ana"}, key="k")
        assert await client.send_event("approved", id="e")
        assert not await client.send_event("approved", id="e")
    assert await pool.fetchval("SELECT count(*) FROM flow") == 1 + 600 + 501
    assert await pool.fetchval("SELECT count(*) FROM flow_event") == 2
