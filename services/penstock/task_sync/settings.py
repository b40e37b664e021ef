"""Settings of task-sync."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.settings import Metered, Platform, Progressing, option

# A hundred years: what is later than that, no calendar has.
_MOST_DAYS = 36_500


@dataclass(frozen=True, kw_only=True)
class TaskSyncSettings(Platform, Progressing, Metered):
    """See `Platform`, `Progressing` and `Metered` for what it shares with others."""

    window: int = option(
        5_000, "Most unclaimed records kept on one ready topic; the rest waits in PostgreSQL."
    )
    window_floor: int = option(
        100, "Records kept on one ready topic however slow its workers are, unless `PENSTOCK_WINDOW` is less."
    )
    window_s: float = option(
        1.0, "Between floor and ceiling a ready topic holds what its workers got done in so many seconds."
    )
    release_batch: int = option(1_000, "Most tasks released by one statement.")
    ingest_batch: int = option(1_000, "Most submitted records taken in by one transaction.")
    own_retry_s: float = option(2.0, "Seconds between tries to own types that another replica owns.")
    lag_poll_s: float = option(
        0.05, "Seconds between looks at the workers' lag while a window is over half full."
    )
    sweep_s: float = option(
        30.0, "Seconds between looks for what is ready, due or registered and was not notified, or not heard."
    )
    recheck_s: float = option(
        60.0, "Seconds between proofs that no queued task has lost its record; what has is released again."
    )

    history_keep_days: float = option(
        7.0,
        "Days after its end for which a task stays where it was; then it moves to history, and its idempotency key is free.",
    )
    history_retain_days: float = option(
        90.0, "Days for which history is kept; then a day is archived and dropped. 0 keeps it for ever."
    )
    history_archive: bool = option(
        default=True, doc="Whether a day of history is written to the object store before it is dropped."
    )
    history_rate: float = option(5_000.0, "Most tasks a second that are moved to history, or archived.")
    history_every_s: float = option(60.0, "Seconds between looks for what is to be moved or retired.")

    def validate(self) -> list[str]:
        """A batch larger than the window would overshoot it."""
        problems = super().validate()
        if not 0 < self.release_batch <= self.window:
            problems.append(f"release_batch={self.release_batch} must be from 1 to window={self.window}")
        if self.window_floor < 1 or self.window_s <= 0:
            problems.append(
                f"window_floor={self.window_floor} must be at least 1, window_s={self.window_s} above 0"
            )
        if self.ingest_batch < 1:
            problems.append(f"ingest_batch={self.ingest_batch} must be at least 1")
        if self.own_retry_s <= 0 or self.lag_poll_s <= 0:
            problems.append(
                f"own_retry_s={self.own_retry_s} and lag_poll_s={self.lag_poll_s} must be above 0"
            )
        if self.history_keep_days < 0 or 0 != self.history_retain_days < self.history_keep_days:
            problems.append(
                f"history_keep_days={self.history_keep_days} must be 0 or more, "
                f"history_retain_days={self.history_retain_days} at least as many, or 0 for ever"
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
