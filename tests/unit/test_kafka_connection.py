"""What is left of a Kafka client that did not start: nothing."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import KafkaUnavailable
from penstock.kafka import connection
from penstock.kafka.connection import admin_client, make_consumer, make_producer, running
from penstock.settings import Kafka


@pytest.fixture
def nobody() -> Iterator[Kafka]:
    """Settings that lead to a port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield Kafka(kafka=f"127.0.0.1:{unused.getsockname()[1]}")


CLIENTS = {
    "producer": lambda settings: running(make_producer(settings)),
    "consumer": lambda settings: running(make_consumer(settings, None)),
    "admin": admin_client,
}


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_client_that_fails_to_start_is_closed(kind: str, nobody: Kafka) -> None:
    """O8: `penstock check` without a broker says one thing, not also that a consumer was left unclosed."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    with pytest.raises(KafkaUnavailable):
        async with CLIENTS[kind](nobody):
            pass
    gc.collect()
    assert told == []


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_client_whose_start_is_cancelled_is_closed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that accepts and says nothing: whoever stops meanwhile leaves no connection behind."""
    monkeypatch.setattr(connection, "_LET_GO_S", 0.1)
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    connected, ended = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        while await reader.read(1024):
            pass
        writer.close()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    settings = Kafka(kafka=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def use() -> None:
        async with CLIENTS[kind](settings):
            pass

    task = asyncio.create_task(use())
    await asyncio.wait_for(connected.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 10)
    gc.collect()
    assert told == []
    server.close()
    await server.wait_closed()
