"""Connections that outlive the event loop of their test."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme
from tests.support.open_connections import OpenConnections


@pytest.fixture
def plugin(request: pytest.FixtureRequest) -> OpenConnections:
    """The plugin of this run."""
    return next(
        found for found in request.config.pluginmanager.get_plugins() if isinstance(found, OpenConnections)
    )


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """Accepts connections and never reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_connection_that_is_left_open_is_reported_with_its_origin(
    plugin: OpenConnections, silent_server: socket.socket
) -> None:
    """The report names the line that made the connection, and comes once."""

    async def leave_open() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(asyncio.Protocol, *silent_server.getsockname())

    asyncio.run(leave_open())
    [origin] = plugin.take_leaked()
    assert origin.splitlines()[-1].endswith(" in leave_open")
    assert plugin.take_leaked() == []


def test_a_closed_connection_is_not_reported(plugin: OpenConnections, silent_server: socket.socket) -> None:
    """A loop may end before it has closed the socket of a connection that its owner closed."""

    async def close() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, *silent_server.getsockname())
        transport.close()

    asyncio.run(close())
    assert plugin.take_leaked() == []


def test_a_tls_connection_whose_peer_is_silent_is_not_reported(
    plugin: OpenConnections, silent_server: socket.socket
) -> None:
    """The close of a TLS connection takes an answer of the peer, for which `asyncio.run` does not
    wait."""
    authority = trustme.CA()
    server_side, client_side = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        ssl.create_default_context(),
    )
    authority.issue_cert("127.0.0.1").configure_cert(server_side)
    authority.configure_trust(client_side)

    async def close() -> None:
        _reader, writer = await asyncio.open_connection(*silent_server.getsockname(), ssl=client_side)
        writer.close()

    def accept() -> ssl.SSLSocket:
        return server_side.wrap_socket(silent_server.accept()[0], server_side=True)

    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept)
        asyncio.run(close())
        with accepting.result():
            assert plugin.take_leaked() == []
