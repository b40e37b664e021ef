"""Settings of the heartbeat processor."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kafka.processor import ProcessorSettings
from penstock.settings import Metered, Platform, option

MOST_TICK_S = 30.0


@dataclass(frozen=True, kw_only=True)
class HeartbeatsSettings(ProcessorSettings, Platform, Metered):
    """See `Platform`, `ProcessorSettings` and `Metered` for what it shares with others."""

    settle_s: float = option(0.5, "Seconds a claim may live in memory only before it is written as running.")
    tick_s: float = option(
        1.0, "Seconds between looks for expired leases: an expiry is late by at most this."
    )

    linger_s: float = option(
        0.1,
        "Seconds claims and beats may wait to be read together: at a low rate one by one costs four times the CPU.",
    )

    recount_s: float = option(
        60.0,
        "Seconds between looks for running tasks that nobody watches (their result never took effect): each gets a lease.",
    )

    def validate(self) -> list[str]:
        """A claim is held back, unacknowledged, while it settles: that must stay far below a stall."""
        problems = super().validate()
        if not 0 < self.settle_s < self.stall_timeout_s / 3:
            problems.append(
                f"settle_s={self.settle_s} must be above 0 and below a third of stall_timeout_s={self.stall_timeout_s}"
            )
        if not 0 <= self.linger_s <= 1:
            problems.append(f"linger_s={self.linger_s} must be from 0 to 1: leases wait for what is not read")
        if not 0 < self.tick_s <= MOST_TICK_S:
            problems.append(
                f"tick_s={self.tick_s} must be above 0 and at most {MOST_TICK_S:g}, a tenth of the lease that types have "
                "by default: an expiry is late by as much"
            )
        if self.recount_s <= 0:
            problems.append(f"recount_s={self.recount_s} must be above 0")
        return problems
