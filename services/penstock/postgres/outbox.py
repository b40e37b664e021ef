"""The outbox: what was owed with a transition and is not known to be on Kafka yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.postgres.connection import translated
from penstock.postgres.queries import query


@dataclass(frozen=True, slots=True)
class OwedEvents:
    """One row of the outbox: a batch of event records."""

    id: int
    keys: list[bytes]
    records: list[bytes]


async def paid(executor: Any, ids: Sequence[int]) -> None:
    """Removes rows whose events are on Kafka.

    Raises:
        PostgresUnavailable: they stay and are published again, which their ids make harmless.
    """
    if ids:
        with translated():
            await executor.execute(query("outbox.paid_events"), list(ids))


async def owed(executor: Any, *, age_s: float, limit: int = 100) -> list[OwedEvents]:
    """Rows older than `age_s` seconds, oldest first: their writer has died, or Kafka was away.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await executor.fetch(query("outbox.owed_events"), age_s, limit)
    return [OwedEvents(row["id"], row["keys"], row["records"]) for row in rows]
