"""Settings of the service `tasklogs`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ingest import IngestSettings
from penstock.settings import Metered, Progressing, Reporting, option

_MOST_DAYS = 36_500


@dataclass(frozen=True, kw_only=True)
class TaskLogsSettings(IngestSettings, Progressing, Metered, Reporting):
    """Settings of `tasklogs`; the base classes have the shared ones."""

    logs_days: float = option(30.0, "Days that task logs are kept.")
    logs_segment_s: float = option(
        30.0,
        "Seconds after which the lines of a partition become an object. More are fewer objects; lines that are not in an object are "
        "read from Kafka.",
    )

    def validate(self) -> list[str]:
        """The topic must keep lines for longer than a segment lasts."""
        problems = super().validate()
        if not 0 < self.logs_days <= _MOST_DAYS:
            problems.append(f"logs_days={self.logs_days} must be above 0 and at most {_MOST_DAYS}")
        if not 0 < self.logs_segment_s <= 3600:
            problems.append(f"logs_segment_s={self.logs_segment_s} must be above 0 and at most 3600")
        return problems
