"""The gateway's routes for tasks and types, against a real PostgreSQL and Kafka."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from tests.support.gateways import Caller, running_gateway
from tests.support.waiting import in_time, wait_until

from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology.topics import CALLBACKS, EVENTS
from penstock.postgres import task_search
from penstock.settings import Kafka


@pytest.fixture
async def gateway(where: dict[str, Any]) -> AsyncIterator[Caller]:
    async with running_gateway(**where) as caller:
        answer = await caller.post("/types", {"name": "media", "first_stage": "probe"})
        assert answer.status == 201
        yield caller


async def count(database: str) -> int:
    connection = await asyncpg.connect(database)
    try:
        return await connection.fetchval("SELECT count(*) FROM penstock.task")
    finally:
        await connection.close()


async def test_a_submitted_task_is_committed_and_can_be_read(gateway: Caller, database: str) -> None:
    """T1, T5: a task that was acknowledged with 201 is in PostgreSQL, with every submitted
    field."""
    submitted = await gateway.post(
        "/tasks",
        {
            "type": "media",
            "priority": "HIGH",
            "context": {"file": "a.mp4"},
            "labels": {"customer": "acme"},
            "idempotency_key": "k",
            "callbacks": ["https://shop.example/hook"],
            "run_at": "2090-01-01T00:00:00+01:00",
        },
    )
    assert submitted.status == 201
    assert submitted.body["created"] is True
    assert await count(database) == 1
    task = (await gateway.get(submitted.headers["Location"])).body
    assert task["id"] == submitted.body["id"]
    assert (task["type"], task["stage"], task["state"], task["priority"]) == (
        "media",
        "probe",
        "scheduled",
        "HIGH",
    )
    assert task["context"] == {"file": "a.mp4"}
    assert task["labels"] == {"customer": "acme"}
    assert task["callbacks"] == ["https://shop.example/hook"]
    assert task["due_at"] == "2089-12-31T23:00:00Z"
    assert task["attempts"] == []


async def test_a_repeated_idempotency_key_returns_the_first_task(gateway: Caller, database: str) -> None:
    """T5: the first submission under an idempotency key gets 201. Each later one, also in a batch,
    gets the same id, and alone 200."""
    body = {"type": "media", "idempotency_key": "once"}
    first = await gateway.post("/tasks", body)
    again = await gateway.post("/tasks", body)
    assert (first.status, again.status) == (201, 200)
    assert again.body == {"id": first.body["id"], "created": False}
    batch = await gateway.post("/tasks", [body, {"type": "media", "idempotency_key": "new"}, body])
    assert batch.status == 201
    ids = [task["id"] for task in batch.body["tasks"]]
    assert [task["created"] for task in batch.body["tasks"]] == [False, True, False]
    assert ids[0] == ids[2] == first.body["id"]
    assert await count(database) == 2


async def test_concurrent_submissions_with_one_key_make_one_task(gateway: Caller, database: str) -> None:
    """T5: fifty concurrent submissions under one idempotency key make one task. Fifty without a
    key, in the same statements, stay separate."""
    same = [gateway.post("/tasks", {"type": "media", "idempotency_key": "race"}) for _ in range(50)]
    own = [gateway.post("/tasks", {"type": "media", "context": n}) for n in range(50)]
    answers = await asyncio.gather(*same, *own)
    assert len({answer.body["id"] for answer in answers[:50]}) == 1
    assert sum(answer.body["created"] for answer in answers[:50]) == 1
    assert await count(database) == 51
    for number, answer in enumerate(answers[50:]):
        task = (await gateway.get(f"/tasks/{answer.body['id']}")).body
        assert task["context"] == number


async def test_a_large_context_goes_to_the_object_store(gateway: Caller, tmp_path: Path) -> None:
    """T4: the row of a context above 4,096 bytes holds a reference. Readers get the value, or the
    reference on request."""
    text = "x" * 50_000
    submitted = await gateway.post("/tasks", {"type": "media", "content_type": "text", "context": text})
    path = f"/tasks/{submitted.body['id']}"
    assert (await gateway.get(path)).body["context"] == text
    shown = (await gateway.get(path + "?context=ref")).body
    assert shown["context_ref"]["size"] == 50_000
    assert "context" not in shown
    (tmp_path / "objects" / shown["context_ref"]["key"]).unlink()
    gone = await gateway.get(path)
    assert gone.status == 200
    assert "is not in the store" in gone.body["context_error"]


async def test_every_content_type_is_returned_unchanged(gateway: Caller) -> None:
    """T1: JSON, text, URL and bytes are returned unchanged."""
    for content_type, value in (
        ("json", {"a": [1, None, "ü"]}),
        ("text", "plain ✓"),
        ("url", "https://data.example/q"),
        ("bytes", base64.b64encode(bytes(range(256))).decode()),
    ):
        submitted = await gateway.post(
            "/tasks", {"type": "media", "content_type": content_type, "context": value}
        )
        task = (await gateway.get(f"/tasks/{submitted.body['id']}")).body
        assert (task["content_type"], task["context"]) == (content_type, value)


JSON = {"Content-Type": "application/json"}

BAD_BODIES: list[tuple[str, dict[str, Any], int, str, list[str]]] = [
    ("malformed JSON", {"data": b'{"type": "media"', "headers": JSON}, 400, "malformed", []),
    ("an empty body", {"data": b"", "headers": JSON}, 400, "malformed", []),
    ("not UTF-8", {"data": '{"type": "médïa"}'.encode("latin-1"), "headers": JSON}, 400, "malformed", []),
    (
        "another charset",
        {"data": b'{"type": "media"}', "headers": {"Content-Type": "application/json; charset=utf-16"}},
        400,
        "malformed",
        [],
    ),
    (
        "not the declared encoding",
        {"data": b'{"type": "media"}', "headers": {**JSON, "Content-Encoding": "gzip"}},
        400,
        "",
        [],
    ),
    ("not JSON", {"data": b"type=media", "headers": {"Content-Type": "text/plain"}}, 415, "", []),
    ("no type", {"json": {"context": 1}}, 422, "invalid", [""]),
    ("unknown type", {"json": {"type": "nope"}}, 422, "unknown-type", ["/type"]),
    ("wrong priority", {"json": {"type": "media", "priority": "URGENT"}}, 422, "invalid", ["/priority"]),
    ("unknown field", {"json": {"type": "media", "colour": "red"}}, 422, "invalid", [""]),
    (
        "a callback that is no URL",
        {"json": {"type": "media", "callbacks": ["https://ok.example/", "ftp://x"]}},
        422,
        "invalid",
        ["/callbacks/1"],
    ),
    (
        "a context that is no URL",
        {"json": {"type": "media", "content_type": "url", "context": "here"}},
        422,
        "invalid",
        ["/context"],
    ),
    (
        "bytes that are no base64",
        {"json": {"type": "media", "content_type": "bytes", "context": "%%"}},
        422,
        "invalid",
        ["/context"],
    ),
    (
        "a leap second",
        {"json": {"type": "media", "run_at": "2016-12-31T23:59:60Z"}},
        422,
        "invalid",
        ["/run_at"],
    ),
    (
        "NUL in a key",
        {"json": {"type": "media", "idempotency_key": "a\0"}},
        422,
        "invalid",
        ["/idempotency_key"],
    ),
    (
        "an oversized context",
        {"json": {"type": "media", "content_type": "text", "context": "x" * 900_001}},
        413,
        "too-large",
        ["/context"],
    ),
    ("an oversized body", {"data": io.BytesIO(b"x" * 9_000_000), "headers": JSON}, 413, "too-large", [""]),
    ("an oversized batch", {"json": [{"type": "media"}] * 1001}, 413, "too-large", [""]),
    ("an empty batch", {"json": []}, 422, "invalid", [""]),
    (
        "a batch with only one entry, a bad one",
        {"json": [{"type": "media", "priority": 1}]},
        422,
        "invalid",
        ["/0/priority"],
    ),
    (
        "a batch of bad entries",
        {"json": [{"type": "media", "stage": "", "priority": 1}, {"type": "media", "key": ""}, 7]},
        422,
        "invalid",
        ["/0/priority", "/0/stage", "/1/key", "/2"],
    ),
    (
        "a batch of unknown types",
        {"json": [{"type": "no"}]},
        422,
        "unknown-type",
        ["/0/type"],
    ),
]


async def test_bad_input_gets_status_kind_and_pointer(gateway: Caller, database: str) -> None:
    """T5: each kind of bad input gets its status, kind and pointer. Nothing is inserted, and the
    next request succeeds."""
    for number, (name, request, status, kind, pointers) in enumerate(BAD_BODIES):
        answer = await gateway.post("/tasks", **request)
        assert answer.status == status, (name, answer.body)
        assert answer.headers["Content-Type"].startswith("application/problem+json"), name
        assert answer.body["status"] == status, name
        assert answer.body["detail"], name
        if kind:
            assert answer.body["type"] == f"urn:penstock:problem:{kind}", name
        assert sorted(answer.pointers) == sorted(pointers), name
        assert await count(database) == number, name
        assert (await gateway.post("/tasks", {"type": "media"})).status == 201, name


async def test_a_compressed_body_is_read(gateway: Caller) -> None:
    """The gateway accepts a compressed body."""
    body = gzip.compress(b'{"type": "media"}')
    answer = await gateway.post("/tasks", data=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.status == 201


async def test_bad_queries_are_rejected(gateway: Caller) -> None:
    """A misspelt filter is rejected instead of matching everything. An unknown path is answered
    with a problem document."""
    for path, status, parameter in (
        ("/tasks?limit=501", 422, "limit"),
        ("/tasks?limit=1_0", 422, "limit"),
        ("/tasks?cursor=x", 422, "cursor"),
        ("/tasks?state=done", 422, "state"),
        ("/tasks?label=acme", 422, "label"),
        ("/tasks?type=%00", 422, "type"),
        ("/tasks?stat=ready", 422, "stat"),
        ("/tasks/1?context=full", 422, "context"),
        ("/tasks/1", 404, None),
        ("/tasks/99999999999999999999", 404, None),
        ("/tasks/abc", 404, None),
        ("/types/nope", 404, None),
        ("/nowhere", 404, None),
    ):
        answer = await gateway.get(path)
        assert (answer.status, answer.body["status"]) == (status, status), path
        if parameter:
            assert [error["parameter"] for error in answer.body["errors"]] == [parameter], path


async def test_a_wrong_method_gets_the_allowed_methods(gateway: Caller) -> None:
    """A wrong method gets 405 as a problem document, with the allowed methods in `Allow`."""
    answer = await gateway.session.delete(gateway.url + "/tasks")
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET,POST"
    assert (await answer.json(content_type="application/problem+json"))["detail"].endswith("only GET, POST")


async def test_other_origins_cannot_change_anything(gateway: Caller, database: str) -> None:
    """O5: the gateway rejects changes from a web page of another origin, so that a browser cannot
    be misused."""
    for origin in ("https://evil.example", "null", "http://[", ""):
        answer = await gateway.post("/tasks", {"type": "media"}, headers={"Origin": origin})
        assert answer.status == 403, origin
    assert await count(database) == 0
    assert (await gateway.post("/tasks", {"type": "media"}, headers={"Origin": gateway.url})).status == 201


async def test_pages_are_stable_during_submissions(gateway: Caller) -> None:
    """Keyset paging shows each earlier task once, also when tasks are submitted between two
    pages."""
    submitted = await gateway.post("/tasks", [{"type": "media", "context": n} for n in range(25)])
    expected = sorted((task["id"] for task in submitted.body["tasks"]), reverse=True)
    seen: list[int] = []
    cursor = ""
    while True:
        page = (await gateway.get(f"/tasks?limit=10{cursor}")).body
        seen += [task["id"] for task in page["tasks"]]
        await gateway.post("/tasks", [{"type": "media"}] * 7)
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert seen == expected


async def test_filters_narrow_the_list(gateway: Caller) -> None:
    """Each filter narrows the list, and a task must match all of them."""
    await gateway.post("/types", {"name": "other"})
    batch: list[dict[str, Any]] = [
        {"type": "media", "labels": {"c": "1", "d": "x:y"}, "key": "a/ü"},
        {"type": "media", "stage": "late", "run_at": "2090-01-01T00:00:00Z"},
        {"type": "other", "idempotency_key": "k", "labels": {"c": "1"}, "key": "b"},
    ]
    ids = [t["id"] for t in (await gateway.post("/tasks", batch)).body["tasks"]]
    for query, expected in (
        ("type=media", [1, 0]),
        ("state=scheduled", [1]),
        ("state=scheduled,ready", [2, 1, 0]),
        ("state=scheduled&state=ready&type=other", [2]),
        ("stage=late", [1]),
        ("label=c:1", [2, 0]),
        ("label=c:1&label=d:x:y", [0]),
        ("idempotency_key=k", [2]),
        ("label=c:2", []),
        ("key=a/%C3%BC", [0]),
        ("key=b&type=other", [2]),
        ("key=b&type=media", []),
    ):
        page = (await gateway.get(f"/tasks?{query}")).body
        assert [task["id"] for task in page["tasks"]] == [ids[n] for n in expected], query
        assert page["next"] is None


async def test_a_list_has_recent_tasks_or_those_with_an_error(
    gateway: Caller, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O8: `since` and `error` narrow the list. A search for recent tasks examines not
    all of the older ones."""
    monkeypatch.setattr(task_search, "ROWS_PER_PART", 2)
    ids = [(await gateway.post("/tasks", {"type": "media"})).body["id"] for _ in range(9)]
    connection = await asyncpg.connect(database)
    await connection.execute(
        "UPDATE penstock.task SET created_at = now() - interval '1 d' WHERE id <= $1", ids[6]
    )
    await connection.execute(
        "UPDATE penstock.task SET created_at = now() - interval '9 h' WHERE id = $1", ids[7]
    )
    errors = {ids[2]: ("ValueError", "No such FILE"), ids[8]: ("Timeout", "after 5 s")}
    for task_id, (kind, message) in errors.items():
        error = orjson.dumps({"kind": kind, "message": message, "traceback": "file"}).decode()
        await connection.execute(
            "UPDATE penstock.task SET state = 'failed', error = $2, finished_at = now() WHERE id = $1",
            task_id,
            error,
        )
    await connection.close()

    async def found(query: str) -> list[int]:
        page = (await gateway.get(f"/tasks?{query}")).body
        assert page["next"] is None
        return [task["id"] for task in page["tasks"]]

    def ago(hours: float) -> str:
        return (datetime.now(UTC) - timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")

    assert await found(f"since={ago(1)}") == [ids[8]]
    assert await found(f"since={ago(10)}") == [ids[8], ids[7]]
    assert await found("error=") == [ids[8], ids[2]]
    assert await found("error=valueerror:%20no") == [ids[2]]
    assert await found("error=file&state=failed") == [ids[2]]
    assert await found(f"error=&since={ago(1)}") == [ids[8]]
    examined = []
    fetchrow = task_search.fetchrow

    def examine(executor, name, *values):
        examined.append(name)
        return fetchrow(executor, name, *values)

    monkeypatch.setattr(task_search, "fetchrow", examine)
    assert await found(f"since={ago(1)}") == [ids[8]]
    assert examined.count("tasks.walk") == 2
    for query in ("since=noon", "since=", f"error={'x' * 201}"):
        assert (await gateway.get(f"/tasks?{query}")).status == 422


async def test_states_are_counted(gateway: Caller) -> None:
    """O8: the gateway counts the states that `watch` requests, and names the unknown ids."""
    batch = [{"type": "media"}, {"type": "media"}, {"type": "media", "run_at": "2090-01-01T00:00:00Z"}]
    ids = [t["id"] for t in (await gateway.post("/tasks", batch)).body["tasks"]]
    answer = await gateway.post("/tasks/states", {"ids": [*ids, 10**9]})
    assert answer.body == {"states": {"ready": 2, "scheduled": 1}, "unknown": [10**9]}
    for wrong in ({"ids": []}, {"ids": ["1"]}, {"ids": [2**63]}, {}, [1]):
        assert (await gateway.post("/tasks/states", wrong)).status == 422


async def test_a_cancellation_publishes_its_event_and_callback(
    gateway: Caller, database: str, kafka_servers: str, prefix: str
) -> None:
    """C1: a task is cancelled once. Its event and its callback are on Kafka, and the outbox is
    empty afterwards."""
    await wait_until(gateway.is_ready)
    submitted = await gateway.post("/tasks", {"type": "media", "callbacks": ["http://127.0.0.1:1/hook"]})
    task_id = submitted.body["id"]
    first = await gateway.post(f"/tasks/{task_id}/cancel")
    assert (first.status, first.body) == (200, {"id": task_id, "state": "cancelled", "cancelled": True})
    again = await gateway.post(f"/tasks/{task_id}/cancel")
    assert (again.status, again.body["cancelled"]) == (200, False)
    task = (await gateway.get(f"/tasks/{task_id}")).body
    assert task["state"] == "cancelled"
    assert [callback["target"] for callback in task["callbacks_owed"]] == ["http://127.0.0.1:1/hook"]
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    for topic, word in ((EVENTS, b"task.cancelled"), (CALLBACKS, b"msg_")):
        async with running(make_consumer(settings, None, prefix + topic.name)) as consumer:
            record = await in_time(consumer.getone())
            assert word in record.value
    connection = await asyncpg.connect(database)
    try:
        await wait_until(
            lambda: _is_empty(connection), what="the outbox row is deleted once its events are on Kafka"
        )
    finally:
        await connection.close()
    assert (await gateway.post("/tasks/4711/cancel")).status == 404


async def _is_empty(connection: Any) -> bool:
    return await connection.fetchval("SELECT count(*) FROM penstock.outbox") == 0


async def test_a_batch_cancels_only_unfinished_tasks(gateway: Caller, database: str) -> None:
    """A batch answer names the cancelled, unchanged and unknown ids. Cancelling a task that has
    already ended gets 409."""
    ids = [t["id"] for t in (await gateway.post("/tasks", [{"type": "media"}] * 3)).body["tasks"]]
    connection = await asyncpg.connect(database)
    await connection.execute("UPDATE penstock.task SET state = 'succeeded' WHERE id = $1", ids[0])
    await connection.close()
    answer = await gateway.post("/tasks/cancel", {"ids": [*ids, 10**9]})
    assert answer.body == {"cancelled": ids[1:], "unchanged": ids[:1], "unknown": [10**9]}
    refused = await gateway.post(f"/tasks/{ids[0]}/cancel")
    assert refused.status == 409
    assert "already succeeded" in refused.body["detail"]


async def test_history_shows_tracebacks(gateway: Caller, database: str) -> None:
    """The API shows the traceback of a failed attempt in a task's history, but not in lists."""
    task_id = (await gateway.post("/tasks", {"type": "media"})).body["id"]
    error = '{"kind": "ValueError", "message": "no", "traceback": "Traceback: here"}'
    connection = await asyncpg.connect(database)
    await connection.execute(
        "UPDATE penstock.task SET state = 'failed', error = $2, finished_at = now() WHERE id = $1",
        task_id,
        error,
    )
    await connection.execute(
        "INSERT INTO penstock.attempt (task_id, step, attempt, stage, outcome, error, finished_at)"
        " VALUES ($1, 0, 0, 'probe', 'fail', $2, now())",
        task_id,
        error,
    )
    await connection.close()
    task = (await gateway.get(f"/tasks/{task_id}")).body
    assert task["error"]["traceback"] == "Traceback: here"
    assert task["attempts"][0]["error"] == task["error"]
    listed = (await gateway.get("/tasks?state=failed")).body["tasks"][0]
    assert listed["error"] == {"kind": "ValueError", "message": "no"}


async def test_types_are_registered_and_changed(gateway: Caller) -> None:
    """T2: a request registers a type. Its settings can be changed, but never its partitions."""
    new = await gateway.post("/types", {"name": "report", "max_attempts": 5, "partitions": 2.0})
    assert (new.status, new.body["partitions"]) == (201, 2)
    changed = await gateway.post("/types", {"name": "report", "max_attempts": 7, "partitions": 2})
    assert (changed.status, changed.body["max_attempts"]) == (200, 7)
    assert (await gateway.get("/types/report")).body == changed.body
    names = [one["name"] for one in (await gateway.get("/types")).body["types"]]
    assert names == ["media", "report"]
    assert (await gateway.post("/types", {"name": "report", "partitions": 3})).status == 409
    for wrong, pointer in (
        ({"name": "a.b"}, "/name"),
        ({"name": "x", "lease_ms": 0}, "/lease_ms"),
        ({"name": "x", "retry_base_ms": 10**12}, "/retry_base_ms"),
        ({"name": "x", "retry_base_ms": 2000, "retry_max_ms": 1000}, "/retry_max_ms"),
        ({"first_stage": "x"}, ""),
    ):
        answer = await gateway.post("/types", wrong)
        assert (answer.status, answer.pointers) == (422, [pointer]), answer.body


async def test_a_namespace_has_limits_of_types(where: dict[str, Any]) -> None:
    """S12: a namespace registers at most as many types as the setting allows, also at once, and no
    type with more partitions. Other namespaces and changes of existing types are not affected."""
    async with running_gateway(**where, gateway_namespace_types=3, gateway_type_partitions=4) as gateway:
        answers = await asyncio.gather(
            *(gateway.post("/types", {"name": f"acme--t{number}", "partitions": 1}) for number in range(6))
        )
        assert sorted(answer.status for answer in answers) == [201] * 3 + [409] * 3
        refused = next(answer for answer in answers if answer.status == 409)
        assert "PENSTOCK_GATEWAY_NAMESPACE_TYPES" in str(refused.body)
        accepted = next(answer for answer in answers if answer.status == 201).body["name"]
        assert (await gateway.post("/types", {"name": accepted, "partitions": 1, "fair": True})).status == 200
        for name in ("other--t", "plain", "default--t"):
            assert (await gateway.post("/types", {"name": name, "partitions": 4})).status == 201
        wide = await gateway.post("/types", {"name": "wide", "partitions": 5})
        assert (wide.status, wide.pointers) == (422, ["/partitions"])
        assert "PENSTOCK_GATEWAY_TYPE_PARTITIONS" in str(wide.body)


async def test_a_long_search_ends_a_page_early(
    gateway: Caller, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S12: a search that no index serves stops after its time, and `next` continues it: the pages
    together have every task that matches, once."""
    monkeypatch.setattr(task_search, "ROWS_PER_PART", 3)
    ids = [
        (
            await gateway.post("/tasks", {"type": "media", "stage": "rare" if number in (0, 7) else "probe"})
        ).body["id"]
        for number in range(12)
    ]
    find = task_search.find

    async def find_briefly(*arguments: Any, **filters: Any) -> Any:
        return await find(*arguments, **filters, within_s=0)

    monkeypatch.setattr(task_search, "find", find_briefly)
    found, pages, cursor = [], 0, ""
    while cursor is not None:
        page = (await gateway.get(f"/tasks?stage=rare{cursor and '&cursor=' + cursor}")).body
        found += [task["id"] for task in page["tasks"]]
        cursor, pages = page["next"], pages + 1
    assert found == [ids[7], ids[0]]
    assert pages > 2
