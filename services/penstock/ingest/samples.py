"""Metrics of ingest (`penstock.metrics`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock import metrics
from penstock.ingest.reader import Ingest
from penstock.metrics import Sample


def ingest_samples(ingests: Sequence[Ingest[Any]], lag: Mapping[str, int]) -> Iterator[Sample]:
    """Samples of the ingest of a process.

    Args:
        ingests: of different topics.
        lag: by topic, records that are not inserted.
    """
    for ingest in ingests:
        yield Sample(metrics.LAG, lag[ingest.topic], (ingest.topic,))
        yield Sample(metrics.REJECTED, ingest.rejected, (ingest.topic,))
    yield Sample(metrics.INGEST_WAITING, sum(ingest.waiting for ingest in ingests))
    yield Sample(metrics.INGEST_PAUSED, sum(ingest.paused for ingest in ingests))
    yield Sample(metrics.INGEST_HELD, sum(ingest.held for ingest in ingests))
    yield Sample(metrics.INGEST_PROCESSED, sum(ingest.inserted for ingest in ingests))
