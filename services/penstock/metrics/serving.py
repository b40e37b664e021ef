"""The metrics server of a service, with the page of prometheus_client."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from penstock.errors import PenstockError
from penstock.metrics import Source
from penstock.metrics.page import Page
from penstock.metrics.server import Probe, serving_page, stand_in_page
from penstock.settings import Metered


def serving(
    settings: Metered, service: str, source: Source, probes: Mapping[str, Probe]
) -> AbstractAsyncContextManager[None]:
    """Runs the metrics server while the block runs, unless the port is 0.

    Args:
        settings: the address to listen on.
        service: name of the service, for the page.
        source: returns the service's samples; called for each scrape.
        probes: the checks behind /readyz, by name.

    Raises:
        CannotStart: the address cannot be listened on.
    """
    return serving_page(settings, Page(service, source), probes)


async def stand_in(settings: Metered, service: str, error: PenstockError) -> None:
    """Runs the metrics server of a service that waits for another server; see `stand_in_page`."""
    await stand_in_page(settings, Page(service, lambda: ()), error)
