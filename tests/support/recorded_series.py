"""Records the series of real processes as Prometheus would store them, for tests of alerts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from penstock import metrics

# Seconds of a recorded step in promtool. Steps are recorded faster than that.
STEP_S = 15
# As promtool writes a series that has vanished from a scrape, and no sample.
_STALE, _NONE = "stale", "_"

Series = tuple[str, tuple[tuple[str, str], ...]]


class Recorder:
    """Scrapes metrics ports in steps; in promtool the first one is at 0.

    Args:
        ports: of the services, by name.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = dict(ports)
        self._values: dict[Series, list[str]] = {}
        self.steps = 0

    async def step(self) -> None:
        """Scrapes each port once."""
        pages = await asyncio.gather(*(self._scrape(*service) for service in self._ports.items()))
        found = {series: value for page in pages for series, value in page.items()}
        for series in self._values.keys() | found.keys():
            values = self._values.setdefault(series, [_NONE] * self.steps)
            if series in found:
                values.append(repr(found[series]))
            else:
                values.append(_STALE if values and values[-1] not in (_STALE, _NONE) else _NONE)
        self.steps += 1

    def hold(self, steps: int) -> None:
        """Repeats the last step, for an outage that lasts; only waits grow in it, as time does."""
        for (name, _labels), values in self._values.items():
            last = _NONE if values[-1] == _STALE else values[-1]
            grows = name == metrics.WAITING_SECONDS.name and last != _NONE and float(last) > 0
            values.extend(
                repr(float(last) + STEP_S * step) if grows else last for step in range(1, steps + 1)
            )
        self.steps += steps

    def last(self, name: str) -> dict[tuple[tuple[str, str], ...], str]:
        """The last value of each series of a metric, by its labels."""
        return {labels: values[-1] for (found, labels), values in self._values.items() if found == name}

    def input_series(self) -> list[dict[str, Any]]:
        """All series, as `input_series` of a test of promtool."""
        return [
            {
                "series": f"{name}{{{','.join(f'{key}={value!r}'.replace(chr(39), chr(34)) for key, value in labels)}}}",
                "values": " ".join(values),
            }
            for (name, labels), values in sorted(self._values.items())
        ]

    async def _scrape(self, service: str, port: int) -> dict[Series, float]:
        target = (("instance", f"{service}:9100"), ("job", f"penstock-{service}"))
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as session,
                session.get(f"http://127.0.0.1:{port}/metrics") as answer,
            ):
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return {("up", target): 0.0}
        samples = {
            (sample.name, tuple(sorted((*sample.labels.items(), *target)))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }
        return {("up", target): 1.0, **samples}
