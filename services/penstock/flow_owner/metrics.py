"""Metrics of the service `flows`: plain numbers, read at each scrape (`penstock.metrics`)."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import metrics
from penstock.metrics import Sample
from penstock.metrics.histogram import Histogram


class Metrics:
    """Counters since the process began.

    Attributes:
        messages: rows of the inbox, and limits, that were applied.
        transactions: seconds that transactions took.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.transactions = Histogram(metrics.FLOW_TRANSACTION_SECONDS)

    def advanced(self, messages: int, took_s: float) -> None:
        """Counts one transaction."""
        if messages:
            self.messages += messages
            self.transactions.observe(took_s)

    def samples(self, *, owned: int, held: int) -> Iterator[Sample]:
        """The samples of the service."""
        yield Sample(metrics.FLOW_MESSAGES, self.messages)
        yield Sample(metrics.FLOW_SHARDS, owned)
        yield Sample(metrics.FLOWS_HELD, held)
        yield self.transactions.sample()
