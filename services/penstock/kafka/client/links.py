"""The connections of a Kafka client: their TCP options, their time limit, and their end.

aiokafka leaves the options at the system's. A part of a client that is cancelled while it connects
leaves its connection open, because the client does not know it yet. A client opens one connection
after the other, and each may take the time of a request: a resolver or a host without an answer
would hold up all others, and the end of the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from aiokafka.client import AIOKafkaClient, ConnectionGroup

from penstock.sockets import end_when_peer_vanishes

# Seconds for which a client that closes waits for connections that it is opening.
CLOSE_S = 1.0
# Seconds for a connection with its handshakes, as for one to PostgreSQL.
CONNECT_S = 10.0


class _Limits:
    """The time limits of the connections that a client is opening."""

    def __init__(self, client: AIOKafkaClient) -> None:
        # The client is a key of `_limits`, which must not keep it alive.
        self._client = ref(client)
        self._closing = False
        # A call from another thread may outlive the client, and would leave its connection open.
        self.closed = False
        self._limits: set[asyncio.Timeout] = set()
        # The client opens one connection after the other: the time of one must not count for the
        # next.
        self._turn = asyncio.Lock()

    async def limited(self, connect: Callable[[], Awaitable[Any]]) -> Any:
        """The connection; None without one in time or after the end, as the client answers then."""
        async with self._turn:
            if self.closed:
                return None
            try:
                async with asyncio.timeout(CLOSE_S if self._closing else CONNECT_S) as limit:
                    self._limits.add(limit)
                    try:
                        return await connect()
                    finally:
                        self._limits.discard(limit)
            except TimeoutError:
                if (client := self._client()) is not None:
                    # As the client does when a broker does not answer.
                    client.force_metadata_update()
                return None

    def shorten(self) -> None:
        """Ends all blocks within `CLOSE_S` seconds from now, or from their beginnings."""
        self._closing = True
        until_s = asyncio.get_running_loop().time() + CLOSE_S
        for limit in self._limits:
            if limit.expired():
                continue
            when_s = limit.when()
            limit.reschedule(until_s if when_s is None else min(when_s, until_s))


_limits: WeakKeyDictionary[AIOKafkaClient, _Limits] = WeakKeyDictionary()


def begin_close(client: AIOKafkaClient | None) -> None:
    """Lets a client that is about to be closed wait for no connection any longer.

    A consumer leaves its group first, for which it may need one.
    """
    if client is not None and (limits := _limits.get(client)):
        limits.shorten()


def guard_connections(client: AIOKafkaClient) -> None:
    """Ends each connection whose broker has vanished, and all when the client closes.

    A connection that has lost packets repeats them later and later, up to two minutes apart. A new
    one works as soon as the network does.

    Args:
        client: of a producer, consumer or admin client, before its first request.
    """
    if client in _limits:
        return
    connect, close = client._get_conn, client.close  # noqa: SLF001 (the client has no hook)
    done: WeakSet[Any] = WeakSet()
    connecting: set[asyncio.Task[Any]] = set()
    limits = _limits[client] = _Limits(client)

    async def open_connection(node: int, **options: Any) -> Any:
        # In a task of its own, which ends although its caller is cancelled.
        task = asyncio.ensure_future(limits.limited(partial(connect, node, **options)))
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
        limits.closed = True
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
