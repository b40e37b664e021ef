"""The connections of a Kafka client: none outlives the client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from tests.support.waiting import wait_until

from penstock.errors import KafkaUnavailable
from penstock.kafka.client import links
from penstock.kafka.client.connection import start
from penstock.kafka.client.links import begin_close, guard_connections


class Connection:
    """A connection as the client stores it."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self.open = True

    def connected(self) -> bool:
        return self.open

    def close(self, **_options: Any) -> asyncio.Future[None]:
        self.open = False
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        closed.set_result(None)
        return closed


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


async def test_all_that_wait_for_a_connection_end_with_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """O3: a second for each of them, one after the other, would exceed the time of a stop."""
    client, begun = AIOKafkaClient(bootstrap_servers="127.0.0.1:9"), []

    async def connect(node: int, **_options: Any) -> None:
        begun.append(node)
        await asyncio.Event().wait()

    monkeypatch.setattr(client, "_get_conn", connect)
    monkeypatch.setattr(client, "force_metadata_update", lambda: None)
    guard_connections(client)
    waiting = [asyncio.create_task(client._get_conn(node)) for node in range(50)]
    await wait_until(lambda: begun)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    begin_close(client)
    assert await asyncio.gather(*waiting) == [None] * 50
    # The time is the claim; one second for each would be fifty.
    assert loop.time() - began_s < 25.0
    await client.close()


async def test_a_connection_that_has_just_ended_gets_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: uvloop raises `RuntimeError` for a write to it. That ended the task that updates the
    client's metadata. A stop that waited for an update then waited without an end."""
    client, opened = AIOKafkaClient(bootstrap_servers="127.0.0.1:9"), []
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    _reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])

    async def connect(node: int, *, group: Any, **_options: Any) -> Connection:
        client._conns[node, group] = connection = Connection()
        opened.append(connection)
        return connection

    monkeypatch.setattr(client, "_get_conn", connect)
    guard_connections(client)
    ended = await client._get_conn(1)
    ended._writer = writer
    writer.transport.abort()
    assert await client._get_conn(1) is not ended
    assert not ended.open
    assert len(opened) == 2
    await client.close()
    server.close()
    await server.wait_closed()


async def test_a_client_whose_synchronizer_has_failed_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """O8: its connections are closed, and the error belongs to no one any more."""
    client, connection = AIOKafkaClient(bootstrap_servers="127.0.0.1:9"), Connection()

    async def connect(node: int, *, group: Any, **_options: Any) -> Connection:
        client._conns[node, group] = connection
        return connection

    async def fail() -> None:
        raise RuntimeError("the handler is closed")

    monkeypatch.setattr(client, "_get_conn", connect)
    guard_connections(client)
    await client._get_conn(1)
    client._sync_task = asyncio.ensure_future(fail())
    await asyncio.wait({client._sync_task})
    await client.close()
    assert not connection.open


async def test_a_producer_starts_at_no_broker_that_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: a broker that has just started may name no broker. The producer's start fails, and its
    caller tries again. The client itself would ask for an id without an end."""
    connection = Connection()

    async def answer(_request: object) -> Any:
        return SimpleNamespace(brokers=[], topics=[], API_VERSION=1, controller_id=-1)

    async def connected(*_arguments: Any, **_options: Any) -> Connection:
        return connection

    monkeypatch.setattr(connection, "send", answer, raising=False)
    monkeypatch.setattr("aiokafka.client.create_conn", connected)
    producer = AIOKafkaProducer(bootstrap_servers="127.0.0.1:9", enable_idempotence=True)
    with pytest.raises(KafkaUnavailable, match="no broker answers"):
        await start(producer)
    assert not connection.open
