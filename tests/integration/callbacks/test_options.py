"""Callback options of a submission: headers, format, order and events, with Kafka and PostgreSQL.

The tests follow the options from the submission through the row to the call.
"""

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
from tests.support.callback_targets import SECRET, Bench, Call, Target, answering, bench
from tests.support.gateways import Caller, running_gateway
from tests.support.services import make_topics, read, running_service
from tests.support.waiting import wait_until

from penstock.client import Client, Draft
from penstock.contracts.context import Context
from penstock.contracts.result import Failure, StageResult, encode_results
from penstock.contracts.validation import conform
from penstock.core.completion import Fence, Outcome
from penstock.kafka.topology.topics import CALLBACKS, CALLBACKS_DEAD, EVENTS, STAGE_RESULTS
from penstock.postgres import release
from penstock.postgres.session import open_session
from penstock.postgres.types import TaskType
from penstock.stages.app import create_app
from penstock.stages.settings import StagesSettings

SOURCE = "https://shop.example/tasks"
PASSWORD = "s3cr3t-t0k3n"


@dataclass
class Deployment:
    """A gateway and a stage processor; the test acts as the worker."""

    bench: Bench
    gateway: Caller

    async def submit(self, **fields: Any) -> int:
        answer = await self.gateway.post("/tasks", {"type": "t", **fields})
        assert answer.status == 201, answer.body
        return answer.body["id"]

    async def task(self, task_id: int) -> Any:
        return (await self.gateway.get(f"/tasks/{task_id}")).body

    async def release_tasks(self) -> None:
        async with open_session(self.bench.postgres, "test") as session:
            await release.release(session, TaskType(name="t"), 100, [])

    async def report(self, task_id: int, outcome: Outcome, state: str, **fields: Any) -> None:
        """Reports the result of the task's current attempt, and waits for the task's `state`."""
        # Makes a scheduled task ready before its time.
        await self.bench.connection.execute("UPDATE task SET state = 'ready' WHERE state = 'scheduled'")
        await self.release_tasks()
        before = await self.task(task_id)
        fence = Fence(task_id, before["step"], before["stage"], before["attempt"])
        result = StageResult(fence=fence, outcome=outcome, **fields)
        topic = self.bench.kafka.prefix + STAGE_RESULTS.name
        await self.bench.producer.send_and_wait(topic, encode_results("w", [result]), key=b"w")

        async def in_state() -> bool:
            return (await self.task(task_id))["state"] == state

        await wait_until(in_state, what=f"task {task_id} is {state}")

    async def finish(self, task_id: int) -> None:
        await self.report(task_id, Outcome.DONE, "succeeded", context=Context.encode({"out": "zwölf"}))

    async def records_of(self, topic: str) -> list[Any]:
        return await read(self.bench.kafka.kafka, self.bench.kafka.prefix + topic)


@pytest.fixture
async def deployment(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path
) -> AsyncIterator[Deployment]:
    kafka = await make_topics(kafka_servers, prefix)
    settings = {"kafka": kafka.kafka, "prefix": prefix, "postgres": database, "event_source": SOURCE}
    async with AsyncExitStack() as stack:
        callbacks_bench = await stack.enter_async_context(bench(kafka_servers, prefix, database))
        gateway = await stack.enter_async_context(running_gateway(objects=f"file://{tmp_path}", **settings))
        await stack.enter_async_context(running_service(create_app(StagesSettings(**settings))))
        assert (await gateway.post("/types", {"name": "t"})).status == 201
        await wait_until(gateway.is_ready)
        yield Deployment(callbacks_bench, gateway)


def optional_headers(call: Call) -> dict[str, str]:
    """The headers of a call that its options determine."""
    return {
        name: value for name, value in call.headers.items() if name in ("Content-Type", "X-Token", "Cookie")
    }


