"""An idempotency key that comes with another context, over HTTP and on Kafka."""

from __future__ import annotations

import aiohttp
import orjson
import pytest
from tests.integration.cli.test_cli import penstock
from tests.support.gateways import Caller
from tests.support.invoking import documents
from tests.support.services import producing, read, running_service
from tests.support.waiting import wait_until

from penstock.client import Client, Draft, SubmissionsRefused
from penstock.errors import IdempotencyConflict
from penstock.kafka.topology.topics import SUBMITTED, SUBMITTED_REJECTED
from penstock.postgres import types
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = (
    types.TaskType(name="strict", idempotency="strict", paused=True),
    types.TaskType(name="lenient", paused=True),
)

__all__ = ["penstock"]  # fixture

LARGE = "x" * 6000


@pytest.fixture
async def client(gateway, pool):
    async with Client(gateway.url) as client:
        yield client


async def test_a_strict_type_refuses_another_context(client, pool):
    """T5: 409 by choice of the type, with the key and the first task; the same context returns the
    first task, however it is written."""
    contexts = {
        "member": ({"a": 1, "b": [2]}, {"a": 1, "b": [3]}),
        "null": (None, 0),
        "flag": (1, True),
        "list": ("text", ["text"]),
        "large": ({"large": LARGE}, {"large": LARGE + "y"}),
        "bytes": (b"bytes", b"other"),
    }
    for key, (first, other) in contexts.items():
        made = await client.submit("strict", first, idempotency_key=key)
        again = await client.submit("strict", first, idempotency_key=key, priority="LOW")
        assert (again.id, again.created) == (made.id, False), key
        with pytest.raises(IdempotencyConflict) as refused:
            await client.submit("strict", other, idempotency_key=key)
        assert refused.value.pointer == "/idempotency_key", key
        assert f"'{key}' was used for task {made.id} with another context" in str(refused.value)
        lenient = await client.submit("lenient", first, idempotency_key=key)
        assert (await client.submit("lenient", other, idempotency_key=key)).id == lenient.id, key
    assert await pool.fetchval("SELECT count(*) FROM task") == 2 * len(contexts)


async def test_the_answer_is_409_with_its_kind(client):
    """T5: programs in other languages tell it from a state that does not allow a request."""
    async with aiohttp.ClientSession() as session:
        caller = Caller(client.url, session)
        body = {"type": "strict", "context": {"b": 1, "a": 2}, "idempotency_key": "k"}
        assert (await caller.post("/tasks", body)).status == 201
        assert (await caller.post("/tasks", {**body, "context": {"a": 2, "b": 1}})).status == 200
        refused = await caller.post("/tasks", {**body, "context": {"a": 2}})
        assert (refused.status, refused.body["type"]) == (409, "urn:penstock:problem:idempotency-conflict")
        assert refused.pointers == ["/idempotency_key"]


async def test_entries_of_a_batch_are_judged_alone(client):
    """T5: also when both are in one batch; the first one counts."""
    drafts = [
        Draft(type="strict", context=n, idempotency_key=key)
        for n, key in ((1, "a"), (2, "b"), (3, "a"), (1, "a"))
    ]
    with pytest.raises(SubmissionsRefused) as refused:
        await client.submit_many(drafts)
    [fault] = refused.value.faults
    assert fault.pointer == "/2/idempotency_key"
    submitted = refused.value.submitted
    assert submitted[2] is None
    assert submitted[0].id == submitted[3].id != submitted[1].id


async def test_a_key_from_before_the_choice_is_not_compared(client, pool):
    """T5: a task without a digest cannot be judged; a lenient type compares nothing."""
    await client.submit("lenient", 1, idempotency_key="k")
    await client.change_type("lenient", idempotency="strict")
    assert not (await client.submit("lenient", 2, idempotency_key="k")).created
    await client.submit("lenient", 1, idempotency_key="new")
    with pytest.raises(IdempotencyConflict):
        await client.submit("lenient", 2, idempotency_key="new")
    await client.change_type("lenient", idempotency="lenient")
    assert not (await client.submit("lenient", 2, idempotency_key="new")).created
    assert await pool.fetchval("SELECT count(*) FROM task WHERE context_digest IS NOT NULL") == 1


async def test_records_of_kafka_are_rejected(where, kafka_servers, prefix, pool):
    """T5: each to `submitted.rejected`, once, with its reason; those around it become tasks."""
    settings = TaskSyncSettings(**where)
    contexts = [
        (0, 0),
        (1, 1),
        (0, 99),
        (2, 2),
        (0, 0),
        (1, 98),
        (3, {"large": LARGE}),
        (3, {"large": LARGE}),
    ]
    async with producing(kafka_servers) as producer:
        topic = prefix + SUBMITTED.name
        sent = [
            Draft(type="strict", context=context, idempotency_key=f"k{key}").to_wire()
            for key, context in contexts
        ]
        sent.insert(3, {"type": "unknown"})
        for wire in sent:
            await producer.send_and_wait(topic, orjson.dumps(wire), partition=0)
        async with running_service(create_app(settings)):

            async def all_read():
                return await pool.fetchval("SELECT max(next_offset) FROM ingested") == len(sent)

            await wait_until(all_read)
    found = await pool.fetch("SELECT idempotency_key FROM task ORDER BY 1")
    assert [row[0] for row in found] == ["k0", "k1", "k2", "k3"]
    rejected = await read(kafka_servers, prefix + SUBMITTED_REJECTED.name)
    assert sorted(each["offset"] for each in rejected) == [2, 3, 6]
    reasons = {each["offset"]: str(each) for each in rejected}
    assert "'k0' was used for task" in reasons[2]
    assert "'k1' was used for task" in reasons[6]


async def test_the_command_line_sets_and_shows_it(penstock):
    """O8: the refusal names the option."""
    assert (await penstock("types", "set", "media", "--idempotency", "strict")).exit_code == 0
    [shown] = documents(await penstock("types", "show", "media", "--json"))
    assert shown["idempotency"] == "strict"
    assert (await penstock("submit", "media", "--context", "1", "--idempotency-key", "k")).exit_code == 0
    refused = await penstock("submit", "media", "--context", "2", "--idempotency-key", "k")
    assert refused.exit_code == 3
    assert "--idempotency-key" in refused.stderr
    assert "with another context" in refused.stderr
