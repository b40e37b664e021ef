"""A submission has the same outcome by HTTP and by its topic, with the same faults."""

from __future__ import annotations

from typing import Any

import asyncpg
import orjson
import pytest
from tests.support.gateways import running_gateway
from tests.support.services import producing, read, running_service
from tests.support.waiting import wait_until

from penstock.contracts.rejected import decode_rejection
from penstock.errors import Invalid, InvalidRecord, one_or_all
from penstock.flow_owner.app import create_app as create_flows
from penstock.flow_owner.settings import FlowsSettings
from penstock.postgres import flow_definitions, types
from penstock.task_sync.app import create_app as create_task_sync
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = (types.TaskType(name="strict", idempotency="strict", paused=True),)
DEFINITION = {
    "flow": "nightly",
    "version": 1,
    "inputs": {"day": {}, "size": {"default": 5}},
    "nodes": {"approval": {"kind": "wait", "event": "approved", "key": "inputs.day"}},
}
LARGE = "x" * 5_000

# Entries in the order in which they are sent, with the pointers of their faults; without faults
# they are taken.
ENTRIES: dict[str, list[tuple[dict[str, Any], list[str]]]] = {
    "tasks": [
        ({"type": "strict", "context": 1, "idempotency_key": "k"}, []),
        (
            {"type": "strict", "priority": "URGENT", "colour": 1, "labels": {"a": 2}},
            ["/priority", "", "/labels/a"],
        ),
        ({"priority": "HIGH", "events": "none"}, ["", "/events"]),
        ({"type": "strict", "callbacks": ["ftp://x"]}, ["/callbacks/0"]),
        ({"type": "strict", "run_at": "2026-06-30T23:59:60Z"}, ["/run_at"]),
        ({"type": "strict", "context": "x" * 900_001}, ["/context"]),
        ({"type": "unknown"}, ["/type"]),
        ({"type": "strict", "context": 2, "idempotency_key": "k"}, ["/idempotency_key"]),
        ({"type": "strict", "context": 1, "idempotency_key": "k"}, []),
        ({"type": "strict", "context": LARGE}, []),
    ],
    "flows": [
        ({"flow": "nightly", "inputs": {"day": 1}}, []),
        ({"flow": "nightly", "version": 0, "priority": 1, "colour": 1}, ["/version", "/priority", ""]),
        (
            {"flow": "nightly", "inputs": {"no": 1, "neither": 2}},
            ["/inputs/no", "/inputs/neither", "/inputs"],
        ),
        ({"flow": "nightly", "inputs": {"day": "x" * 900_001}}, ["/inputs"]),
        ({"flow": "unknown"}, ["/flow"]),
        ({"flow": "nightly", "version": 9, "inputs": {"day": 1}}, ["/version"]),
        ({"flow": "nightly", "inputs": {"day": LARGE}}, []),
    ],
    "events": [
        ({"event": "approved", "id": "a", "data": 1}, []),
        ({"event": "approved", "colour": 1, "key": 2}, ["", "/key", ""]),
        ({"event": "approved", "id": "b", "data": "x" * 900_001}, ["/data"]),
        ({"event": "approved", "id": "a", "data": 2}, []),
        ({"event": "approved", "id": "c", "data": LARGE}, []),
    ],
}
TABLES = {"tasks": "task", "flows": "flow", "events": "flow_event"}
PATHS = {"tasks": "/tasks", "flows": "/flows", "events": "/events/approved"}
TOPICS = {"tasks": "submitted", "flows": "flows.submitted", "events": "flow-events.submitted"}


async def by_http(where: dict[str, Any], kind: str, entries: list[dict[str, Any]]) -> dict[int, Invalid]:
    """The faults of the entries of one batch, by their place."""
    if kind == "events":
        entries = [{name: value for name, value in entry.items() if name != "event"} for entry in entries]
    async with running_gateway(**where) as gateway:
        answer = await gateway.post(PATHS[kind], entries)
    assert answer.status == 207
    found: dict[int, Invalid] = {}
    for place, outcome in enumerate(answer.body[kind]):
        if "errors" in outcome:
            faults = [
                InvalidRecord(error["detail"], pointer=error["pointer"].removeprefix(f"/{place}"))
                for error in outcome["errors"]
            ]
            found[place] = one_or_all(faults)
    return found


async def by_topic(where: dict[str, Any], kind: str, entries: list[dict[str, Any]]) -> dict[int, Invalid]:
    """The faults of the records of one partition, by their place."""
    topic = where["prefix"] + TOPICS[kind]
    async with producing(where["kafka"]) as producer:
        for entry in entries:
            await producer.send_and_wait(topic, orjson.dumps(entry), partition=0)
    service = (
        create_task_sync(TaskSyncSettings(**where))
        if kind == "tasks"
        else create_flows(FlowsSettings(**where))
    )
    connection = await asyncpg.connect(where["postgres"])
    try:
        async with running_service(service):

            async def all_read() -> bool:
                offset = await connection.fetchval(
                    "SELECT max(next_offset) FROM penstock.ingested WHERE topic = $1", topic
                )
                return bool(offset == len(entries))

            await wait_until(all_read)
    finally:
        await connection.close()
    found: dict[int, Invalid] = {}
    for raw in await read(where["kafka"], f"{topic}.rejected"):
        rejection = decode_rejection(orjson.dumps(raw))
        assert orjson.loads(rejection.original) == entries[rejection.offset]
        found[rejection.offset] = InvalidRecord(rejection.reason, pointer=rejection.pointer)
    return found


@pytest.mark.parametrize("kind", ENTRIES)
async def test_both_ways_have_the_same_outcomes(where, pool, kind):
    """T5, F4: the same entries are taken by HTTP and by topic. Each other one is refused with all
    its faults, in the same words; a rejection has them in its reason."""
    await flow_definitions.insert(pool, DEFINITION, None)
    entries = [entry for entry, _pointers in ENTRIES[kind]]
    http = await by_http(where, kind, entries)
    topic = await by_topic(where, kind, entries)
    expected = {place: pointers for place, (_entry, pointers) in enumerate(ENTRIES[kind]) if pointers}
    found = {place: [fault.pointer for fault in each.faults] for place, each in http.items()}
    assert {place: sorted(pointers) for place, pointers in found.items()} == {
        place: sorted(pointers) for place, pointers in expected.items()
    }
    assert {place: (each.pointer, each.reason) for place, each in topic.items()} == {
        place: (each.pointer, each.reasons) for place, each in http.items()
    }
    large = {"tasks": "context_ref", "flows": "inputs_ref", "events": "data_ref"}[kind]
    stored = await pool.fetchval(f"SELECT count(*) FROM {TABLES[kind]} WHERE {large} IS NOT NULL")
    # An event has its id, so that the second one has no effect.
    assert stored == (1 if kind == "events" else 2)
