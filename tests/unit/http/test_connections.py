"""Slow and many clients of an HTTP server."""

from __future__ import annotations

import asyncio
import gzip
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from tests.support.http_requests import raw_request, read_answer
from tests.support.waiting import in_time, wait_until

from penstock.http.connection_guard import ConnectionCounts, ConnectionLimits
from penstock.http.listener import listen
from penstock.http.server import admitted_first, body_bytes, problem_middleware, read_body

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /poll HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMITS = ConnectionLimits(
    connections=500,
    by_address=500,
    body_bytes=10_000_000,
    head_s=1,
    body_s=1,
    rate=100,
    idle_s=1,
    write_s=1,
)
BODY_LIMIT = 1_000_000


class Server:
    """Has the port of a server and the event that its long polls wait for."""

    def __init__(self) -> None:
        self.port = 0
        self.counts = ConnectionCounts()
        self.ended = asyncio.Event()
        self.polls = 0
        self.reading = asyncio.Event()
        self.admitted = True

    async def read(self, request: web.Request) -> web.Response:
        if not self.admitted:
            raise web.HTTPUnauthorized(text="no")
        self.reading.set()
        await read_body(request, BODY_LIMIT)
        return web.json_response(body_bytes(request))

    async def poll(self, _request: web.Request) -> web.Response:
        self.polls += 1
        await self.ended.wait()
        return web.json_response("ended")

    async def large(self, _request: web.Request) -> web.Response:
        return web.Response(body=bytes(50_000_000))

    async def post(self, body: bytes = b"{}", **headers: str) -> Any:
        head = HEAD.decode() + "".join(
            f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()
        )
        return await raw_request(self.port, f"{head}Content-Length: {len(body)}", body)


