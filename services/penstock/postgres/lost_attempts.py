"""The attempts of lost workers: how they ended, and the states of their tasks now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from penstock.core.attempt import AttemptId
from penstock.postgres.queries import fetch


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt whose worker was lost.

    Attributes:
        type_name: of the task.
        outcome: of the attempt; None until it has ended.
        state: of the task now.
    """

    type_name: str
    outcome: str | None
    state: str


async def get(
    pool: asyncpg.Pool[asyncpg.Record], attempt_ids: Sequence[AttemptId]
) -> dict[AttemptId, LostAttempt]:
    """The attempts whose tasks exist, from the live tables or history.

    Raises:
        PostgresUnavailable: no server.
    """
    if not attempt_ids:
        return {}
    rows = await fetch(
        pool,
        "lost_attempts.get",
        [attempt_id.task_id for attempt_id in attempt_ids],
        [attempt_id.step for attempt_id in attempt_ids],
        [attempt_id.attempt for attempt_id in attempt_ids],
    )
    return {
        AttemptId(row["id"], row["step"], row["attempt"]): LostAttempt(
            row["type"], row["outcome"], row["state"]
        )
        for row in rows
    }
