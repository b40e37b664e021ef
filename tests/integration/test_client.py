"""The client against a real gateway, and against none."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest
from aiohttp import web
from tests.gateways import running_gateway

from penstock.client import Cancelled, Client, Draft, SyncClient, TaskFilter
from penstock.contracts.context import ContentType, Context
from penstock.core.task import Priority, State
from penstock.errors import (
    Conflict,
    GatewayUnavailable,
    InvalidRecord,
    NotFound,
    PenstockError,
    Throttled,
    TooLarge,
    UnknownType,
)
from penstock.http.problems import Faults
from penstock.kafka.connection import create_topics
from penstock.kafka.topics import EVENTS
from penstock.settings import Kafka


@pytest.fixture
async def url(kafka_servers: str, prefix: str, database: str, tmp_path: Path) -> AsyncIterator[str]:
    # What cancelling owes is published: without its topic a stop would wait for it in vain.
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), [EVENTS])
    async with running_gateway(
        kafka=kafka_servers, prefix=prefix, postgres=database, objects=f"file://{tmp_path}"
    ) as gateway:
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


async def test_a_task_goes_in_and_comes_out(url: str, database: str) -> None:
    """T5: everything that can be said of a task reaches the gateway and is read back."""
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


async def test_many_tasks_go_in_chunks_and_come_back_in_order(url: str) -> None:
    """T5: 1,200 tasks in three requests, each reported as it is done."""
    told: list[int] = []
    async with Client(url) as client:
        drafts = [Draft(type="media", context={"n": n}, labels={"batch": "b"}) for n in range(1200)]
        submitted = await client.submit_many(drafts, progress=told.append)
        assert told == [500, 500, 200]
        assert len({one.id for one in submitted}) == 1200
        assert (await client.get(submitted[700].id)).context == {"n": 700}
        listed = [task.id async for task in client.list(labels={"batch": "b"})]
        assert listed == sorted((one.id for one in submitted), reverse=True)
        some = [task.id async for task in client.list(type="media", state=["ready", "failed"], limit=3)]
        assert some == listed[:3]


async def test_large_requests_are_split_by_their_bytes(url: str) -> None:
    """Twelve contexts of 800 kB do not fit one request; the client sends several."""
    told: list[int] = []
    text = Context(ContentType.TEXT, b"x" * 800_000)
    async with Client(url) as client:
        await client.submit_many([Draft(type="media", context=text) for _ in range(12)], progress=told.append)
    assert told == [5, 5, 2]


async def test_refusals_are_typed_and_point_at_the_field(url: str) -> None:
    """T5: the error raised here is the one the gateway raised, and in a later chunk points at the draft."""
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
        with pytest.raises(InvalidRecord) as late:
            await client.submit_many(drafts)
        assert late.value.pointer == "/520/callbacks/0"
        drafts += [Draft(type="media", priority="x")]
        with pytest.raises(Faults) as several:
            await client.submit_many(drafts)
        assert [fault.pointer for fault in several.value.faults] == ["/520/callbacks/0", "/521/priority"]


async def test_watching_tells_the_counts_until_all_have_ended(url: str, database: str) -> None:
    """Each change is told once; unknown ids are an error rather than an endless wait."""
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


async def test_the_synchronous_client_does_the_same(url: str, database: str) -> None:
    """The same calls without an event loop, from a thread that has none."""

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
    """F5, O2c: counted, begun and followed to the end; asked again under its id it is followed, not begun again; begun
    without waiting it goes on by itself until it is stopped."""
    async with Client(url) as client:
        await client.submit_many([{"type": "media", "labels": {"n": str(n % 2)}} for n in range(20)])
        odd = TaskFilter(type="media", labels={"n": "1"}, states=[State.READY], priorities=[Priority.MEDIUM])
        rehearsal = await client.operate("pause", odd, dry_run=True)
        assert (rehearsal.count, rehearsal.found_in, rehearsal.complete) == (10, {"ready": 10}, True)
        assert (rehearsal.id, len(rehearsal.examples)) == (None, 5)
        steps: list[int] = []
        names: list[str] = []
        told = await client.operate(
            "pause", odd, rate=100, id="one", by="ann", progress=steps.append, begun=names.append
        )
        assert (told.id, told.state, told.count, sum(steps), names) == ("one", "done", 10, 10, ["one"])
        assert await client.operate("pause", odd, rate=100, id="one", by="ann") == told
        with pytest.raises(Conflict):
            await client.operate("cancel", odd, id="one")
        with pytest.raises(InvalidRecord):
            await client.operate("cancel", TaskFilter())
        going = await client.operate("cancel", TaskFilter(type="media"), rate=0.5, wait=False)
        assert going.state == "running"
        assert going.id is not None
        stopped = await client.stop_operation(going.id, "ben")
        assert (stopped["state"], stopped["stopped_by"]) == ("stopped", "ben")
        assert (await client.operation(going.id)) == stopped
        assert [one["id"] async for one in client.operations()] == [going.id, "one"]
        assert [one["id"] async for one in client.operations(verb="pause", limit=1)] == ["one"]
        with pytest.raises(NotFound):
            await client.operation("a/b")


def test_both_clients_have_the_same_methods() -> None:
    """Whoever knows one knows the other: names, arguments and defaults."""

    def shape(client: type) -> dict[str, list[str]]:
        return {
            # Without `self`, which some share by a mixin that says what it must be.
            name: [str(parameter) for parameter in inspect.signature(method).parameters.values()][1:]
            for name, method in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert shape(Client) == shape(SyncClient)


async def test_a_submission_whose_answer_is_lost_is_repeated_and_makes_one_task() -> None:
    """T5: under the client's own key the repetition is safe; without any key it is not made."""
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


async def test_what_a_gateway_has_no_room_for_is_sent_again_when_it_says() -> None:
    """T5: 429 means that nothing was done, so that also what has no key is sent again, after Retry-After; not beyond patience."""
    asked: list[float] = []

    async def full(_request: web.Request) -> web.Response:
        asked.append(asyncio.get_running_loop().time())
        problem = {"type": "urn:penstock:problem:throttled", "title": "Too much at once", "status": 429}
        if len(asked) == 2:
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
        assert asked[1] - asked[0] >= 1
        async with Client(address, patience_s=0.5) as client:
            with pytest.raises(Throttled) as refused:
                await client.submit("media")
        assert (refused.value.retry_after_s, len(asked)) == (1, 3)
    finally:
        await runner.cleanup()


async def test_no_gateway_is_told_by_its_address() -> None:
    """The message says where nobody answered."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with Client(url, patience_s=0.3) as client:
            with pytest.raises(GatewayUnavailable, match=url):
                await client.types()


async def test_something_else_at_the_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A web server that is no gateway gives an error that says so, whatever it answers."""

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


def test_the_client_is_light() -> None:
    """W1: importing it pulls in neither the databases' nor the stream processors' packages."""
    code = (
        "import sys, penstock.client;"
        "print([m for m in ('asyncpg', 'faust', 'aiokafka', 'jsonschema_rs') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
