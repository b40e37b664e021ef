"""Settings of the stage processor."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kafka.processor import ProcessorSettings
from penstock.settings import Metered, Platform, option


@dataclass(frozen=True, kw_only=True)
class StagesSettings(ProcessorSettings, Platform, Metered):
    """The settings of stages only; the base classes have the shared ones."""

    commit_batch: int = option(1_000, "Maximum number of results that one statement commits.")
    sweep_every_s: float = option(
        15.0, "Seconds between sweeps for events that their writer has not published."
    )
    sweep_age_s: float = option(10.0, "Seconds after which the sweeper publishes an unpublished event.")

    def validate(self) -> list[str]:
        """The sweeper must not publish events whose transaction has just committed."""
        problems = super().validate()
        if self.commit_batch < 1:
            problems.append(f"commit_batch={self.commit_batch} must be at least 1")
        if self.sweep_age_s < 1 or self.sweep_every_s <= 0:
            problems.append(
                f"sweep_age_s={self.sweep_age_s} must be at least 1 and sweep_every_s={self.sweep_every_s} above 0"
            )
        return problems
