"""Slow clients of a gateway with its own limits."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from tests.support.gateways import Caller
from tests.support.http_requests import read_answer
from tests.support.waiting import in_time

IDLE = 1_000
DRIPPING = 50
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# A dripping client sends the first part at once, and the second one byte by byte.
DRIPS = (
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n"),
    (BODY + b"Content-Length: 100000\r\n\r\n", b" "),
    (BODY + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    (REQUEST, b"GET /"),
)


# Fewer than the kernel queues for the gateway: of those beyond, the client alone believes that they
# are connected, and nothing ever tells it.
connecting = asyncio.Semaphore(50)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with connecting:
        return await asyncio.open_connection("127.0.0.1", port)


async def be_idle(port: int, *, after_a_request: bool) -> None:
    """Waits until the server closes a connection without a request, or after one."""
    reader, writer = await connect(port)
    if after_a_request:
        writer.write(REQUEST)
        assert (await read_answer(reader)).status == 200
    assert await reader.read() == b""
    writer.close()


async def drip(port: int, sent: bytes, dripped: bytes) -> None:
    """Sends a byte now and then until the server closes the connection."""
    reader, writer = await connect(port)
    writer.write(sent)
    closed = asyncio.ensure_future(reader.read())
    for byte in dripped * 1_000:
        await asyncio.wait({closed}, timeout=1)
        if closed.done():
            break
        writer.write(bytes([byte]))
    # A byte that is under way resets the connection.
    await asyncio.gather(closed, return_exceptions=True)
    writer.close()


@pytest.mark.long
async def test_no_slow_client_keeps_its_connection(gateway: Caller) -> None:
    """O5: 1,000 idle connections and 50 that send a byte a second are closed by their deadlines,
    and other clients are served meanwhile."""
    port = urlsplit(gateway.url).port
    assert port is not None
    slow = [be_idle(port, after_a_request=n % 2 == 1) for n in range(IDLE)]
    slow += [drip(port, *DRIPS[n % len(DRIPS)]) for n in range(DRIPPING)]
    ended = asyncio.gather(*slow)
    while not ended.done():
        assert (await in_time(gateway.get("/livez"))).status == 200
        await asyncio.wait({ended}, timeout=0.2)
    await ended
