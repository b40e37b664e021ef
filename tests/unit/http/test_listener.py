"""Connections of HTTP: hosts of requests, and other ends that vanish."""

import asyncio
import socket

import pytest
from aiohttp import web
from tests.support.http_requests import raw_request

from penstock.http import listener
from penstock.http.connection_guard import ConnectionLimits
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


@pytest.fixture
async def served():
    """The paths that reached the application, whose runner the test listens with."""
    reached = []

    async def answer(request):
        reached.append(request.path)
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_route("*", "/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    yield runner, reached
    await runner.cleanup()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: localhost", 200),
        ("POST / HTTP/1.1\r\nHost: 127.0.0.1:80", 200),
        ("GET / HTTP/1.1\r\nHost: tasks.example", 200),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Host: evil.example", 200),
        ("GET http://localhost/ HTTP/1.1\r\nHost: localhost", 200),
        ("GET http://LOCALHOST.:80/ HTTP/1.1\r\nHost: localhost", 200),
        ("GET http://[::1]:80/ HTTP/1.1\r\nHost: [::1]:80", 200),
        ("GET http://[2001:db8::7]/ HTTP/1.1\r\nHost: localhost", 421),
        ("GET http://localhost@evil.example/ HTTP/1.1\r\nHost: localhost", 421),
        ("CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost", 421),
        (
            "GET / HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: localhost\r\nForwarded: host=localhost",
            421,
        ),
        ("GET / HTTP/1.1\r\nHost: evil.example", 421),
        ("POST / HTTP/1.1\r\nHost: evil.example\r\nExpect: 100-continue\r\nContent-Length: 9", 421),
        ("GET /unknown HTTP/1.1\r\nHost: evil.example", 421),
        ("GET / HTTP/1.0\r\nHost: evil.example", 421),
        ("GET http://evil.example/ HTTP/1.1\r\nHost: localhost", 421),
        ("GET http://localhost/ HTTP/1.1\r\nHost: evil.example", 421),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Host: localhost\r\nHost: evil.example", 400),
        ("GET / HTTP/1.1\r\nX: y", 400),
        ("GET / HTTP/1.0\r\nX: y", 400),
        ("GET / HTTP/1.1\r\nHost:", 400),
    ],
)
async def test_only_requests_for_this_server_reach_the_application(served, head, status):
    """O5: a request for another host is answered with a problem before its route is looked up and
    before its body is asked for."""
    runner, reached = served
    async with listen(runner, "127.0.0.1", 0, ("tasks.example",)) as port:
        answer = await raw_request(port, head)
    assert answer.status == status
    assert bool(reached) == (status == 200)
    if status != 200:
        assert answer.headers["content-type"].startswith("application/problem+json")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.json["status"] == status
    if status == 421:
        assert "PENSTOCK_ALLOWED_HOSTS" in answer.json["detail"]


def test_where_fewer_files_may_be_open_one_address_leaves_its_share(monkeypatch):
    """O5: else one client could use each connection that the process may have."""
    monkeypatch.setattr(listener, "_open_files", lambda _connections: 60)
    limits = listener._within_files(ConnectionLimits(connections=120, by_address=110, body_bytes=1))
    assert (limits.connections, limits.by_address) == (60, 55)


async def test_a_server_on_the_network_answers_to_addresses(served):
    """O4: probes and scrapes name the address of a pod, also one that the server does not see."""
    runner, _ = served
    async with listen(runner, "0.0.0.0", 0) as port:
        for host, status in (("10.9.8.7:9100", 200), ("[fd00::7]:9100", 200), ("evil.example", 421)):
            assert (await raw_request(port, f"GET / HTTP/1.1\r\nHost: {host}")).status == status