@asynccontextmanager
async def serving(limits: ConnectionLimits = LIMITS):
    server = Server()
    app = web.Application(middlewares=[problem_middleware])
    app.add_routes(
        admitted_first(
            [web.post("/", server.read), web.get("/poll", server.poll), web.get("/large", server.large)]
        )
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        async with listen(runner, "127.0.0.1", 0, limits=limits, counts=server.counts) as server.port:
            yield server
    finally:
        await runner.cleanup()


async def opened(port: int, *sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in sent:
        writer.write(part)
    return reader, writer


async def drip(port: int, sent: bytes, dripped: bytes) -> bytes:
    """Sends a part at once and then one byte after another; returns all that the server answers."""
    reader, writer = await opened(port, sent)
    answer = asyncio.ensure_future(reader.read())
    try:
        for byte in dripped * 1_000:
            await asyncio.wait({answer}, timeout=0.2)
            if answer.done():
                break
            writer.write(bytes([byte]))
        return await answer
    except ConnectionError:
        return b""
    finally:
        answer.cancel()
        writer.close()


SLOW = {
    "nothing": (b"", b""),
    "half a head": (b"GET / HT", b""),
    "a head in drops": (b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
    "a second head in drops": (HEAD + b"Content-Length: 2\r\n\r\n{}", b"GET /"),
    "no body": (HEAD + b"Content-Length: 100000\r\n\r\n", b""),
    "a body in drops": (HEAD + b"Content-Length: 100000\r\n\r\n", b"{"),
    "chunks in drops": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
    "a body that nobody reads": (GET[:-2] + b"Content-Length: 100000\r\n\r\n", b"{"),
    "nothing after an answer": (HEAD + b"Content-Length: 2\r\n\r\n{}", b""),
}


@pytest.mark.parametrize("kind", SLOW)
async def test_a_slow_client_loses_its_connection(kind):
    """O5: also when it sends a byte now and then. An answer names the part that came too late."""
    async with serving() as server:
        answer = await in_time(drip(server.port, *SLOW[kind]))
        await wait_until(lambda: server.counts.open == 0)
    if kind == "nothing after an answer":
        reason = "idle"
    else:
        reason = "body" if "body" in kind or "chunks" in kind else "head"
    # The drops of a second head are no HTTP, which the parser may notice first.
    assert server.counts.ended == {reason: 1} or "second" in kind
    if SLOW[kind][1] and not answer:
        # A byte that is on its way when the server closes resets the connection, with the answer.
        return
    if "body" in kind or "chunks" in kind or kind.startswith(("half", "a head")):
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"application/problem+json" in answer
    assert answer.count(b" 200 OK") == ("answer" in kind or "second" in kind)


async def test_an_endless_extension_of_a_chunk_is_no_body():
    """O5: bytes that belong to no body do not extend its time, however many there are."""
    async with serving() as server:
        reader, writer = await opened(server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;")
        answer = asyncio.ensure_future(reader.read())

        async def is_ended() -> bool:
            writer.write(b"x" * 1_000)
            return answer.done()

        await wait_until(is_ended)
        await asyncio.gather(answer, return_exceptions=True)
        assert server.counts.ended == {"body": 1}
        writer.close()


@asynccontextmanager
async def receiving_large(server: Server):
    """A client that has the first bytes of a large answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.settimeout(0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, GET.replace(b"/poll", b"/large"))
        await in_time(loop.sock_recv(client, 12))
        yield client


async def test_a_client_that_takes_no_answer_loses_its_connection():
    """O5: the answer does not stay in memory for a client that reads nothing of it."""
    async with serving() as server, receiving_large(server) as client:

        async def is_ended() -> bool:
            try:
                await asyncio.get_running_loop().sock_sendall(client, b"x")
            except ConnectionError:
                return True
            return False

        await wait_until(is_ended)
        assert server.counts.ended == {"write": 1}


async def test_a_client_that_takes_its_answer_too_slowly_loses_its_connection():
    """O5: also when it takes a part now and then."""
    async with serving(replace(LIMITS, rate=1_000_000_000)) as server, receiving_large(server) as client:

        async def is_ended() -> bool:
            await asyncio.get_running_loop().sock_recv(client, 100_000)
            return bool(server.counts.ended)

        await wait_until(is_ended)
        assert server.counts.ended == {"write": 1}


async def test_a_client_that_takes_no_answer_gives_way():
    """O5: at the bound another client has its place, long before its time is over."""
    limits = replace(LIMITS, by_address=2, head_s=600, idle_s=600, write_s=600)
    async with serving(limits) as server, receiving_large(server), receiving_large(server):

        async def is_served() -> bool:
            return (await server.post()).status == 200

        await wait_until(is_served)
        assert server.counts.ended == {"bound": 1}


async def test_a_steady_body_and_a_long_poll_are_served(caplog):
    """T6: a body may take longer than the limit if it comes at the rate, and a client whose request
    is read waits as long as the handler takes."""
    async with serving(replace(LIMITS, rate=1_000)) as server:
        poll_reader, poll_writer = await opened(server.port, GET)
        reader, writer = await opened(server.port, HEAD + b"Content-Length: 40000\r\n\r\n")
        for _ in range(40):
            writer.write(bytes(1_000))
            await asyncio.wait({asyncio.ensure_future(server.ended.wait())}, timeout=0.05)
        assert (await in_time(read_answer(reader))).json == 40_000
        server.ended.set()
        assert (await in_time(read_answer(poll_reader))).json == "ended"
        writer.close()
        poll_writer.close()
    assert "failed" not in caplog.text


@pytest.mark.parametrize("bound", [2_000, 60])
async def test_clients_are_served_beside_a_thousand_slow_ones(bound):
    """O5: 1,050 slow connections of every kind, fewer and more than the bound. Each request of
    another client is answered meanwhile, and a long poll lasts. All slow ones are closed."""
    limits = replace(LIMITS, connections=bound, by_address=bound, head_s=3, body_s=3, idle_s=3)
    kinds = [sent for name, sent in SLOW.items() if name != "a body that nobody reads"]
    async with serving(limits) as server:
        poll_reader, poll_writer = await opened(server.port, GET)
        await wait_until(lambda: asyncio.sleep(0, server.polls == 1))
        slow = []
        for n in range(1_050):
            slow.append(asyncio.ensure_future(drip(server.port, *kinds[n % len(kinds)])))
            if n % 20 == 0:
                assert (await server.post()).status == 200
        ended = asyncio.gather(*slow)
        while not ended.done():
            assert (await server.post()).status == 200
            await asyncio.wait({ended}, timeout=0.05)
        server.ended.set()
        assert (await in_time(read_answer(poll_reader))).json == "ended"
        poll_writer.close()


async def test_beyond_the_bound_of_an_address_waiting_requests_keep_their_place():
    """O5: a new connection takes the place of one that waits for its request, and is refused when
    all wait for answers. The place is free again after an answer."""
    async with serving(replace(LIMITS, by_address=3, idle_s=60, head_s=60)) as server:
        idle_reader, idle_writer = await opened(server.port)
        polls = [await opened(server.port, GET) for _ in range(2)]
        await wait_until(lambda: asyncio.sleep(0, server.polls == 2))
        polls.append(await opened(server.port, GET))
        await wait_until(lambda: asyncio.sleep(0, server.polls == 3))
        assert await in_time(idle_reader.read()) == b""
        reader, writer = await opened(server.port)
        refused = await in_time(read_answer(reader))
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["detail"] == "This address has 3 requests under way"
        assert server.counts == ConnectionCounts(3, {"address": 1}, {"bound": 1})
        server.ended.set()
        for poll_reader, poll_writer in polls:
            assert (await in_time(read_answer(poll_reader))).status == 200
            poll_writer.close()
        assert (await server.post()).status == 200
        writer.close()
        idle_writer.close()


async def test_beyond_the_bound_of_all_a_connection_is_refused():
    """O5: with 503, so that a balancer tries another server."""
    async with serving(replace(LIMITS, connections=1)) as server:
        _, writer = await opened(server.port, GET)
        await wait_until(lambda: asyncio.sleep(0, server.polls == 1))
        reader, refused = await opened(server.port)
        assert (await in_time(read_answer(reader))).status == 503
        assert server.counts == ConnectionCounts(1, {"all": 1}, {})
        writer.close()
        refused.close()


async def test_the_largest_body_gives_way():
    """O5: the bytes of bodies in memory are bounded, also those of compressed ones, and a small
    body is read beside large ones."""
    limits = replace(LIMITS, body_bytes=1_500_000, body_s=60, head_s=60)
    zeros = gzip.compress(bytes(999_000))
    async with serving(limits) as server:
        first, first_writer = await opened(
            server.port, HEAD + b"Content-Length: 900001\r\n\r\n", bytes(900_000)
        )
        await in_time(server.reading.wait())
        assert (await server.post()).status == 200
        second = await server.post(zeros, Content_Encoding="gzip")
        ended = await in_time(first.read())
        assert (second.status == 200) == ended.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert second.status in (200, 429)
        # One that is read itself is answered by its handler.
        assert server.counts.ended["bodies"] == (second.status == 200)
        # The bytes are free again.
        first_writer.close()
        assert (await server.post(zeros, Content_Encoding="gzip")).status == 200


async def test_a_body_is_asked_for_after_it_is_admitted():
    """O5: a client that expects `100 Continue` sends no body in vain, and a body that declares too
    many bytes is refused before it is read."""
    async with serving() as server:
        expecting = HEAD.decode() + "Expect: 100-continue\r\nContent-Length: "
        reader, writer = await opened(server.port, f"{expecting}2\r\n\r\n".encode())
        assert await in_time(reader.readuntil(b"\r\n\r\n")) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await in_time(read_answer(reader))).json == 2
        writer.close()
        assert (await raw_request(server.port, f"{expecting}{BODY_LIMIT + 1}")).status == 413
        assert (
            await raw_request(server.port, HEAD.decode() + f"Content-Length: {BODY_LIMIT + 1}")
        ).status == 413
        assert (
            await raw_request(server.port, HEAD.decode() + "Expect: a miracle\r\nContent-Length: 2")
        ).status == 417
        server.admitted = False
        assert (await raw_request(server.port, f"{expecting}2")).status == 401


async def test_a_client_that_leaves_within_its_body_is_no_failure(caplog):
    """O4: the log has no error for it."""
    async with serving() as server:
        _, writer = await opened(server.port, HEAD + b"Content-Length: 100\r\n\r\n{")
        await in_time(server.reading.wait())
        writer.transport.abort()
        assert (await server.post()).status == 200
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
