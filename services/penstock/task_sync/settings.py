"""Settings of task-sync."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ingest import IngestSettings
from penstock.settings import Metered, Progressing, option

# A hundred years, so that dates stay within the calendars of Python and PostgreSQL.
_MOST_DAYS = 36_500


@dataclass(frozen=True, kw_only=True)
class TaskSyncSettings(IngestSettings, Progressing, Metered):
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
        problems = super().validate()
        if not 0 < self.release_batch <= self.window:
            problems.append(f"release_batch={self.release_batch} must be from 1 to window={self.window}")
        if self.window_floor < 1 or self.window_s <= 0:
            problems.append(
                f"window_floor={self.window_floor} must be at least 1, window_s={self.window_s} above 0"
            )
        if self.own_retry_s <= 0 or self.lag_poll_s <= 0:
            problems.append(
                f"own_retry_s={self.own_retry_s} and lag_poll_s={self.lag_poll_s} must be above 0"
            )
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
        if self.history_rate <= 0 or self.history_every_s <= 0:
            problems.append(
                f"history_rate={self.history_rate} and history_every_s={self.history_every_s} must be above 0"
            )
        if self.recheck_s <= 0 or self.sweep_s <= 0:
            problems.append(f"recheck_s={self.recheck_s} and sweep_s={self.sweep_s} must be above 0")
        return problems
