"""The connections of a Kafka client: their TCP options, their time limit, and their end.

aiokafka leaves the options at the system's. A part of a client that is cancelled while it connects
leaves its connection open, because the client does not know it yet. A client opens one connection
after the other, and each may take the time of a request: a resolver or a host without an answer
would hold up all others, and the end of the client.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any
from weakref import WeakSet

from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError

from penstock.sockets import end_when_peer_vanishes

# Seconds for which a client that closes waits for connections that it is opening.
CLOSE_S = 1.0
# Seconds for a connection with its handshakes, as for one to PostgreSQL.
CONNECT_S = 10.0


class _Connections:
    """The connections that a client opens, one after the other.

    Args:
        client: before its first request; its own methods go through here from now on.
    """

    def __init__(self, client: AIOKafkaClient) -> None:
        self._client = client
        self._connect, self._close = client._get_conn, client.close  # noqa: SLF001 (the client has no hook)
        client._get_conn, client.close = self._connection_of, self._close_all  # noqa: SLF001 (see above)
        self._bootstrap, client.bootstrap = client.bootstrap, self._find_brokers
        self._known: WeakSet[Any] = WeakSet()
        self._connecting: set[asyncio.Task[Any]] = set()
        # When the client began to close.
        self._closing_s = math.inf
        # A call from another thread may outlive the client, and would leave its connection open.
        self._closed = False
        # The time of one connection must not count for the next.
        self._turn = asyncio.Lock()
        # The limit of the connection that is being opened.
        self._limit: asyncio.Timeout | None = None

    def begin_close(self) -> None:
        """Ends the wait for each connection within `CLOSE_S` seconds.

        Those that wait for their turn end within the same second. They may be many.
        """
        self._closing_s = min(self._closing_s, asyncio.get_running_loop().time())
        until_s = self._closing_s + CLOSE_S
        if (limit := self._limit) is not None and not limit.expired():
            limit.reschedule(min(limit.when() or until_s, until_s))

    async def _find_brokers(self) -> None:
        """Finds the brokers of the cluster.

        A broker that has just started, or has refused the token, names none, and the client takes
        that for an empty cluster. Once this connection is lost, it would never find a broker again.

        Raises:
            KafkaConnectionError: no server answers, or none names a broker.
        """
        await self._bootstrap()
        if not self._client.cluster.brokers():
            raise KafkaConnectionError("the servers name no broker")

    async def _connection_of(
        self, node: int, *, group: ConnectionGroup = ConnectionGroup.DEFAULT, **options: Any
    ) -> Any:
        connection = self._client._conns.get((node, group))  # noqa: SLF001 (as the client does)
        if connection is None or _is_lost(connection):
            # In a task of its own, which ends although its caller is cancelled.
            task = asyncio.ensure_future(self._open(node, group=group, **options))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            task.add_done_callback(_retrieve)
            connection = await asyncio.shield(task)
            if connection is not None and _is_lost(connection):
                return None
        if connection is not None and connection not in self._known:
            self._known.add(connection)
            if (writer := connection._writer) is not None:  # noqa: SLF001 (see above)
                end_when_peer_vanishes(writer.transport)
        return connection

    async def _open(self, node: int, **options: Any) -> Any:
        """The connection; None without one in time or after the end, as the client answers then."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with self._turn:
            if self._closed:
                return None
            until_s = min(loop.time() + CONNECT_S, max(asked_s, self._closing_s) + CLOSE_S)
            try:
                async with asyncio.timeout_at(until_s) as self._limit:
                    return await self._connect(node, **options)
            except TimeoutError:
                # As the client does when a broker does not answer.
                self._client.force_metadata_update()
                return None
            finally:
                self._limit = None

    async def _close_all(self) -> None:
        self._closed = True
        synchronizer = self._client._sync_task  # noqa: SLF001 (see above)
        if synchronizer is not None and synchronizer.done():
            # The client would raise the error of a synchronizer that has failed, and close nothing.
            _retrieve(synchronizer)
            self._client._sync_task = None  # noqa: SLF001 (see above)
        await self._close()
        if self._connecting:
            _done, pending = await asyncio.wait(set(self._connecting), timeout=CLOSE_S)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            # Those that were opened meanwhile.
            await self._close()


def _is_lost(connection: Any) -> bool:
    """Whether a connection has ended; closes one whose end the client does not know yet.

    The client learns of it in the next turn of the loop. Until then, uvloop raises `RuntimeError`
    when it writes. That ends the client's own tasks: without the one that updates metadata, all
    who wait for an update wait without an end, and so does a stop.
    """
    writer = connection._writer  # noqa: SLF001 (the client has no hook)
    if writer is not None and writer.transport.is_closing():
        connection.close(reason=CloseReason.CONNECTION_BROKEN)
    return not connection.connected()


def begin_close(client: AIOKafkaClient | None) -> None:
    """Lets a client that is about to be closed wait for no connection any longer.

    A consumer leaves its group first, for which it may need one.
    """
    connections: _Connections | None = getattr(client, "connections", None)
    if connections is not None:
        connections.begin_close()


def guard_connections(client: AIOKafkaClient) -> None:
    """Ends each connection whose broker has vanished, and all when the client closes.

    A connection that has lost packets repeats them later and later, up to two minutes apart. A new
    one works as soon as the network does.

    Args:
        client: of a producer, consumer or admin client, before its first request.
    """
    if getattr(client, "connections", None) is None:
        client.connections = _Connections(client)


def _retrieve(task: asyncio.Task[Any]) -> None:
    # Otherwise asyncio logs an exception that was never retrieved.
    if not task.cancelled():
        task.exception()
