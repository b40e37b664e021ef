"""Ends callbacks that get no further attempt, without a call: with their results and letters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from penstock.contracts.callback_end import CallbackEnd
from penstock.core.target import TargetId
from penstock.postgres import callback_outbox
from penstock.postgres.callbacks import callback_in
from penstock.postgres.queries import query
from penstock.postgres.repeating import repeated
from penstock.postgres.session import Session


async def bury(session: Session, refused: Mapping[str, str]) -> int:
    """Ends pending callbacks as dead, with their results; takes the reason of each by its id.

    Returns:
        How many were ended.

    Raises:
        SessionLost, PostgresUnavailable: as `callbacks.take_due`.
    """
    if not refused:
        return 0
    errors = [_error("refused", f"Kafka refuses its record: {why}") for why in refused.values()]
    return len(await _end(session, "callbacks.bury", [*refused], errors))


async def end_held(session: Session, *, limit: int, longest_s: float) -> int:
    """Ends the callbacks that have been held for too long as dead, with their results.

    Args:
        session: holds the requeuer's lock.
        limit: most callbacks to end.
        longest_s: seconds that a callback may be held.

    Returns:
        How many were ended.

    Raises:
        SessionLost, PostgresUnavailable: as `callbacks.take_due`.
    """
    error = _error("held", f"its target could not be called for {longest_s:g} s, or was disabled for so long")
    return len(await _end(session, "callbacks.end_held", limit, longest_s, error))


def _error(kind: str, message: str) -> str:
    return orjson.dumps({"kind": kind, "message": message}).decode()


async def _end(session: Session, name: str, *arguments: Any) -> list[str]:
    """Ends callbacks without an attempt, by a statement that returns them; returns their ids."""
    async with session.connection() as connection:

        async def end() -> list[str]:
            async with connection.transaction():
                rows = await connection.fetch(query(name), *arguments)
                ends = [
                    CallbackEnd(
                        callback=callback_in(row, TargetId(row["namespace"], row["target"])),
                        outcome="dead",
                        attempts=row["attempt"],
                        at=row["finished_at"],
                        error=orjson.loads(row["error"]),
                    )
                    for row in rows
                ]
                ids = [row["id"] for row in rows]
                records = (record for end in ends for record in end.records())
                assigned = callback_outbox.assign(records)
                await callback_outbox.enqueue(connection, callback_outbox.rows_of(assigned, ids))
                ordered = [row["id"] for row in rows if row["ordered"]]
                if ordered:
                    await connection.execute(query("callbacks.requeue_next"), ordered)
                return ids

        return await repeated(end)
