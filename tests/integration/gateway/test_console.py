"""The routes that only the console uses: its files, the overview, the live stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import asyncpg
import pytest
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import Caller, Proxy, running_gateway
from tests.support.waiting import in_time, wait_until

from penstock.core.access import Role
from penstock.gateway import live
from penstock.gateway.console import POLICY, ConsoleRoutes, console_folder
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import EVENTS, REVOKED, TASK_LOGS, WORKERS
from penstock.postgres import api_keys
from penstock.settings import Kafka


@pytest.fixture
async def topics(kafka_servers, prefix):
    """The gateway publishes to these; a missing topic delays its stop."""
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), [EVENTS, REVOKED, TASK_LOGS, WORKERS])


@pytest.fixture
def settings(kafka_servers, prefix, database, tmp_path, topics):
    return {"kafka": kafka_servers, "prefix": prefix, "postgres": database, "objects": f"file://{tmp_path}"}


@pytest.fixture
async def caller(settings):
    async with running_gateway(**settings) as caller:
        yield caller


@asynccontextmanager
async def stream(caller: Caller, topics: str, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """An open live stream."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with caller.session.get(
        f"{caller.url}/live", params={"topics": topics}, headers=headers, timeout=timeout
    ) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield response


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    """The next event of a stream and its data; an empty name at the end of the stream."""
    name = ""
    while line := (await in_time(response.content.readline())).decode().rstrip("\n"):
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))
    return (name, None) if response.content.at_eof() else await next_event(response)


async def told(response: aiohttp.ClientResponse, topic: str) -> None:
    """Returns when a stream names a topic."""
    while True:
        name, data = await next_event(response)
        assert name, "the stream has ended"
        if name == "resync" or topic in data["topics"]:
            return


# Files


@pytest.fixture
def built(tmp_path, monkeypatch):
    folder = tmp_path / "dist"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>console")
    (folder / "assets" / "index-1a.js").write_text("let a = 1;" * 200)
    (tmp_path / "secret.txt").write_text("top secret")
    monkeypatch.setattr("penstock.gateway.app.console_folder", lambda: folder)
    return folder


async def test_files_are_served_with_a_strict_policy(built, settings):
    async with running_gateway(**settings) as caller:
        for path in ("/console", "/console/", "/console/tasks/17", "/console/index.html"):
            async with caller.session.get(caller.url + path) as page:
                assert (page.status, await page.text()) == (200, "<!doctype html>console"), path
                assert page.headers["Content-Security-Policy"] == POLICY
                assert page.headers["Cache-Control"] == "no-cache"
        async with caller.session.get(f"{caller.url}/console/assets/index-1a.js") as script:
            assert await script.text() == "let a = 1;" * 200
            assert script.headers["Content-Encoding"] == "gzip"
            assert "immutable" in script.headers["Cache-Control"]
            assert script.content_type in ("text/javascript", "application/javascript")
            etag = script.headers["ETag"]
        async with caller.session.get(
            f"{caller.url}/console/assets/index-1a.js", headers={"If-None-Match": etag}
        ) as again:
            assert again.status == 304
        assert (await caller.get("/console/assets/gone.js")).status == 404


@pytest.mark.parametrize(
    "path", ["/console/../secret.txt", "/console/assets/..%2f..%2fsecret.txt", "/console/%2e%2e/secret.txt"]
)
async def test_no_other_file_is_served(built, settings, path):
    async with running_gateway(**settings) as caller:
        url = aiohttp.client.URL(caller.url + path, encoded=True)
        async with caller.session.get(url) as answer:
            assert "top secret" not in await answer.text()


async def test_a_gateway_without_a_console_says_so_and_works(settings, monkeypatch):
    monkeypatch.setattr("penstock.gateway.app.console_folder", lambda: None)
    async with running_gateway(**settings) as caller:
        answer = await caller.get("/console/tasks")
        assert answer.status == 404
        assert "make console" in answer.body["detail"]
        assert (await caller.get("/tasks")).status == 200


def test_the_built_console_is_found():
    """`make test` builds it before."""
    folder = console_folder()
    assert folder is not None
    assert ConsoleRoutes(folder).routes()


# Overview


async def test_the_overview_counts_what_waits_and_what_has_ended(caller, database):
    for name in ("busy", "acme--quiet"):
        await caller.post("/types", {"name": name})
    ids = [(await caller.post("/tasks", {"type": "busy", "context": n})).body["id"] for n in range(3)]
    await caller.post(f"/tasks/{ids[0]}/cancel")
    connection = await asyncpg.connect(database)
    await connection.execute(
        "INSERT INTO penstock.callback_target (namespace, url, state) VALUES ('acme', 'https://a.example/', 'abnormal')"
    )
    await connection.close()

    async def is_counted() -> bool:
        found = (await caller.get("/overview")).body
        by_name = {each["type"]: each for each in found["types"]}
        return (
            by_name["busy"]["ready"] == 2
            and by_name["busy"]["oldest_s"] >= 0
            and by_name["acme--quiet"]["ready"] == 0
            and sum(minute["cancelled"] for minute in found["minutes"]) == 1
            and found["callbacks"] == {"abnormal": 1, "disabled": 0, "dead": 0}
            and found["services"]["postgres"] == "ok"
        )

    await wait_until(is_counted)


