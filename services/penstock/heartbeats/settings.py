"""Settings of the heartbeat processor."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kafka.processing.processor import ProcessorSettings
from penstock.settings import Metered, Platform, Reporting, option

MAX_TICK_S = 30.0


@dataclass(frozen=True, kw_only=True)
class HeartbeatsSettings(ProcessorSettings, Platform, Metered, Reporting):
    """The settings of heartbeats only; the base classes have the shared ones."""

    settle_s: float = option(
        0.5, "Seconds that a claim stays in memory before its task is written as running."
    )
    tick_s: float = option(
        1.0, "Seconds between checks for expired leases; an expiry is late by at most this."
    )

    linger_s: float = option(
        0.1,
        "Seconds between two reads of claims and beats, so that more are read at once, which saves CPU.",
    )

    recount_s: float = option(
        60.0,
        "Seconds between checks for running tasks without a watched lease; each of them gets a new lease.",
    )

    def validate(self) -> list[str]:
        """A claim stays unacknowledged for settle_s, which must be far below the stall timeout."""
        problems = super().validate()
        if not 0 < self.settle_s < self.stall_timeout_s / 3:
            problems.append(
                f"settle_s={self.settle_s} must be above 0 and below a third of stall_timeout_s={self.stall_timeout_s}"
            )
        if not 0 <= self.linger_s <= 1:
            problems.append(
                f"linger_s={self.linger_s} must be from 0 to 1: heartbeats are read later by as much"
            )
        if not 0 < self.tick_s <= MAX_TICK_S:
            problems.append(
                f"tick_s={self.tick_s} must be above 0 and at most {MAX_TICK_S:g}, a tenth of the lease that types have "
                "by default: an expiry is late by as much"
            )
        if self.recount_s <= 0:
            problems.append(f"recount_s={self.recount_s} must be above 0")
        return problems
