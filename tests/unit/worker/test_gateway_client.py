"""The connections of a worker to its gateway: opened anew after consecutive failures."""

import asyncio
import socket
from contextlib import asynccontextmanager

import aiohttp
import aiohttp.resolver
import pytest

from penstock.errors import GatewayUnavailable
from penstock.worker.gateway_client import RECONNECT_AFTER, GatewayClient

ANSWER = b'{"tasks": []}'


@asynccontextmanager
async def scripted_gateway(answers):
    """A server that closes a connection without an answer for each False; yields its URL."""

    async def serve(reader, writer):
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and answers.pop(0):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER))
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_consecutive_failures_open_new_connections_and_a_success_clears_them(caplog):
    """H6: two failures, an answer, and two more are no reason; three in a row are. The next request
    works."""
    script = [False, False, True, False, False, True, *[False] * RECONNECT_AFTER, True]
    answers = list(script)
    sessions = []
    async with scripted_gateway(answers) as url, GatewayClient(url) as gateway:
        for succeeds in script:
            sessions.append(gateway._session)
            if succeeds:
                assert (await gateway.post("/hold_task", {"type": "t"}))[0] == {"tasks": []}
            else:
                with pytest.raises(GatewayUnavailable):
                    await gateway.post("/hold_task", {"type": "t"})
    assert answers == []
    assert len(set(sessions[:-1])) == 1
    assert sessions[-1] is not sessions[0]
    assert sessions[0].closed
    events = [vars(record).get("event") for record in caplog.records]
    assert events.count("gateway_reconnected") == 1


async def test_a_gateway_that_does_not_answer_is_named_with_its_variable_and_a_short_reason():
    """O8: the message has the address, the variable and the reason, and no connection key."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with GatewayClient(url) as gateway:
            with pytest.raises(GatewayUnavailable) as refused:
                await gateway.post("/hold_task", {"type": "t"})
    assert str(refused.value).startswith(f"no gateway answers at {url} (PENSTOCK_WORKER_GATEWAY): ")
    assert "ConnectionKey" not in str(refused.value)


@pytest.fixture
def resolving(monkeypatch):
    """No name is resolved; set when one is looked up."""
    began = asyncio.Event()

    async def resolve(*_arguments, **_options):
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(aiohttp.resolver.DefaultResolver, "resolve", resolve)
    return began


async def test_a_request_whose_name_is_resolved_while_another_closes_the_connections_fails(resolving):
    """H6: aiohttp cancels such a request. A part of the worker would end without an error."""
    async with GatewayClient("http://gateway.test") as gateway:
        requests = [asyncio.create_task(gateway.post("/hold_task", {"type": "t"})) for _ in range(2)]
        await resolving.wait()
        session = gateway._session
        for _ in range(RECONNECT_AFTER):
            await gateway._on_failure(session)
        for request in requests:
            with pytest.raises(GatewayUnavailable, match="another request closed the connections"):
                await request


async def test_a_request_is_cancelled_with_its_task(resolving):
    """The stop of a worker is no failure of its gateway."""
    async with GatewayClient("http://gateway.test") as gateway:
        request = asyncio.create_task(gateway.post("/hold_task", {"type": "t"}))
        await resolving.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