async def test_a_callback_is_sent_with_its_options(
    deployment: Deployment, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """C1, C7: each target's callback has its own headers, format and order.

    Independent packages parse the CloudEvent and verify the signature. No answer and no log
    contains the secret header.
    """
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
    [event] = await deployment.records_of(EVENTS.name)
    assert optional_headers(plain) == {"Content-Type": "application/json"}
    assert orjson.loads(plain.body) == event
    assert optional_headers(envelope) == {
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
        **rich["headers"],  # type: ignore[dict-item]  # `headers` is a dictionary
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
    assert caplog.records


async def test_a_retry_keeps_the_options_and_a_dead_letter_masks_headers(
    deployment: Deployment, target: Target
) -> None:
    """C6: a retry has the same headers and format; the dead letter shows only header names."""
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
    assert [optional_headers(call) for call in target.calls] == [
        {"Content-Type": "application/cloudevents+json", "X-Token": PASSWORD}
    ] * 2
    assert len({call.body for call in target.calls}) == 1
    assert dead["headers"] == {"X-Token": "***", "content-type": "application/cloudevents+json"}
    assert dead["ordered"] is True
    assert PASSWORD not in json.dumps(dead)


async def run_task(
    deployment: Deployment, events: str, entries: Sequence[Any]
) -> tuple[list[str], dict[str, list[str]]]:
    """Runs a task through three transitions.

    Returns the names of its events on the topic, and those of its callbacks by target.
    """
    task_id = await deployment.submit(events=events, callbacks=list(entries))
    error = Failure(kind="E", message="m")
    await deployment.report(task_id, Outcome.NEXT, "ready", next_stage="two", context=Context.encode(1))
    await deployment.report(task_id, Outcome.FAIL, "scheduled", error=error)
    await deployment.finish(task_id)
    rows = await deployment.bench.rows()

    async def all_published() -> bool:
        # A record has several callbacks when their targets share a partition.
        records = await deployment.records_of(CALLBACKS.name)
        return sum(len(record) if isinstance(record, list) else 1 for record in records) == len(rows)

    # Records are published at once, long before a row is due, also without an event to publish.
    await wait_until(all_published, timeout=20, what="every callback has its record")
    by_target: dict[str, list[str]] = {}
    for row in sorted(rows.values(), key=lambda row: row["seq"]):
        by_target.setdefault(row["target"].rpartition("/")[2], []).append(orjson.loads(row["body"])["event"])
    return [event["event"] for event in await deployment.records_of(EVENTS.name)], by_target


ADVANCED, RETRIED, SUCCEEDED = "task.advanced", "task.retried", "task.succeeded"
ENTRIES = [
    "http://127.0.0.1:9/unfiltered",
    {"url": "http://127.0.0.1:9/final", "events": "final"},
    {"url": "http://127.0.0.1:9/all", "events": "all"},
    {"url": "http://127.0.0.1:9/listed", "events": ["task.retried", "task.failed"]},
]


@pytest.mark.parametrize(
    ("events", "published", "unfiltered"),
    [
        ("final", [SUCCEEDED], [SUCCEEDED]),
        ("all", [ADVANCED, RETRIED, SUCCEEDED], [ADVANCED, RETRIED, SUCCEEDED]),
    ],
)
async def test_each_target_receives_the_events_of_its_filter(
    deployment: Deployment, events: str, published: list[str], unfiltered: list[str]
) -> None:
    """C1: a target's filter is independent of the task's filter, which applies to the topic."""
    assert await run_task(deployment, events, ENTRIES) == (
        published,
        {
            "unfiltered": unfiltered,
            "final": [SUCCEEDED],
            "all": [ADVANCED, RETRIED, SUCCEEDED],
            "listed": [RETRIED],
        },
    )
    await wait_until(
        lambda: deployment.bench.connection.fetchval("SELECT count(*) = 0 FROM outbox"),
        what="the outbox is empty",
    )
    ids = sorted(await deployment.bench.rows())
    # The id ends with the target's index in the task's list, also when other targets are skipped.
    assert [callback_id.rpartition("-")[2] for callback_id in ids if RETRIED[5:] in callback_id] == (
        ["0", "2", "3"] if events == "all" else ["2", "3"]
    )


async def test_a_cancellation_callback_has_the_requested_format(deployment: Deployment) -> None:
    """C1: callbacks of the gateway's transitions have the event source and obey filters."""
    entries = [
        {"url": "http://127.0.0.1:9/ce", "format": "cloudevents"},
        {"url": "http://127.0.0.1:9/no", "events": ["task.succeeded"]},
    ]
    task_id = await deployment.submit(callbacks=entries)
    await deployment.gateway.post(f"/tasks/{task_id}/cancel")
    [row] = (await deployment.bench.rows()).values()
    found = http.from_http_event(http.HTTPMessage(json.loads(row["headers"]), row["body"]))
    assert (found.get_source(), found.get_type()) == (SOURCE, "penstock.task.cancelled")


async def test_a_tasks_default_callbacks_are_those_of_its_type(deployment: Deployment) -> None:
    """C1: a submission without callbacks keeps those of its type; an empty list stays empty."""
    with_options = {"url": "http://127.0.0.1:9/usual", "headers": {"X-Token": PASSWORD}, "events": "all"}
    document = {"name": "t", "callbacks": ["http://127.0.0.1:9/plain", with_options]}
    registered = await deployment.gateway.post("/types", document)
    assert registered.status == 200
    async with Client(deployment.gateway.url) as client:
        by_default = (await client.submit("t")).id
        none = (await client.submit("t", callbacks=[])).id
        own = (await client.submit("t", callbacks=["http://127.0.0.1:9/own"])).id
        await client.register_type("t", callbacks=["http://127.0.0.1:9/new"])
        later = (await client.submit_many([Draft(type="t")]))[0].id
        await client.register_type("t")
        last = (await client.submit("t")).id
    shown = ["http://127.0.0.1:9/plain", {**with_options, "headers": {"X-Token": "***"}}]
    assert registered.body["callbacks"] == shown
    assert [
        (await deployment.task(task_id))["callbacks"] for task_id in (by_default, none, own, later, last)
    ] == [
        shown,
        [],
        ["http://127.0.0.1:9/own"],
        ["http://127.0.0.1:9/new"],
        [],
    ]
    for task_id in (by_default, none):
        await deployment.finish(task_id)
    rows = (await deployment.bench.rows()).values()
    assert {(row["target"], row["headers"]) for row in rows} == {
        ("http://127.0.0.1:9/plain", None),
        ("http://127.0.0.1:9/usual", json.dumps({"X-Token": PASSWORD})),
    }


async def test_a_rejected_callback_is_pointed_at_and_not_quoted(deployment: Deployment) -> None:
    """T5, C7: errors for a task, a batch and a type point at the header and hide its value."""
    bad = ["http://127.0.0.1:9/", {"url": "http://127.0.0.1:9/", "headers": {"Host": PASSWORD}}]
    line = [{"url": "http://127.0.0.1:9/", "headers": {"X": PASSWORD + "\n"}}]
    one = await deployment.gateway.post("/tasks", {"type": "t", "callbacks": bad})
    batch = await deployment.gateway.post("/tasks", [{"type": "t"}, {"type": "t", "callbacks": line}])
    of_type = await deployment.gateway.post("/types", {"name": "u", "callbacks": bad})
    assert [answer.status for answer in (one, batch, of_type)] == [422, 207, 422]
    assert one.pointers == of_type.pointers == ["/callbacks/1/headers/Host"]
    [refused] = [each for each in batch.body["tasks"] if "errors" in each]
    assert [error["pointer"] for error in refused["errors"]] == ["/1/callbacks/0/headers/X"]
    assert PASSWORD not in json.dumps([one.body, batch.body, of_type.body])
    listed = await deployment.gateway.get("/types")
    assert [one["name"] for one in listed.body["types"]] == ["t"]
