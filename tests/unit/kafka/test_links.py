"""The connections of a Kafka client: none outlives the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient

from penstock.kafka.links import guard_connections


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
