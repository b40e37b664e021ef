"""Settings of ingest."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.settings import Platform, option


@dataclass(frozen=True, kw_only=True)
class IngestSettings(Platform):
    """Settings of services with ingest."""

    ingest_batch: int = option(1_000, "Maximum number of submitted records that one transaction inserts.")

    def validate(self) -> list[str]:
        """A batch has a record."""
        problems = super().validate()
        if self.ingest_batch < 1:
            problems.append(f"ingest_batch={self.ingest_batch} must be at least 1")
        return problems
