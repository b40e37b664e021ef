"""Settings of the stage processor."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kafka.processing.processor import ProcessorSettings
from penstock.settings import Metered, Platform, Reporting, Sweeping, option


@dataclass(frozen=True, kw_only=True)
class StagesSettings(ProcessorSettings, Sweeping, Platform, Metered, Reporting):
    """The settings of stages only; the base classes have the shared ones."""

    commit_batch: int = option(1_000, "Maximum number of results that one statement commits.")

    def validate(self) -> list[str]:
        """A statement must commit at least one result."""
        return super().validate() + self._bound_problems({"commit_batch": 1})
