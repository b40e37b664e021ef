"""Flows and events come in by their topics: each record once, hostile ones rejected alone."""

from __future__ import annotations

import asyncio
import base64

import orjson
import pytest
from click.testing import CliRunner
from tests.support.services import producing, read, running_service, write
from tests.support.state_faults import delete_records, recreate_topic
from tests.support.waiting import wait_until

from penstock.cli.main import cli
from penstock.contracts.parsing import parse
from penstock.contracts.validation import conform
from penstock.flow_owner.app import create_app
from penstock.flow_owner.settings import FlowsSettings
from penstock.kafka.topology.topics import FLOW_EVENTS_SUBMITTED, FLOWS_SUBMITTED
from penstock.postgres import flow_definitions

LARGE = "x" * 5_000
JUNK = [b"", b"null", b"7", b"[]", b"{}", b'"\\ud800"', b"\xff\xfe", b"[" * 1_500 + b"]" * 1_500, b"{"]


@pytest.fixture
def settings(where):
    return FlowsSettings(**where)


@pytest.fixture
async def nightly(pool):
    """A definition that waits, so that its flows stay."""
    definition = {
        "flow": "nightly",
        "version": 1,
        "inputs": {"day": {}, "size": {"default": 5}},
        "nodes": {"approval": {"kind": "wait", "event": "approved", "key": "inputs.day"}},
    }
    await flow_definitions.insert(pool, definition, None)
    return definition


def running(settings):
    return running_service(create_app(settings))


async def write_raw(settings, topic, *values, partition=0):
    async with producing(settings.kafka) as producer:
        for value in values:
            await producer.send_and_wait(
                settings.prefix + topic.name, value, partition=partition, headers=[("traceparent", b"\xff\0")]
            )


async def becomes(pool, sql, expected):
    async def so():
        return await pool.fetchval(sql) == expected

    await wait_until(so, what=f"{sql} is {expected}")


async def test_each_record_starts_one_flow_and_hostile_ones_are_rejected(settings, pool, nightly, tmp_path):
    """F4, T5: good records between any bytes start one flow each, with the newest version as of
    their batch. Each bad one is rejected with its reason and its bytes; a restart repeats none."""

    def flow(day, **more):
        return orjson.dumps({"flow": "nightly", "inputs": {"day": day}, **more})

    bad = [
        flow("x", colour="red"),
        orjson.dumps({"flow": "nightly"}),
        orjson.dumps({"flow": "nightly", "inputs": {"day": 1, "no": 2}}),
        orjson.dumps({"flow": "no-such-flow"}),
        flow("x", version=9),
        flow("x", labels={"a": "\0"}),
        flow("x", callbacks=["ftp://x"]),
        flow("x" * 900_001),
        b'{"flow":"nightly","inputs":{"day":18446744073709551616}}',
    ]
    mixed = [flow("first"), *JUNK, *bad, flow(LARGE), flow("k", idempotency_key="k", priority="HIGH")]
    async with running(settings):
        await write_raw(settings, FLOWS_SUBMITTED, *mixed)
        await becomes(pool, "SELECT count(*) FROM flow", 3)
        await flow_definitions.insert(pool, {**nightly, "version": 2}, None)
        await write_raw(
            settings, FLOWS_SUBMITTED, flow("k", idempotency_key="k"), flow("second"), partition=1
        )
        await becomes(pool, "SELECT count(*) FROM flow WHERE version = 2", 1)
    rows = await pool.fetch("SELECT * FROM flow ORDER BY id")
    assert [orjson.loads(row["inputs"]) for row in rows if row["inputs"]] == [
        {"day": "first", "size": 5},
        {"day": "k", "size": 5},
        {"day": "second", "size": 5},
    ]
    [large] = [row for row in rows if row["inputs_ref"]]
    stored = tmp_path / "objects" / orjson.loads(large["inputs_ref"])["key"]
    assert orjson.loads(stored.read_bytes()) == {"day": LARGE, "size": 5}
    rejected = await read(settings.kafka, f"{settings.prefix}flows.submitted.rejected")
    assert [each["pointer"] for each in rejected[-len(bad) :]] == [
        "",
        "/inputs",
        "/inputs/no",
        "/flow",
        "/version",
        "/labels/a",
        "/callbacks/0",
        "/inputs",
        "",
    ]
    assert [base64.b64decode(each["original"]) for each in rejected if len(each["original"]) < 10_000] == [
        value for value in [*JUNK, *bad] if len(value) < 7_000
    ]
    async with running(settings):
        await write_raw(settings, FLOWS_SUBMITTED, flow("last"))
        await becomes(pool, "SELECT count(*) FROM flow", 5)
    assert len(await read(settings.kafka, f"{settings.prefix}flows.submitted.rejected")) == len(rejected)


