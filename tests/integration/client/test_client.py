"""The client against a real gateway, against stub servers, and without a server."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest
from aiohttp import web
from tests.support.gateways import running_gateway
from tests.support.waiting import wait_until

from penstock.client import Cancelled, Client, Draft, SubmissionsRefused, SyncClient, TaskFilter
from penstock.contracts.context import ContentType, Context
from penstock.core.task import Priority, State
from penstock.errors import (
    Conflict,
    Faults,
    GatewayUnavailable,
    InvalidRecord,
    NotFound,
    NotSucceeded,
    PenstockError,
    Throttled,
    TooLarge,
    UnknownType,
)


@pytest.fixture
async def url(where: dict[str, Any]) -> AsyncIterator[str]:
    async with running_gateway(**where) as gateway:
        async with Client(gateway.url) as client:
            await client.register_type("media", first_stage="probe")
        yield gateway.url


async def finish(database: str, *ids: int) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute(
        "UPDATE penstock.task SET state = 'succeeded', result_type = 'json', result = '{\"ok\": true}'"
        " WHERE id = ANY($1)",
        list(ids),
    )
    await connection.close()


async def test_every_field_of_a_submission_can_be_read_back(url: str, database: str) -> None:
    """T5: every field of a submission reaches the gateway and can be read back."""
    async with Client(url) as client:
        submitted = await client.submit(
            "media",
            b"\x00\xff",
            stage="cut",
            priority="HIGH",
            idempotency_key="k",
            run_at=datetime(2090, 1, 1, tzinfo=UTC),
            callbacks=["https://shop.example/hook"],
            events="all",
            labels={"customer": "acme"},
        )
        assert submitted.created
        task = await client.get(submitted.id)
        assert (task.type, task.stage, task.priority, task.state) == (
            "media",
            "cut",
            Priority.HIGH,
            State.SCHEDULED,
        )
        assert task.context == b"\x00\xff"
        assert task.labels == {"customer": "acme"}
        assert task.raw["events"] == "all"
        assert not task.ended
        assert not (await client.submit("media", idempotency_key="k")).created
        await finish(database, submitted.id)
        done = await client.get(submitted.id)
        assert done.ended
        assert done.result == {"ok": True}


async def test_many_tasks_are_submitted_in_chunks_and_in_order(url: str) -> None:
    """T5: the client sends 1,200 tasks in three requests and reports the size of each."""
    chunk_sizes: list[int] = []
    async with Client(url) as client:
        drafts = [Draft(type="media", context={"n": n}, labels={"batch": "b"}) for n in range(1200)]
        submitted = await client.submit_many(drafts, progress=chunk_sizes.append)
        assert chunk_sizes == [500, 500, 200]
        assert len({one.id for one in submitted}) == 1200
        assert (await client.get(submitted[700].id)).context == {"n": 700}
        listed = [task.id async for task in client.list(labels={"batch": "b"})]
        assert listed == sorted((one.id for one in submitted), reverse=True)
        first_three = [
            task.id async for task in client.list(type="media", state=["ready", "failed"], limit=3)
        ]
        assert first_three == listed[:3]


async def test_large_requests_are_split_by_their_bytes(url: str) -> None:
    """The client splits twelve contexts of 800 kB into three requests, because they exceed one
    request's limit."""
    chunk_sizes: list[int] = []
    text = Context(ContentType.TEXT, b"x" * 800_000)
    async with Client(url) as client:
        await client.submit_many(
            [Draft(type="media", context=text) for _ in range(12)], progress=chunk_sizes.append
        )
    assert chunk_sizes == [5, 5, 2]


async def test_errors_are_typed_and_point_at_the_field(url: str) -> None:
    """T5: the client raises the gateway's error. Its pointer names the field, and in later chunks
    the index of the draft."""
    async with Client(url) as client:
        with pytest.raises(UnknownType) as unknown:
            await client.submit("nope")
        assert unknown.value.pointer == "/type"
        with pytest.raises(InvalidRecord) as invalid:
            await client.submit("media", priority="URGENT")
        assert invalid.value.pointer == "/priority"
        with pytest.raises(TooLarge) as large:
            await client.submit("media", "x" * 900_001)
        assert large.value.pointer == "/context"
        with pytest.raises(NotFound):
            await client.get(4711)
        with pytest.raises(Conflict):
            await client.register_type("media", partitions=3)
        with pytest.raises(InvalidRecord, match="JSON"):
            await client.submit("media", object())
        drafts = [Draft(type="media")] * 520 + [Draft(type="media", callbacks=["ftp://x"])]
        with pytest.raises(SubmissionsRefused) as late:
            await client.submit_many(drafts)
        assert late.value.pointer == "/520/callbacks/0"
        drafts += [Draft(type="media", priority="x")]
        with pytest.raises(Faults) as several:
            await client.submit_many(drafts)
        assert [fault.pointer for fault in several.value.faults] == ["/520/callbacks/0", "/521/priority"]


