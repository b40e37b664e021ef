"""Settings of the service `flows`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ingest import IngestSettings
from penstock.settings import Metered, Progressing, option


@dataclass(frozen=True, kw_only=True)
class FlowsSettings(IngestSettings, Progressing, Metered):
    """Settings of `flows`; the base classes have the shared ones."""

    flow_batch: int = option(
        2_000, "Maximum number of messages of flows, such as ends of tasks, that one transaction applies."
    )
    flow_own_retry_s: float = option(
        2.0, "Seconds between attempts to own shards of flows that another replica owns."
    )
    flow_sweep_s: float = option(
        30.0, "Seconds between sweeps for messages of flows whose notification was lost."
    )

    def validate(self) -> list[str]:
        """Each number must be positive."""
        return super().validate() + self._bound_problems(
            {"flow_batch": 1}, ("flow_own_retry_s", "flow_sweep_s")
        )
