"""What the heartbeat processor counts of itself, in plain numbers, read when somebody asks (`penstock.metrics`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock import metrics
from penstock.contracts.heartbeat import Kind
from penstock.core.completion import Outcome
from penstock.metrics import Sample


class Figures:
    """What has happened until now.

    Attributes:
        said: attempts that workers have spoken of, by what they said.
        lost: leases that expired, by type.
        ended: attempts that expired, by the state of their task then.
        suspicions: how often this process first made sure that it hears.
        stood_still_s: seconds for which it stood still.
    """

    def __init__(self) -> None:
        self.said = dict.fromkeys(Kind, 0)
        self.lost: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.suspicions = 0
        self.stood_still_s = 0.0

    def samples(self, *, young: int, written: int) -> Iterator[Sample]:
        """Everything as it is now.

        Args:
            young: leases that are only in memory.
            written: leases that are in PostgreSQL.
        """
        for kind, attempts in self.said.items():
            yield Sample(metrics.HEARTBEATS, attempts, (kind,))
        yield Sample(metrics.LEASES, young, ("memory",))
        yield Sample(metrics.LEASES, written, ("written",))
        for name, leases in self.lost.items():
            yield Sample(metrics.LEASES_LOST, leases, (name,))
        for state, attempts in self.ended.items():
            yield Sample(metrics.ENDED, attempts, (Outcome.EXPIRED, state))
        yield Sample(metrics.LEASE_SUSPICIONS, self.suspicions)
        yield Sample(metrics.STOOD_STILL, self.stood_still_s)