async def test_starts_of_a_lost_definition_are_submitted_again(settings, pool, nightly):
    """F4, O10: starts of a definition, or a version, that the database does not know are rejected
    whole. After its upload a command submits them, and a second run starts no second flow."""
    lost = {**nightly, "flow": "lost", "version": 2}
    starts = [{"flow": "lost", "inputs": {"day": 1}}, {"flow": "lost", "inputs": {"day": 2}, "version": 2}]
    where = ["--kafka", settings.kafka, "--prefix", settings.prefix]

    async def replay(*arguments):
        command = ["rejected", "replay", *arguments, *where]
        return await asyncio.to_thread(CliRunner().invoke, cli, command)

    async with running(settings):
        other = [{"flow": "other", "inputs": {}}, {"flow": "nightly"}]
        await write_raw(settings, FLOWS_SUBMITTED, *map(orjson.dumps, [*starts, *other]))

        async def all_rejected():
            return len(await read(settings.kafka, f"{settings.prefix}flows.submitted.rejected")) == 4

        await wait_until(all_rejected)
        await flow_definitions.insert(pool, lost, None)
        assert (await replay("lost", "--flow", "lost")).exit_code == 2
        assert (await replay("--flow", "unknown", "--yes")).exit_code == 4
        for _ in range(2):
            done = await replay("--flow", "lost", "--yes")
            assert done.exit_code == 0, done.output
        await write_raw(
            settings, FLOWS_SUBMITTED, orjson.dumps({"flow": "nightly", "inputs": {"day": "end"}})
        )
        for number in range(2):
            end = {"flow": "lost", "inputs": {"day": "end"}}
            await write_raw(settings, FLOWS_SUBMITTED, orjson.dumps(end), partition=number)
        await becomes(pool, "SELECT count(*) FROM flow WHERE convert_from(inputs, 'UTF8') LIKE '%end%'", 3)
    assert await pool.fetchval("SELECT count(*) FROM flow") == 5


async def test_events_by_topic_end_waits(settings, pool, nightly, tmp_path):
    """F1, T5: an event of the topic ends the wait with its key, also when it comes before the wait;
    a repeated id counts once, and bad records are rejected alone."""
    event = {"event": "approved", "id": "e1", "key": "monday", "data": {"by": "ana"}}
    bad = [{"event": "a b", "id": "e"}, {"event": "approved"}, {**event, "id": ""}, {**event, "colour": 1}]
    async with running(settings):
        await write_raw(
            settings,
            FLOW_EVENTS_SUBMITTED,
            orjson.dumps(event),
            *JUNK,
            *map(orjson.dumps, bad),
            orjson.dumps({**event, "data": "again"}),
            orjson.dumps({"event": "acme--done", "id": "e1", "data": LARGE}),
        )
        await becomes(pool, "SELECT count(*) FROM flow_event", 2)
        await write(
            settings.kafka,
            settings.prefix + FLOWS_SUBMITTED.name,
            *({"flow": "nightly", "inputs": {"day": day}} for day in ("monday", "tuesday")),
            partition=0,
        )
        await becomes(pool, "SELECT count(*) FROM flow WHERE status = 'succeeded'", 1)
        await write_raw(
            settings, FLOW_EVENTS_SUBMITTED, orjson.dumps({**event, "id": "e2", "key": "tuesday"})
        )
        await becomes(pool, "SELECT count(*) FROM flow WHERE status = 'succeeded'", 2)
        await becomes(pool, "SELECT count(*) FROM outbox", 0)
    published = await read(settings.kafka, f"{settings.prefix}events")
    for each in published:
        conform(each, "event")
    assert sorted(each["event"] for each in published) == ["flow.succeeded"] * 2
    rows = await pool.fetch(
        "SELECT namespace, id, key, data, data_ref FROM flow_event ORDER BY namespace, id"
    )
    assert [tuple(row)[:4] for row in rows] == [
        ("acme", "e1", "", None),
        ("default", "e1", "monday", b'{"by":"ana"}'),
        ("default", "e2", "tuesday", b'{"by":"ana"}'),
    ]
    stored = tmp_path / "objects" / parse(rows[0]["data_ref"].encode())["key"]
    assert orjson.loads(stored.read_bytes()) == LARGE
    rejected = await read(settings.kafka, f"{settings.prefix}flow-events.submitted.rejected")
    assert len(rejected) == len(JUNK) + len(bad)


async def test_replaced_topics_and_deleted_records_are_noticed(settings, pool, nightly):
    """F4: positions of flows have the care of those of tasks: a topic that was created again is
    read from its beginning, and deleted records are counted."""

    def flows(*days):
        return write(
            settings.kafka,
            settings.prefix + FLOWS_SUBMITTED.name,
            *({"flow": "nightly", "inputs": {"day": day}} for day in days),
            partition=0,
        )

    async with running(settings):
        await flows(*range(5))
        await becomes(pool, "SELECT count(*) FROM flow", 5)
    await recreate_topic(settings, FLOWS_SUBMITTED)
    await flows(*range(7))
    async with running(settings):
        await becomes(pool, "SELECT count(*) FROM flow", 12)
    await flows(*range(3))
    await delete_records(settings, FLOWS_SUBMITTED.name, {0: 10})
    await flows("last")
    async with running(settings):
        await becomes(pool, "SELECT count(*) FROM flow", 13)
    resets = await pool.fetch("SELECT topic, reason, deleted FROM position_reset ORDER BY id")
    assert {row["topic"] for row in resets} == {settings.prefix + FLOWS_SUBMITTED.name}
    assert {row["reason"] for row in resets} == {"replaced", "deleted"}
    assert sum(row["deleted"] for row in resets if row["reason"] == "deleted") == 3
