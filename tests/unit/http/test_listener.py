"""Connections of HTTP whose other end vanishes."""

import asyncio
import socket

import pytest
from aiohttp import web

from penstock.http.listener import listen
from penstock.sockets import PROBE_AFTER_S, VANISHED_S
from penstock.worker.gateway_client import _make_session

OPTIONS = {
    "TCP_USER_TIMEOUT": VANISHED_S * 1000,
    "TCP_KEEPIDLE": PROBE_AFTER_S,
}


def options_of(transport):
    found = transport.get_extra_info("socket")
    return {name: found.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in OPTIONS}


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has these options")
async def test_both_ends_notice_that_the_other_has_vanished():
    """S7: the connection of a worker and its gateway ends seconds after one of them has vanished:
    no worker waits for the answer, and no long poll claims tasks for a worker that is gone."""

    compared = asyncio.Event()
    server_side = {}

    async def answer(request):
        server_side.update(options_of(request.transport))
        response = web.StreamResponse()
        await response.prepare(request)
        # The client would give back the connection with the end of the answer.
        await compared.wait()
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    async with (
        listen(runner, "127.0.0.1", 0) as port,
        _make_session() as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        assert options_of(response.connection.transport) == server_side == OPTIONS
        compared.set()
        await response.read()
    await runner.cleanup()
