"""The outbox of the callbacks service: records of ended callbacks that may not be on Kafka yet."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from penstock.contracts.callback_end import EndRecord
from penstock.errors import RecordsRefused
from penstock.postgres.queries import execute, fetch

log = logging.getLogger(__name__)

# Before all ids.
FIRST = UUID(int=0)
# Bytes of the values in one row, unless one alone is larger.
ROW_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """One row: records of one topic."""

    id: UUID
    topic: str
    keys: list[bytes]
    records: list[bytes]


# A record with the id of its row.
Assigned = tuple[UUID, EndRecord]


def assign(records: Iterable[EndRecord]) -> list[Assigned]:
    """Assigns records to new rows: each has one topic, and about `ROW_BYTES` at most."""
    assigned: list[Assigned] = []
    # By topic: the id of the last row, and the bytes that it has.
    rows: dict[str, tuple[UUID, int]] = {}
    for record in records:
        row_id, size = rows.get(record.topic, (None, 0))
        size += len(record.value)
        if row_id is None or size > ROW_BYTES:
            row_id, size = uuid4(), len(record.value)
        rows[record.topic] = row_id, size
        assigned.append((row_id, record))
    return assigned


def rows_of(assigned: Iterable[Assigned], ended: Collection[str]) -> list[OutboxRow]:
    """The rows with the records of those callbacks that have ended."""
    rows: dict[UUID, OutboxRow] = {}
    for row_id, record in assigned:
        if record.callback_id in ended:
            row = rows.setdefault(row_id, OutboxRow(row_id, record.topic, [], []))
            row.keys.append(record.key)
            row.records.append(record.value)
    return list(rows.values())


async def enqueue(connection: Any, rows: Sequence[OutboxRow]) -> None:
    """Writes rows in the caller's transaction, which ends their callbacks.

    Raises:
        PostgresUnavailable: nothing was written.
    """
    for row in rows:
        await execute(
            connection,
            "callback_outbox.enqueue",
            id=row.id,
            topic=row.topic,
            keys=row.keys,
            records=row.records,
        )


async def unpublished(executor: Any, topic: str, *, age_s: float, limit: int) -> list[OutboxRow]:
    """Rows of a topic that are older than `age_s` seconds, oldest first.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "callback_outbox.unpublished", topic, age_s, limit)
    return [OutboxRow(*row) for row in rows]


async def refused(executor: Any, topic: str, *, behind: UUID, limit: int) -> list[OutboxRow]:
    """Rows of a topic behind an id whose records Kafka has refused, in order of their ids.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "callback_outbox.refused", topic, behind, limit)
    return [OutboxRow(*row) for row in rows]


async def park(executor: Any, row: OutboxRow, error: RecordsRefused) -> None:
    """Keeps those records of a row that Kafka refuses, with its reason; the others are published.

    Raises:
        PostgresUnavailable: the row stays, and all its records are published again.
    """
    positions = sorted(error.records)
    log.error(
        "Kafka refuses results of callbacks; they stay in the outbox and are tried again each minute",
        extra={
            "event": "callback_results_parked",
            "topic": row.topic,
            "records": len(positions),
            "error": str(error),
        },
    )
    await execute(
        executor,
        "callback_outbox.park",
        id=row.id,
        keys=[row.keys[position] for position in positions],
        records=[row.records[position] for position in positions],
        refused=error.records[positions[0]],
    )


async def delete_published(executor: Any, ids: Sequence[UUID]) -> None:
    """Deletes rows whose records are on Kafka.

    Raises:
        PostgresUnavailable: they stay and are published again, which their ids make harmless.
    """
    if ids:
        await execute(executor, "callback_outbox.delete_published", list(ids))
