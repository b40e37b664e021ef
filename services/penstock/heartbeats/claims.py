"""Claims that are only in memory, and the records that they came with."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.leases import Lease
from penstock.kafka.processor import Delivery


@dataclass(slots=True)
class ClaimRecord:
    """An unacknowledged claim record, and how many of its attempts are only in memory."""

    delivery: Delivery
    remaining: int

    def resolve(self) -> None:
        """One of its attempts was released or written."""
        self.remaining -= 1
        if self.remaining == 0:
            self.delivery.settle()


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that is only in memory.

    Attributes:
        lease: of its attempt.
        record: that it came with.
        since_s: when it came.
        beaten: whether it came as a beat.
    """

    lease: Lease
    record: ClaimRecord
    since_s: float
    beaten: bool
