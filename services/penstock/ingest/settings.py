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
        return super().validate() + self._bound_problems({"ingest_batch": 1})