async def test_a_draft_that_cannot_be_encoded_stops_no_other(url: str) -> None:
    """T5: the client finds some faults itself. All other drafts are submitted, before and after."""
    drafts = [
        Draft(type="media", priority="high"),
        *[Draft(type="media")] * 520,
        Draft(type="media", context=object()),
        {"type": "media", "context": object()},
        Draft(type="media", callbacks=["ftp://x"]),
        Draft(type="media"),
    ]
    async with Client(url) as client:
        with pytest.raises(SubmissionsRefused) as refused:
            await client.submit_many(drafts)
        pointers = [fault.pointer for fault in refused.value.faults]
        assert pointers == ["/0/priority", "/521/context", "/522", "/523/callbacks/0"]
        places = [place for place, found in enumerate(refused.value.submitted) if found is None]
        assert places == [0, 521, 522, 523]
        submitted = [found.id for found in refused.value.submitted if found]
        assert await client.states(submitted) == {"ready": 521}


async def test_results_of_one_task_and_of_many(url: str, database: str) -> None:
    """O8: a result is waited for by its id, its submission, or with others. A task that has not
    succeeded has none: the error has its state and its reason."""
    async with Client(url) as client:
        first = await client.submit("media")
        rest = await client.submit_many([Draft(type="media")] * 30)
        waiting = [asyncio.ensure_future(one.result()) for one in (first, rest[0])]
        ids = [one.id for one in rest]
        many = asyncio.ensure_future(client.results(ids[::-1]))
        whole = asyncio.ensure_future(client.submit_and_wait("media", {"a": 1}, labels={"w": "1"}))
        await finish(database, first.id, *ids)
        assert await asyncio.gather(*waiting) == [{"ok": True}] * 2
        assert [task.id for task in await many] == ids[::-1]
        assert {task.result["ok"] for task in await many} == {True}

        async def end_it() -> bool:
            found = [task.id async for task in client.list(labels={"w": "1"})]
            await finish(database, *found)
            return bool(found)

        await wait_until(end_it)
        assert (await whole).context == {"a": 1}
        cancelled = await client.submit("media")
        await client.cancel([cancelled.id])
        with pytest.raises(NotSucceeded, match="is cancelled") as caught:
            await cancelled.result()
        assert (caught.value.id, caught.value.state) == (cancelled.id, "cancelled")
        with pytest.raises(NotFound):
            await client.results([first.id, 4711])
        with pytest.raises(TimeoutError):
            await (await client.submit("media")).result(timeout_s=0.2)

    def block() -> None:
        with SyncClient(url) as client:
            assert client.result(first.id) == {"ok": True}
            assert [task.id for task in client.as_completed([first.id])] == [first.id]
            refused = client.submit("media")
            client.cancel([refused.id])
            with pytest.raises(NotSucceeded):
                refused.result()

    await asyncio.to_thread(block)


async def test_watch_yields_the_counts_until_all_tasks_end(url: str, database: str) -> None:
    """`watch` yields each change of the counts once. An unknown id raises NotFound instead of an
    endless wait."""
    async with Client(url) as client:
        ids = [one.id for one in await client.submit_many([Draft(type="media")] * 3)]
        seen = []
        async for counts in client.watch(ids):
            seen.append(counts)
            await finish(database, *ids[: len(seen) + 1])
        assert seen == [{"ready": 3}, {"succeeded": 2, "ready": 1}, {"succeeded": 3}]
        assert await client.wait(ids) == {"succeeded": 3}
        with pytest.raises(NotFound):
            await client.wait([*ids, 10**9])
        [other] = await client.submit_many([Draft(type="media")])
        with pytest.raises(TimeoutError):
            await client.wait([other.id], timeout_s=0.2)
        assert await client.cancel([*ids, other.id, 10**9]) == Cancelled([other.id], ids, [10**9])


async def test_the_synchronous_client_makes_the_same_calls(url: str, database: str) -> None:
    """SyncClient makes the same calls from a thread without an event loop."""

    def work() -> int:
        with SyncClient(url) as client:
            one = client.submit("media", {"a": 1})
            assert client.get(one.id).context == {"a": 1}
            many = client.submit_many({"type": "media"} for _ in range(3))
            assert len(list(client.list(type="media"))) == 4
            assert client.states([one.id]) == {"ready": 1}
            assert client.cancel([t.id for t in many]).cancelled == [t.id for t in many]
            assert client.wait([t.id for t in many]) == {"cancelled": 3}
            assert list(client.watch([many[0].id])) == [{"cancelled": 1}]
            assert [t["name"] for t in client.types()] == ["media"]
            paused = client.operate("pause", TaskFilter(ids=[one.id]))
            assert (paused.count, client.operate("resume", TaskFilter(ids=[one.id])).count) == (1, 1)
            assert paused.id is not None
            assert client.stop_operation(paused.id) == client.operation(paused.id)
            assert [entry["verb"] for entry in client.operations()] == ["resume", "pause"]
            with pytest.raises(UnknownType):
                client.submit("nope")
            return one.id

    await finish(database, await asyncio.to_thread(work))
    with pytest.raises(RuntimeError, match="with"):
        SyncClient(url).types()


