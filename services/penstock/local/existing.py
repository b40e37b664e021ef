"""Existing servers, which a deployment uses instead of starting its own."""

from __future__ import annotations

from penstock.errors import CannotStart, KafkaUnavailable, PostgresUnavailable
from penstock.kafka.client.health import wait_kafka
from penstock.settings import Kafka

# Seconds that a cluster may take to answer.
ANSWER_S = 15.0


async def probe(kafka: Kafka | None, postgres: str | None) -> None:
    """Asks the servers that the options name; None is a server that the deployment starts.

    Raises:
        Unavailable: one of them does not answer; the message names its option.
    """
    try:
        if kafka is not None:
            await wait_kafka(kafka, timeout_s=ANSWER_S)
    except KafkaUnavailable as error:
        raise KafkaUnavailable(f"{error}: start that broker, or correct --kafka") from error
    try:
        if postgres is not None:
            await _connect(postgres)
    except PostgresUnavailable as error:
        raise PostgresUnavailable(f"{error}: start that server, or correct --postgres") from error


async def _connect(dsn: str) -> None:
    try:
        from penstock.postgres.connection import close, connect  # noqa: PLC0415 (optional dependency)
    except ImportError as error:
        raise CannotStart(f"packages are missing: pip install 'penstock[services]' ({error})") from error
    connection = await connect(dsn, "up")
    await close(connection)
