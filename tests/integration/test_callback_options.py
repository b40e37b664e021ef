"""What a submitter says of callbacks, from the submission over the row to the call, on the real Kafka and PostgreSQL."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from cloudevents.core.bindings import http
from standardwebhooks import Webhook
from tests.callback_targets import SECRET, Bench, Call, Target, answering, bench
from tests.gateways import Caller, running_gateway
from tests.running import make_topics, read, running_service
from tests.waiting import wait_until

from penstock.client import Client, Draft
from penstock.contracts.context import Context
from penstock.contracts.result import Failure, StageResult, encode_results
from penstock.contracts.validation import conform
from penstock.core.completion import Fence, Outcome
from penstock.kafka.topics import CALLBACKS, CALLBACKS_DEAD, EVENTS, STAGE_RESULTS
from penstock.postgres import release
from penstock.postgres.session import open_session
from penstock.postgres.types import TaskType
from penstock.stages.app import create_app
from penstock.stages.settings import StagesSettings

SOURCE = "https://shop.example/tasks"
PASSWORD = "s3cr3t-t0k3n"


@dataclass
class Deployment:
    """A gateway, a stage processor, and a worker played by the test."""

    bench: Bench
    gateway: Caller

    async def submit(self, **fields: Any) -> int:
        answer = await self.gateway.post("/tasks", {"type": "t", **fields})
        assert answer.status == 201, answer.body
        return answer.body["id"]

    async def task(self, task_id: int) -> Any:
        return (await self.gateway.get(f"/tasks/{task_id}")).body

    async def queued(self) -> None:
        async with open_session(self.bench.postgres, "test") as session:
            await release.release(session, TaskType(name="t"), 100, [])

    async def report(self, task_id: int, outcome: Outcome, state: str, **fields: Any) -> None:
        """Ends the attempt that the task is in, and waits for the state that makes of it."""
        # What is scheduled for later is taken now.
        await self.bench.connection.execute("UPDATE task SET state = 'ready' WHERE state = 'scheduled'")
        await self.queued()
        before = await self.task(task_id)
        fence = Fence(task_id, before["step"], before["stage"], before["attempt"])
        result = StageResult(fence=fence, outcome=outcome, **fields)
        topic = self.bench.kafka.prefix + STAGE_RESULTS.name
        await self.bench.producer.send_and_wait(topic, encode_results("w", [result]), key=b"w")

        async def there() -> bool:
            return (await self.task(task_id))["state"] == state

        await wait_until(there, what=f"task {task_id} is {state}")

    async def finish(self, task_id: int) -> None:
        await self.report(task_id, Outcome.DONE, "succeeded", context=Context.encode({"out": "zwölf"}))

    async def told(self, topic: str) -> list[Any]:
        return await read(self.bench.kafka.kafka, self.bench.kafka.prefix + topic)


@pytest.fixture
async def deployment(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path
) -> AsyncIterator[Deployment]:
    kafka = await make_topics(kafka_servers, prefix)
    where = {"kafka": kafka.kafka, "prefix": prefix, "postgres": database, "event_source": SOURCE}
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(bench(kafka_servers, prefix, database))
        gateway = await stack.enter_async_context(running_gateway(objects=f"file://{tmp_path}", **where))
        await stack.enter_async_context(running_service(create_app(StagesSettings(**where))))
        assert (await gateway.post("/types", {"name": "t"})).status == 201
        await wait_until(gateway.is_ready)
        yield Deployment(made, gateway)


def extra(call: Call) -> dict[str, str]:
    """The headers of a call that were asked for, or say what its body is."""
    return {
        name: value for name, value in call.headers.items() if name in ("Content-Type", "X-Token", "Cookie")
    }


async def test_a_callback_goes_out_as_it_was_asked_for(
    deployment: Deployment, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """C1, C7: headers and format of each target, order noted in its row; CloudEvents and the signature are
    taken by others' packages; the secret is in no answer and no log."""
    caplog.set_level(logging.DEBUG)
    rich = {
        "url": f"{target.url}/rich",
        "headers": {"X-Token": PASSWORD, "Cookie": "a=b"},
        "format": "cloudevents",
        "ordered": True,
    }
    task_id = await deployment.submit(callbacks=[f"{target.url}/plain", rich])
    async with deployment.bench.service():
        await deployment.finish(task_id)
        await wait_until(deployment.bench.all_delivered)
    plain, envelope = sorted(target.calls, key=lambda call: call.path)
    [event] = await deployment.told(EVENTS.name)
    assert extra(plain) == {"Content-Type": "application/json"}
    assert orjson.loads(plain.body) == event
    assert extra(envelope) == {
        "Content-Type": "application/cloudevents+json",
        "X-Token": PASSWORD,
        "Cookie": "a=b",
    }
    for call in (plain, envelope):
        Webhook(SECRET).verify(call.body, call.headers)
    found = http.from_http_event(http.HTTPMessage(envelope.headers, envelope.body))
    assert (found.get_id(), found.get_source(), found.get_type(), found.get_subject()) == (
        event["id"],
        SOURCE,
        "penstock.task.succeeded",
        str(task_id),
    )
    assert found.get_data() == event
    first, second = sorted((await deployment.bench.rows()).values(), key=lambda row: row["seq"])
    assert (first["headers"], first["ordered"]) == (None, False)
    assert orjson.loads(second["headers"]) == {
        **rich["headers"],  # type: ignore[dict-item]  # a test's own dictionary
        "content-type": "application/cloudevents+json",
    }
    assert second["ordered"] is True
    shown = await deployment.task(task_id)
    assert shown["callbacks"] == [
        f"{target.url}/plain",
        {**rich, "headers": {"X-Token": "***", "Cookie": "***"}},
    ]
    listed = (await deployment.gateway.get("/tasks")).body
    assert PASSWORD not in json.dumps([shown, listed])
    assert PASSWORD not in caplog.text
    assert any(record.levelno == logging.DEBUG for record in caplog.records)


