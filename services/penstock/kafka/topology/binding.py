"""Binds the prefix of topics and groups to one database.

Two deployments with one prefix would join each other's groups, and each would drop the results of
the other. So each service compares, before it joins a group. When in doubt it does not start: only
a topic that is missing is accepted with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.deployment import Binding, bound_to
from penstock.errors import CannotStart, InvalidRecord
from penstock.kafka.client.connection import admin_client, make_producer, running, translated
from penstock.kafka.client.records import records_of
from penstock.kafka.topology.topics import DEPLOYMENT
from penstock.settings import Kafka

log = logging.getLogger(__name__)


async def database_of(settings: Kafka) -> str | None:
    """The id of the database that the prefix belongs to; None when it belongs to none.

    Raises:
        KafkaUnavailable: no broker answered.
        KafkaRefused: this user may not read the topic.
    """
    topic = settings.prefix + DEPLOYMENT.name
    bindings = []
    async for record in records_of(settings, topic, 1):
        try:
            bindings.append(Binding.decode(record.value or b""))
        except InvalidRecord as error:
            log.warning(
                "A record of the binding cannot be read",
                extra={"event": "binding_invalid", "topic": topic, "offset": record.offset, "error": error},
            )
    return bound_to(bindings)


async def bind(settings: Kafka, database: str, *, replace: bool = False) -> str | None:
    """Binds the prefix to a database, unless it belongs to one; returns the one it belongs to now.

    Args:
        settings: where, and the prefix.
        database: its id.
        replace: bind it also when it belongs to another database.

    Returns:
        The database's id; None when the topic does not exist.

    Raises:
        KafkaUnavailable: no broker answered.
        KafkaRefused: this user may not read or write the topic.
    """
    topic = settings.prefix + DEPLOYMENT.name
    async with admin_client(settings) as client:
        if topic not in await client.list_topics():
            return None
    found = await database_of(settings)
    if found == database or (found is not None and not replace):
        return found
    async with running(make_producer(settings)) as producer:
        with translated():
            await producer.send_and_wait(topic, Binding(database, replaces=replace).encode(), partition=0)
    # Another deployment may have been first.
    return await database_of(settings)


async def ensure_bound(settings: Kafka, read_database: Callable[[], Awaitable[str]]) -> None:
    """Returns once the prefix belongs to this process's database; waits for Kafka and PostgreSQL.

    Args:
        settings: where, and the prefix.
        read_database: reads the database's id.

    Raises:
        CannotStart: the prefix belongs to another database.
        KafkaRefused: this user may not read or write the topic.
    """

    async def compare() -> tuple[str, str | None]:
        database = await read_database()
        return database, await bind(settings, database)

    database, found = await retry_until_available(compare, waiting_for="binding of the prefix")
    if found is None:
        log.warning(
            "The prefix is not protected from a second database: run `penstock topics`, which creates the missing topic",
            extra={"event": "prefix_unbound", "topic": settings.prefix + DEPLOYMENT.name},
        )
    elif found != database:
        raise CannotStart(mismatch(settings, database, found))


def mismatch(settings: Kafka, database: str, found: str) -> str:
    """Why a process cannot use the prefix, and what to do."""
    return (
        f"the prefix {settings.prefix!r} on Kafka at {settings.kafka} belongs to another database ({found}) than this one "
        f"({database}): use another prefix (PENSTOCK_PREFIX) or the other database (PENSTOCK_POSTGRES). If this database "
        "takes the place of the other one for good, run `penstock topics bind --replace`"
    )
