"""The connections of a worker to its gateway: opened anew after consecutive failures."""

import asyncio
import socket
from contextlib import asynccontextmanager

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
