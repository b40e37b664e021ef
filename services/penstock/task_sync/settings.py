"""Settings of task-sync."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ingest import IngestSettings
from penstock.settings import Metered, Progressing, Reporting, option

# A hundred years, so that dates stay within the calendars of Python and PostgreSQL.
_MOST_DAYS = 36_500

_ABOVE_0 = (
    "window_s",
    "own_retry_s",
    "lag_poll_s",
    "history_rate",
    "history_every_s",
    "recheck_s",
    "sweep_s",
)


@dataclass(frozen=True, kw_only=True)
class TaskSyncSettings(IngestSettings, Progressing, Metered, Reporting):
    """Settings of task-sync; the base classes have the shared ones."""

    window: int = option(
        5_000, "Maximum number of unclaimed records on one ready topic; all other tasks wait in PostgreSQL."
    )
    window_floor: int = option(
        100, "Minimum window of a ready topic in records, for slow workers; `PENSTOCK_WINDOW` caps it."
    )
    window_s: float = option(
        1.0, "Window of a ready topic in seconds of its workers' throughput, between floor and ceiling."
    )
    release_batch: int = option(1_000, "Maximum number of tasks that one statement releases.")
    own_retry_s: float = option(2.0, "Seconds between attempts to own types that another replica owns.")
    lag_poll_s: float = option(
        0.05, "Seconds between polls of the workers' lag while a window is more than half full."
    )
    sweep_s: float = option(
        30.0, "Seconds between sweeps for ready or due tasks and new types whose notification was lost."
    )
    recheck_s: float = option(
        60.0, "Seconds between checks for queued tasks whose record is lost; these tasks are released again."
    )

    history_keep_days: float = option(
        7.0,
        "Days after its end until a task moves to history, which also frees its idempotency key.",
    )
    history_retain_days: float = option(
        90.0, "Days that history is kept; then one day at a time is archived and dropped. 0 keeps it forever."
    )
    history_archive: bool = option(
        default=True, doc="Whether history is written to the object store before it is dropped."
    )
    history_rate: float = option(
        5_000.0, "Maximum number of tasks per second that are moved to history or archived."
    )
    history_every_s: float = option(
        60.0, "Seconds between checks for tasks to move and history to archive or drop."
    )

    def validate(self) -> list[str]:
        """A batch must not be larger than the window."""
        problems = super().validate() + self._bound_problems({"window_floor": 1}, _ABOVE_0)
        if not 0 < self.release_batch <= self.window:
            problems.append(f"release_batch={self.release_batch} must be from 1 to window={self.window}")
        if self.history_keep_days < 0 or 0 != self.history_retain_days < self.history_keep_days:
            problems.append(
                f"history_keep_days={self.history_keep_days} must be 0 or more, "
                f"history_retain_days={self.history_retain_days} at least as many, or 0 to keep it forever"
            )
        if max(self.history_keep_days, self.history_retain_days) > _MOST_DAYS:
            problems.append(
                f"history_keep_days={self.history_keep_days} and history_retain_days={self.history_retain_days} "
                f"must be at most {_MOST_DAYS:,}"
            )
        return problems
