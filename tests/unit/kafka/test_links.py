"""The connections of a Kafka client: none outlives the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient

from penstock.kafka.client import links
from penstock.kafka.client.links import begin_close, guard_connections


class Connection:
    """A connection as the client stores it."""

    def __init__(self) -> None:
        self._writer = None
        self.open = True

    def connected(self) -> bool:
        return self.open

    async def close(self, **_options: Any) -> None:
        self.open = False


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_connection_that_is_being_opened_is_closed_with_its_client(
    monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """O8: a client closes while a part of it connects, or was cancelled while it connected."""
    client, connection = AIOKafkaClient(bootstrap_servers="127.0.0.1:9"), Connection()
    begun, may_open = asyncio.Event(), asyncio.Event()

    async def connect(node: int, *, group: Any, **_options: Any) -> Connection:
        begun.set()
        await may_open.wait()
        client._conns[node, group] = connection
        return connection

    monkeypatch.setattr(client, "_get_conn", connect)
    guard_connections(client)
    asking = asyncio.create_task(client._get_conn(1))
    await begun.wait()
    if cancelled:
        asking.cancel()
        await asyncio.wait({asking})
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    may_open.set()
    await closing
    await asyncio.wait({asking})
    assert not connection.open


async def test_a_connection_without_an_answer_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: one connection is opened after the other. So one without an answer holds up the client
    for less than the time of a request, and a client that closes for a second at most."""
    client = AIOKafkaClient(bootstrap_servers="127.0.0.1:9")

    async def connect(_node: int, **_options: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(client, "_get_conn", connect)
    monkeypatch.setattr(client, "force_metadata_update", lambda: None)
    monkeypatch.setattr(links, "CONNECT_S", 0.01)
    monkeypatch.setattr(links, "CLOSE_S", 0.01)
    guard_connections(client)
    assert await client._get_conn(1) is None
    monkeypatch.setattr(links, "CONNECT_S", 1_000.0)
    waiting = asyncio.create_task(client._get_conn(1))
    await asyncio.sleep(0)
    begin_close(client)
    assert await waiting is None
    assert await client._get_conn(1) is None
    await client.close()


async def test_a_broker_without_an_answer_costs_another_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: the client opens the connection to the healthy broker after the other's time limit."""
    client, turn = AIOKafkaClient(bootstrap_servers="127.0.0.1:9"), asyncio.Lock()

    async def connect(node: int, **_options: Any) -> Connection:
        async with turn:  # as the client does
            if node == 1:
                await asyncio.Event().wait()
            return Connection()

    monkeypatch.setattr(client, "_get_conn", connect)
    monkeypatch.setattr(client, "force_metadata_update", lambda: None)
    monkeypatch.setattr(links, "CONNECT_S", 0.01)
    guard_connections(client)
    unresponsive, healthy = await asyncio.gather(client._get_conn(1), client._get_conn(2))
    assert unresponsive is None
    assert healthy is not None
    await client.close()


async def test_a_closed_client_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: a part of the client that is still running gets the answer of a missing broker."""
    client, opened = AIOKafkaClient(bootstrap_servers="127.0.0.1:9"), []

    async def connect(node: int, **_options: Any) -> Connection:
        opened.append(node)
        return Connection()

    monkeypatch.setattr(client, "_get_conn", connect)
    guard_connections(client)
    assert await client._get_conn(1) is not None
    await client.close()
    assert await client._get_conn(2) is None
    assert opened == [1]
