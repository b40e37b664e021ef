"""Metrics of the heartbeat processor: plain numbers, read at each scrape (`penstock.metrics`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock import metrics
from penstock.contracts.heartbeat import Kind
from penstock.core.completion import Outcome
from penstock.metrics import Sample


class Metrics:
    """Counters since the process began.

    Attributes:
        heartbeats: attempts in heartbeat records, by kind.
        lost: leases that expired, by type.
        ended: attempts that expired, by the resulting state of their task.
        mass_expiry_checks: verifications before a mass expiry.
        stalled_s: seconds in which this process stalled.
    """

    def __init__(self) -> None:
        self.heartbeats = dict.fromkeys(Kind, 0)
        self.lost: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.mass_expiry_checks = 0
        self.stalled_s = 0.0

    def samples(self, *, in_memory: int, written: int, overdue_s: float) -> Iterator[Sample]:
        """The current samples.

        Args:
            in_memory: leases that are only in memory.
            written: leases that are in PostgreSQL.
            overdue_s: seconds for which the longest overdue lease waits for unread records.
        """
        for kind, attempts in self.heartbeats.items():
            yield Sample(metrics.HEARTBEATS, attempts, (kind,))
        yield Sample(metrics.LEASES, in_memory, ("memory",))
        yield Sample(metrics.LEASES, written, ("written",))
        yield Sample(metrics.LEASE_OVERDUE_SECONDS, overdue_s)
        for name, leases in self.lost.items():
            yield Sample(metrics.LEASES_LOST, leases, (name,))
        for state, attempts in self.ended.items():
            yield Sample(metrics.ATTEMPTS_ENDED, attempts, (Outcome.EXPIRED, state))
        yield Sample(metrics.MASS_EXPIRY_CHECKS, self.mass_expiry_checks)
        yield Sample(metrics.STALLED_SECONDS, self.stalled_s)