async def test_a_retry_says_the_same_and_the_dead_letter_keeps_the_secret(
    deployment: Deployment, target: Target
) -> None:
    """C6: what PostgreSQL writes anew has headers and format still; what is given up shows names only."""
    target.answer = answering(500, 410)
    hook = {
        "url": f"{target.url}/hook",
        "headers": {"X-Token": PASSWORD},
        "format": "cloudevents",
        "ordered": True,
    }
    task_id = await deployment.submit(callbacks=[hook])
    async with deployment.bench.service():
        await deployment.finish(task_id)
        [dead] = await deployment.bench.records(CALLBACKS_DEAD.name, 1)
    conform(dead, "callback-dead")
    assert [extra(call) for call in target.calls] == [
        {"Content-Type": "application/cloudevents+json", "X-Token": PASSWORD}
    ] * 2
    assert len({call.body for call in target.calls}) == 1
    assert dead["headers"] == {"X-Token": "***", "content-type": "application/cloudevents+json"}
    assert dead["ordered"] is True
    assert PASSWORD not in json.dumps(dead)


async def heard(
    deployment: Deployment, events: str, entries: Sequence[Any]
) -> tuple[list[str], dict[str, list[str]]]:
    """Names of the events on the topic, and those told to each target, of a task that goes through every kind."""
    task_id = await deployment.submit(events=events, callbacks=list(entries))
    error = Failure(kind="E", message="m")
    await deployment.report(task_id, Outcome.NEXT, "ready", next_stage="two", context=Context.encode(1))
    await deployment.report(task_id, Outcome.FAIL, "scheduled", error=error)
    await deployment.finish(task_id)
    owed = await deployment.bench.rows()

    async def all_told() -> bool:
        return len(await deployment.told(CALLBACKS.name)) == len(owed)

    # Long before any row falls due: also where nothing but callbacks is owed, records are written at once.
    await wait_until(all_told, timeout=20, what="every callback has its record")
    by_target: dict[str, list[str]] = {}
    for row in sorted(owed.values(), key=lambda row: row["seq"]):
        by_target.setdefault(row["target"].rpartition("/")[2], []).append(orjson.loads(row["body"])["event"])
    return [event["event"] for event in await deployment.told(EVENTS.name)], by_target


ADVANCED, RETRIED, SUCCEEDED = "task.advanced", "task.retried", "task.succeeded"
ENTRIES = [
    "http://127.0.0.1:9/silent",
    {"url": "http://127.0.0.1:9/final", "events": "final"},
    {"url": "http://127.0.0.1:9/all", "events": "all"},
    {"url": "http://127.0.0.1:9/some", "events": ["task.retried", "task.failed"]},
]


