"""The connections of a Kafka client: their TCP options, and their end.

aiokafka leaves the options at the system's. A part of a client that is cancelled while it connects
leaves its connection open, because the client does not know it yet.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakSet

from aiokafka.client import AIOKafkaClient, ConnectionGroup

from penstock.sockets import end_when_peer_vanishes

# Seconds for which a client that closes waits for connections that it is opening.
CLOSE_S = 1.0


def guard_connections(client: AIOKafkaClient) -> None:
    """Ends each connection whose broker has vanished, and all when the client closes.

    A connection that has lost packets repeats them later and later, up to two minutes apart. A new
    one works as soon as the network does.

    Args:
        client: of a producer, consumer or admin client, before its first request.
    """
    connect, close = client._get_conn, client.close  # noqa: SLF001 (the client has no hook)
    done: WeakSet[Any] = WeakSet()
    connecting: set[asyncio.Task[Any]] = set()

    async def open_connection(node: int, **options: Any) -> Any:
        # In a task of its own, which ends although its caller is cancelled.
        task = asyncio.ensure_future(connect(node, **options))
        connecting.add(task)
        task.add_done_callback(connecting.discard)
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def connection_of(
        node: int, *, group: ConnectionGroup = ConnectionGroup.DEFAULT, **options: Any
    ) -> Any:
        connection = client._conns.get((node, group))  # noqa: SLF001 (as the client does)
        if connection is None or not connection.connected():
            connection = await open_connection(node, group=group, **options)
        if connection is not None and connection not in done:
            done.add(connection)
            if (writer := connection._writer) is not None:  # noqa: SLF001 (see above)
                end_when_peer_vanishes(writer.transport)
        return connection

    async def close_all() -> None:
        await close()
        if connecting:
            _done, pending = await asyncio.wait(set(connecting), timeout=CLOSE_S)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            # Those that were opened meanwhile.
            await close()

    client._get_conn, client.close = connection_of, close_all  # noqa: SLF001 (see above)


def _retrieve(task: asyncio.Task[Any]) -> None:
    # Otherwise asyncio logs an exception that was never retrieved.
    if not task.cancelled():
        task.exception()
