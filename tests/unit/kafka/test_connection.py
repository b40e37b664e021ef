"""A Kafka client that does not start leaves no connection and no warning."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.waiting import in_time

from penstock.errors import KafkaUnavailable
from penstock.kafka.client import connection
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running
from penstock.settings import Kafka


@pytest.fixture
def no_broker() -> Iterator[Kafka]:
    """Settings with a port without a listener."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield Kafka(kafka=f"127.0.0.1:{unused.getsockname()[1]}")


CLIENTS = {
    "producer": lambda settings: running(make_producer(settings)),
    "consumer": lambda settings: running(make_consumer(settings, None)),
    "admin": admin_client,
}


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_client_that_fails_to_start_is_closed(kind: str, no_broker: Kafka) -> None:
    """O8: `penstock check` without a broker reports one error, without warnings about unclosed
    consumers."""
    warnings: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: warnings.append(context))
    with pytest.raises(KafkaUnavailable):
        async with CLIENTS[kind](no_broker):
            pass
    gc.collect()
    assert warnings == []


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_client_whose_start_is_cancelled_is_closed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose start is cancelled closes its connection to a broker that does not answer."""
    monkeypatch.setattr(connection, "_ABANDON_S", 0.1)
    warnings: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: warnings.append(context))
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
    await in_time(connected.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await in_time(ended.wait())
    gc.collect()
    assert warnings == []
    server.close()
    await server.wait_closed()


async def test_a_client_that_cancels_itself_while_it_stops_has_stopped(
    no_broker: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O8: aiokafka cancels a fetch and then awaits it. Its reader ends without an error, and the
    connections are closed."""
    consumer, closed = make_consumer(no_broker, None), asyncio.Event()

    async def stop_with_own_cancellation() -> None:
        raise asyncio.CancelledError

    async def close() -> None:
        closed.set()

    monkeypatch.setattr(consumer, "stop", stop_with_own_cancellation)
    monkeypatch.setattr(consumer._client, "close", close)
    await connection.stop(consumer)
    assert closed.is_set()
    stopping = asyncio.create_task(connection.stop(consumer))
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    monkeypatch.undo()
    await consumer.stop()