async def test_the_overview_shows_own_namespaces_only(kafka_servers, prefix, database, tmp_path, topics):
    _, admin = await make_key(database, Role.ADMIN)
    _, reader = await make_key(database, Role.READER, ["acme"])
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        for name in ("acme--t", "beta--t"):
            await caller.post("/types", {"name": name}, headers=sent(admin))
            task = (await caller.post("/tasks", {"type": name, "context": 1}, headers=sent(admin))).body["id"]
            await caller.post(f"/tasks/{task}/cancel", headers=sent(admin))
        connection = await asyncpg.connect(database)
        await connection.execute(
            "INSERT INTO penstock.callback_target (namespace, url, state) VALUES ('beta', 'https://b.example/', 'disabled')"
        )
        await connection.close()

        async def counts(token: str) -> tuple[list[str], int, int]:
            found = (await caller.get("/overview", headers=sent(token))).body
            ends = sum(minute["cancelled"] for minute in found["minutes"])
            return [each["type"] for each in found["types"]], ends, found["callbacks"]["disabled"]

        async def are_right() -> bool:
            return (await counts(admin), await counts(reader)) == (
                (["acme--t", "beta--t"], 2, 1),
                (["acme--t"], 1, 0),
            )

        await wait_until(are_right)


# Live stream


async def test_a_change_is_told_once_it_is_there(caller):
    await caller.post("/types", {"name": "t"})
    task = (await caller.post("/tasks", {"type": "t", "context": 1})).body["id"]
    async with stream(caller, f"task:{task}") as one, stream(caller, "tasks,types") as other:
        # The first look at a topic is an event, too.
        await told(one, f"task:{task}")
        await told(other, "tasks")
        await caller.post(f"/tasks/{task}/cancel")
        await told(one, f"task:{task}")
        await told(other, "tasks")


async def test_unknown_topics_are_named(caller):
    answer = await caller.get("/live?topics=tasks,nothing")
    assert answer.status == 422
    assert "nothing" in answer.body["detail"]


async def test_a_stream_learns_nothing_of_other_namespaces(kafka_servers, prefix, database, tmp_path, topics):
    """Neither of a task by its id, nor the moment of a change in a list."""
    _, admin = await make_key(database, Role.ADMIN)
    _, reader = await make_key(database, Role.READER, ["acme"])
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        ids = {}
        for name in ("acme--t", "beta--t"):
            await caller.post("/types", {"name": name}, headers=sent(admin))
            ids[name] = (await caller.post("/tasks", {"type": name, "context": 1}, headers=sent(admin))).body[
                "id"
            ]

        async def is_accepted() -> bool:
            return (await caller.get("/tasks", headers=sent(reader))).status == 200

        await wait_until(is_accepted)
        watched = f"task:{ids['acme--t']},task:{ids['beta--t']},operations"
        async with stream(caller, watched, **sent(reader)) as response:
            name, data = await next_event(response)
            assert name == "changed"
            assert f"task:{ids['beta--t']}" not in data["topics"]
            # The stream names lists at each interval, without any change.
            for _ in range(2):
                assert await next_event(response) == ("changed", {"topics": ["operations"]})
            await caller.post(f"/tasks/{ids['beta--t']}/cancel", headers=sent(admin))
            await caller.post(f"/tasks/{ids['acme--t']}/cancel", headers=sent(admin))
            seen: set[str] = set()
            while f"task:{ids['acme--t']}" not in seen:
                _, data = await next_event(response)
                seen |= set(data["topics"])
            assert f"task:{ids['beta--t']}" not in seen


async def test_a_stream_ends_with_its_key(kafka_servers, prefix, database, tmp_path, topics, monkeypatch):
    monkeypatch.setattr(live, "CHECK_S", 0.2)
    key_id, token = await make_key(database, Role.READER)
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:

        async def is_accepted() -> bool:
            return (await caller.get("/tasks", headers=sent(token))).status == 200

        await wait_until(is_accepted)
        async with stream(caller, "keys", **sent(token)) as response:
            connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
            await api_keys.revoke(connection, key_id)
            await connection.close()
            await in_time(response.content.read())


async def test_streams_end_when_the_gateway_stops(settings):
    async with aiohttp.ClientSession() as session:
        async with running_gateway(**settings) as caller:
            own = Caller(caller.url, session)
            context = stream(own, "tasks")
            response = await context.__aenter__()
        # The gateway stops in order, without waiting for the client.
        await in_time(response.content.read())
        await context.__aexit__(None, None, None)


async def test_streams_are_bounded(settings, monkeypatch):
    monkeypatch.setattr(live, "MOST_STREAMS", 2)
    async with running_gateway(**settings) as caller:
        async with stream(caller, "tasks"), stream(caller, "tasks"):
            refused = await caller.get("/live?topics=tasks")
            assert (refused.status, "Retry-After" in refused.headers) == (429, True)

        async def has_room() -> bool:
            """A client that is gone leaves its place."""
            async with caller.session.get(f"{caller.url}/live?topics=tasks") as answer:
                return answer.status == 200

        await wait_until(has_room)


async def test_a_stream_outlives_an_outage_and_is_told_to_read_again(settings, database):
    proxy = Proxy()
    url = await proxy.start(database)
    port = int(url.rpartition(":")[2].partition("/")[0])
    async with running_gateway(**{**settings, "postgres": url}) as caller:
        async with stream(caller, "tasks,operations") as response:
            await proxy.cut()

            async def is_away() -> bool:
                return (await caller.get("/overview")).status == 503

            await wait_until(is_away)
            await proxy.start(database, port=port)
            while (await next_event(response))[0] != "resync":
                pass
        await proxy.cut()
