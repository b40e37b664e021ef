"""Settings of task-sync."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.settings import Metered, Platform, Progressing, option


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
        if self.recheck_s <= 0 or self.sweep_s <= 0:
            problems.append(f"recheck_s={self.recheck_s} and sweep_s={self.sweep_s} must be above 0")
        return problems
