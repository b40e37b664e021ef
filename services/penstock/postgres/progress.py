"""The progress of attempts that run, a row a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from penstock.contracts.progress import Progress
from penstock.core.attempt import AttemptId
from penstock.core.task import IN_FLIGHT
from penstock.postgres.queries import execute, fetch


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a handler.

    Attributes:
        attempt_id: of the attempt.
        worker: id of the worker.
        progress: how far the attempt is.
        at: when the platform received it.
    """

    attempt_id: AttemptId
    worker: str
    progress: Progress
    at: datetime


async def write(executor: Any, reports: Sequence[Report]) -> int:
    """Writes the reports of attempts that are current and that their workers hold.

    Returns the number of rows.

    Raises:
        PostgresUnavailable: nothing was written.
        ValueRefused: PostgreSQL cannot store one of them; nothing was written.
    """
    # In one order everywhere, so that two processes cannot wait for each other.
    ordered = sorted(reports, key=lambda report: report.attempt_id)
    rows = await fetch(
        executor,
        "progress.write",
        id=[report.attempt_id.task_id for report in ordered],
        step=[report.attempt_id.step for report in ordered],
        attempt=[report.attempt_id.attempt for report in ordered],
        worker=[report.worker for report in ordered],
        fraction=[report.progress.fraction for report in ordered],
        message=[report.progress.message for report in ordered],
        reported_at=[report.at for report in ordered],
    )
    return len(rows)


async def sweep(executor: Any) -> None:
    """Removes the progress of attempts that are over.

    Raises:
        PostgresUnavailable: nothing was removed.
    """
    await execute(executor, "progress.sweep")


async def of_tasks(
    executor: Any, ids: Iterable[int], *, most: int | None = None
) -> dict[int, dict[str, Any]]:
    """The documents of the progress of those of the tasks whose current attempt has reported it.

    Args:
        executor: a pool or a connection.
        ids: of the tasks.
        most: most tasks, those with the smallest ids; None is all.

    Returns:
        By task id: `fraction` (0 to 1, or None), `message` and `reported_at`.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    rows = await fetch(executor, "progress.of_tasks", list(ids), most)
    return {
        row["task_id"]: {name: row[name] for name in ("fraction", "message", "reported_at")} for row in rows
    }


async def added_to(executor: Any, rows: Iterable[Mapping[str, Any] | asyncpg.Record]) -> list[dict[str, Any]]:
    """Rows of tasks, each with the document of its progress as `progress`; None without one.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    listed = [dict(row) for row in rows]
    running = [row["id"] for row in listed if row["state"] in IN_FLIGHT]
    found = await of_tasks(executor, running) if running else {}
    return [{**row, "progress": found.get(row["id"])} for row in listed]
