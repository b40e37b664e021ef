"""Reads a metrics port as Prometheus does."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Scraped = dict[tuple[str, ...], float]


async def scrape(port: int) -> Scraped:
    """Returns every sample, by its name and its label values in the order of the label names."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.status == 200
        text = await answer.text()
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