async def test_operations_are_followed_and_stopped(url: str) -> None:
    """F5, O2c: the client follows an operation to its end, and a repeated id follows the same
    operation. An operation without waiting runs until it is stopped."""
    async with Client(url) as client:
        await client.submit_many([{"type": "media", "labels": {"n": str(n % 2)}} for n in range(20)])
        odd = TaskFilter(type="media", labels={"n": "1"}, states=[State.READY], priorities=[Priority.MEDIUM])
        preview = await client.operate("pause", odd, dry_run=True)
        assert (preview.count, preview.found_in, preview.complete) == (10, {"ready": 10}, True)
        assert (preview.id, len(preview.examples)) == (None, 5)
        steps: list[int] = []
        names: list[str] = []
        operation = await client.operate(
            "pause", odd, rate=100, id="one", by="ann", progress=steps.append, begun=names.append
        )
        assert (operation.id, operation.state, operation.count, sum(steps), names) == (
            "one",
            "done",
            10,
            10,
            ["one"],
        )
        assert await client.operate("pause", odd, rate=100, id="one", by="ann") == operation
        with pytest.raises(Conflict):
            await client.operate("cancel", odd, id="one")
        with pytest.raises(InvalidRecord):
            await client.operate("cancel", TaskFilter())
        background = await client.operate("cancel", TaskFilter(type="media"), rate=0.5, wait=False)
        assert background.state == "running"
        assert background.id is not None
        stopped = await client.stop_operation(background.id, "ben")
        assert (stopped["state"], stopped["stopped_by"]) == ("stopped", "ben")
        assert (await client.operation(background.id)) == stopped
        assert [one["id"] async for one in client.operations()] == [background.id, "one"]
        assert [one["id"] async for one in client.operations(verb="pause", limit=1)] == ["one"]
        with pytest.raises(NotFound):
            await client.operation("a/b")


def test_both_clients_have_the_same_methods() -> None:
    """Both clients have the same methods, arguments and defaults."""

    def shape(client: type) -> dict[str, list[str]]:
        return {
            # `self` is left out, because a mixin annotates its type.
            name: [str(parameter) for parameter in inspect.signature(method).parameters.values()][1:]
            for name, method in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert shape(Client) == shape(SyncClient)


async def test_a_submission_with_a_lost_answer_is_repeated_once() -> None:
    """T5: the client repeats a submission under its own idempotency key, and never without a
    key."""
    bodies: list[object] = []

    async def flaky(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        if len(bodies) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"id": 7, "created": False})

    app = web.Application()
    app.router.add_post("/tasks", flaky)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Client(address) as client:
            submitted = await client.submit("media")
        assert (submitted.id, submitted.created) == (7, True)
        assert len(bodies) == 2
        assert bodies[0] == bodies[1]
        bodies.clear()
        async with Client(address, own_keys=False) as client:
            with pytest.raises(GatewayUnavailable):
                await client.submit("media")
        assert len(bodies) == 1
    finally:
        await runner.cleanup()


async def test_a_throttled_request_is_repeated_after_retry_after() -> None:
    """T5: after 429 the client waits for Retry-After and repeats the request, even without a key,
    within `patience_s`."""
    request_times_s: list[float] = []

    async def full(_request: web.Request) -> web.Response:
        request_times_s.append(asyncio.get_running_loop().time())
        problem = {"type": "urn:penstock:problem:throttled", "title": "Too much at once", "status": 429}
        if len(request_times_s) == 2:
            return web.json_response({"id": 7, "created": True})
        return web.json_response(problem, status=429, headers={"Retry-After": "1"})

    app = web.Application()
    app.router.add_post("/tasks", full)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Client(address, own_keys=False) as client:
            assert (await client.submit("media")).id == 7
        assert request_times_s[1] - request_times_s[0] >= 1
        async with Client(address, patience_s=0.5) as client:
            with pytest.raises(Throttled) as refused:
                await client.submit("media")
        assert (refused.value.retry_after_s, len(request_times_s)) == (1, 3)
    finally:
        await runner.cleanup()


async def test_an_unavailable_gateway_is_named_by_its_address() -> None:
    """The error names the address that did not answer."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with Client(url, patience_s=0.3) as client:
            with pytest.raises(GatewayUnavailable, match=url):
                await client.types()


async def test_a_server_that_is_no_gateway_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is no gateway raises an error that says so, for every answer."""

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>")

    app = web.Application()
    app.router.add_get("/types", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("PENSTOCK_GATEWAY", f"http://127.0.0.1:{runner.addresses[0][1]}/")
    try:
        async with Client() as client:
            with pytest.raises(PenstockError, match="no Penstock gateway"):
                await client.types()
            with pytest.raises(PenstockError, match="404"):
                await client.get(1)
    finally:
        await runner.cleanup()


def test_the_client_imports_no_server_packages() -> None:
    """W1: importing the client does not import the packages of databases or stream processors."""
    code = (
        "import sys, penstock.client;"
        "print([m for m in ('asyncpg', 'faust', 'aiokafka', 'jsonschema_rs') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