@pytest.mark.parametrize(
    ("events", "published", "silent"),
    [
        ("final", [SUCCEEDED], [SUCCEEDED]),
        ("all", [ADVANCED, RETRIED, SUCCEEDED], [ADVANCED, RETRIED, SUCCEEDED]),
    ],
)
async def test_each_target_hears_what_it_asked_for(
    deployment: Deployment, events: str, published: list[str], silent: list[str]
) -> None:
    """C1: a target's filter holds whatever the task publishes, in both directions; the topic gets what the task says."""
    assert await heard(deployment, events, ENTRIES) == (
        published,
        {"silent": silent, "final": [SUCCEEDED], "all": [ADVANCED, RETRIED, SUCCEEDED], "some": [RETRIED]},
    )
    await wait_until(
        lambda: deployment.bench.connection.fetchval("SELECT count(*) = 0 FROM outbox"),
        what="nothing is owed",
    )
    ids = sorted(await deployment.bench.rows())
    # The place in the task's list, whoever else was told.
    assert [callback_id.rpartition("-")[2] for callback_id in ids if RETRIED[5:] in callback_id] == (
        ["0", "2", "3"] if events == "all" else ["2", "3"]
    )


async def test_a_cancellation_is_told_in_the_format_asked_for(deployment: Deployment) -> None:
    """C1: the gateway's own transitions carry its source too, and a filter can leave them out."""
    entries = [
        {"url": "http://127.0.0.1:9/ce", "format": "cloudevents"},
        {"url": "http://127.0.0.1:9/no", "events": ["task.succeeded"]},
    ]
    task_id = await deployment.submit(callbacks=entries)
    await deployment.gateway.post(f"/tasks/{task_id}/cancel")
    [row] = (await deployment.bench.rows()).values()
    found = http.from_http_event(http.HTTPMessage(json.loads(row["headers"]), row["body"]))
    assert (found.get_source(), found.get_type()) == (SOURCE, "penstock.task.cancelled")


async def test_a_type_has_targets_for_tasks_that_name_none(deployment: Deployment) -> None:
    """C1: decided when the task comes in, and for good; an empty list is an answer too."""
    usual = {"url": "http://127.0.0.1:9/usual", "headers": {"X-Token": PASSWORD}, "events": "all"}
    document = {"name": "t", "callbacks": ["http://127.0.0.1:9/plain", usual]}
    registered = await deployment.gateway.post("/types", document)
    assert registered.status == 200
    async with Client(deployment.gateway.url) as client:
        silent = (await client.submit("t")).id
        none = (await client.submit("t", callbacks=[])).id
        own = (await client.submit("t", callbacks=["http://127.0.0.1:9/own"])).id
        await client.register_type("t", callbacks=["http://127.0.0.1:9/new"])
        later = (await client.submit_many([Draft(type="t")]))[0].id
        await client.register_type("t")
        last = (await client.submit("t")).id
    shown = ["http://127.0.0.1:9/plain", {**usual, "headers": {"X-Token": "***"}}]
    assert registered.body["callbacks"] == shown
    assert [
        (await deployment.task(task_id))["callbacks"] for task_id in (silent, none, own, later, last)
    ] == [
        shown,
        [],
        ["http://127.0.0.1:9/own"],
        ["http://127.0.0.1:9/new"],
        [],
    ]
    for task_id in (silent, none):
        await deployment.finish(task_id)
    rows = (await deployment.bench.rows()).values()
    assert {(row["target"], row["headers"]) for row in rows} == {
        ("http://127.0.0.1:9/plain", None),
        ("http://127.0.0.1:9/usual", json.dumps({"X-Token": PASSWORD})),
    }


async def test_what_is_refused_is_pointed_at_and_not_quoted(deployment: Deployment) -> None:
    """T5, C7: in one task, in a batch and in a type; no answer has the secret."""
    bad = ["http://127.0.0.1:9/", {"url": "http://127.0.0.1:9/", "headers": {"Host": PASSWORD}}]
    line = [{"url": "http://127.0.0.1:9/", "headers": {"X": PASSWORD + "\n"}}]
    one = await deployment.gateway.post("/tasks", {"type": "t", "callbacks": bad})
    batch = await deployment.gateway.post("/tasks", [{"type": "t"}, {"type": "t", "callbacks": line}])
    of_type = await deployment.gateway.post("/types", {"name": "u", "callbacks": bad})
    assert [answer.status for answer in (one, batch, of_type)] == [422] * 3
    assert one.pointers == of_type.pointers == ["/callbacks/1/headers/Host"]
    assert batch.pointers == ["/1/callbacks/0/headers/X"]
    assert PASSWORD not in json.dumps([one.body, batch.body, of_type.body])
    listed = await deployment.gateway.get("/types")
    assert [one["name"] for one in listed.body["types"]] == ["t"]
