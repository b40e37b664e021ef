"""How long tasks took: percentiles of the tasks of a type that ended last.

No index finds the tasks of a type by their end. So a search walks back over the ends of all tasks,
in parts and for a limited time: it costs the same with any number of tasks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg

from penstock.postgres.connection import translated
from penstock.postgres.queries import fetch, fetchrow

# Tasks whose durations are read, and seconds of a search.
MOST_TASKS = 500
WITHIN_S = 0.25
# Tasks of the first part and of others.
_FIRST_PART = 1_000
_PART = 20_000
# After the end and the id of every task.
_LATEST = datetime(9999, 1, 1, tzinfo=UTC), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Durations:
    """The durations of a type.

    Attributes:
        tasks: rows of the tasks that began in one stage, with `stage`, `counted`, `p50_s`, `p95_s`.
        stages: the same of the attempts of one stage.
        since: the end of the oldest task that was examined; None without any.
    """

    tasks: Sequence[asyncpg.Record]
    stages: Sequence[asyncpg.Record]
    since: datetime | None


async def of_type(executor: Any, type_name: str, *, within_s: float = WITHIN_S) -> Durations:
    """The durations of a type, from up to `MOST_TASKS` tasks that are not in history yet.

    Args:
        executor: a pool or a connection.
        type_name: of the tasks.
        within_s: seconds after which no further part is examined.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    until = time.monotonic() + within_s
    found: list[int] = []
    (finished_at, task_id), since, most = _LATEST, None, _FIRST_PART
    with translated():
        while len(found) < MOST_TASKS:
            part = await fetchrow(
                executor,
                "durations.part",
                type=type_name,
                finished_at=finished_at,
                id=task_id,
                most=most,
                limit=MOST_TASKS - len(found),
            )
            if part is None:
                break
            found += part["found"]
            finished_at, task_id = since, _ = part["finished_at"], part["id"]
            if part["examined"] < most or time.monotonic() >= until:
                break
            most = _PART
        rows = await fetch(executor, "durations.of_tasks", found)
    return Durations(
        [row for row in rows if row["of_tasks"]], [row for row in rows if not row["of_tasks"]], since
    )
