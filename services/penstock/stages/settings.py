"""Settings of the stage processor."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kafka.processor import ProcessorSettings
from penstock.settings import Metered, Platform, option


@dataclass(frozen=True, kw_only=True)
class StagesSettings(ProcessorSettings, Platform, Metered):
    """See `Platform`, `ProcessorSettings` and `Metered` for what it shares with others."""

    commit_batch: int = option(1_000, "Most results committed by one statement.")
    sweep_every_s: float = option(15.0, "Seconds between looks for events that a crash left unpublished.")
    sweep_age_s: float = option(10.0, "Events older than this many seconds are taken for left unpublished.")

    def validate(self) -> list[str]:
        """What is only just written must not be swept."""
        problems = super().validate()
        if self.commit_batch < 1:
            problems.append(f"commit_batch={self.commit_batch} must be at least 1")
        if self.sweep_age_s < 1 or self.sweep_every_s <= 0:
            problems.append(
                f"sweep_age_s={self.sweep_age_s} must be at least 1 and sweep_every_s={self.sweep_every_s} above 0"
            )
        return problems
