"""The name of the database, to which the prefix on Kafka is bound."""

from __future__ import annotations

from typing import Any

from penstock.postgres.connection import close, connect
from penstock.postgres.queries import fetchval


async def deployment_id(executor: Any) -> str:
    """The id that the migrations gave to this database; a restored copy has the same.

    Raises:
        PostgresUnavailable: no server.
    """
    found: str = await fetchval(executor, "deployment.id")
    return found


async def read_deployment_id(dsn: str) -> str:
    """The same over a connection of its own.

    Raises:
        PostgresUnavailable: no server.
    """
    connection = await connect(dsn, "deployment")
    try:
        return await deployment_id(connection)
    finally:
        await close(connection)
