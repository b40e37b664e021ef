"""Sets the TCP options of a Kafka client's connections, which aiokafka leaves at the system's."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from aiokafka.client import AIOKafkaClient

from penstock.sockets import end_when_peer_vanishes


def end_broken_links(client: AIOKafkaClient) -> None:
    """Ends each connection whose broker has vanished, so that the client opens another one.

    A connection that has lost packets repeats them later and later, up to two minutes apart. A new
    one works as soon as the network does.

    Args:
        client: of a producer, consumer or admin client, before its first request.
    """
    connect = client._get_conn  # noqa: SLF001 (the client has no hook)
    done: WeakSet[Any] = WeakSet()

    async def connection_of(node: int, **options: Any) -> Any:
        connection = await connect(node, **options)
        if connection is not None and connection not in done:
            done.add(connection)
            if (writer := connection._writer) is not None:  # noqa: SLF001 (see above)
                end_when_peer_vanishes(writer.transport)
        return connection

    client._get_conn = connection_of  # noqa: SLF001 (see above)
