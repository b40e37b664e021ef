"""A real gateway in the test's own event loop, and a TCP proxy whose server can be taken away."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import jsonschema

from penstock.gateway import openapi
from penstock.gateway.app import create_app
from penstock.gateway.settings import GatewaySettings
from tests.support.waiting import in_time


@dataclass
class Answer:
    """An HTTP response."""

    status: int
    body: Any
    headers: Any

    @property
    def pointers(self) -> list[str]:
        return [error["pointer"] for error in self.body.get("errors", [])]


class Caller:
    """Calls one gateway."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def get(self, path: str, **more: Any) -> Answer:
        return await self._call("GET", path, **more)

    async def post(self, path: str, json: Any = None, **more: Any) -> Answer:
        if json is not None:
            more["json"] = json
        return await self._call("POST", path, **more)

    async def patch(self, path: str, json: Any) -> Answer:
        return await self._call("PATCH", path, json=json)

    async def is_ready(self) -> bool:
        """Whether the gateway reaches both PostgreSQL and Kafka: what a test awaits before it
        needs Kafka."""
        return (await self.get("/readyz")).status == 200

    async def _call(self, method: str, path: str, **more: Any) -> Answer:
        async with self.session.request(method, self.url + path, **more) as response:
            is_json = response.content_type.endswith("json")
            body = await response.json(content_type=None) if is_json else await response.text()
            _conforms(method, response.url.path, response.status, response.content_type, body)
            return Answer(response.status, body, response.headers)


def _conforms(method: str, path: str, status: int, content_type: str, body: Any) -> None:
    """Checks that an answer conforms to openapi.json."""
    api = openapi.document()
    for template, item in api["paths"].items():
        if method.lower() in item and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path):
            answer = item[method.lower()]["responses"].get(str(status))
            if answer is None and template == "/tasks/{id}" and not path.rpartition("/")[2].isdigit():
                return  # no such route
            assert answer is not None, f"{method} {template} is not said to answer {status}: {body}"
            if "$ref" in answer:
                answer = api["components"]["responses"][answer["$ref"].rpartition("/")[2]]
            schema = answer["content"][content_type]["schema"]
            jsonschema.Draft202012Validator({**schema, "components": api["components"]}).validate(body)
            return
    assert status in (404, 405), f"{method} {path} is not described"


@asynccontextmanager
async def running_gateway(**given: Any) -> AsyncIterator[Caller]:
    """A gateway on a port of its own, stopped in order at the end of the block."""
    settings = GatewaySettings.load({}, **{"gateway_port": 0, **given})
    stopping = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    service = create_app(settings, listening=port.set_result)
    task = asyncio.ensure_future(service(stopping, lambda: None))
    await asyncio.wait({task, port}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        port.cancel()
        await task
    async with aiohttp.ClientSession() as session:
        try:
            yield Caller(f"http://127.0.0.1:{await port}", session)
        finally:
            # Before the session closes: what is under way must be answered.
            stopping.set()
            await in_time(task)


class Proxy:
    """Passes connections on to a server until it is cut; while it is frozen, it takes them and
    passes nothing on."""

    def __init__(self) -> None:
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, dsn: str, *, port: int | None = None) -> str:
        """Returns the URL of the database `dsn` through this proxy. After a cut, the port of the
        first URL gives the same URL."""
        parts = urlsplit(dsn)
        options = parse_qs(parts.query)
        folder = options.get("host", [""])[0]
        there_port = int(options.get("port", [parts.port or 5432])[0])

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.flowing.wait()
            if folder:
                there, back = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{there_port}")
            else:
                there, back = await asyncio.open_connection(parts.hostname, there_port)
            self._open |= {writer, back}
            await asyncio.gather(pump(reader, back, self.flowing), pump(there, writer, self.flowing))

        self._server = await asyncio.start_server(serve, "127.0.0.1", port or 0)
        port_here = self._server.sockets[0].getsockname()[1]
        user = parts.netloc.rpartition("@")[0] or "postgres"
        return parts._replace(netloc=f"{user}@127.0.0.1:{port_here}", query="").geturl()

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()


async def pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event | None = None
) -> None:
    """Copies what a connection receives, until it ends; then closes the other one."""
    try:
        while data := await reader.read(65536):
            if flowing is not None:
                await flowing.wait()
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
