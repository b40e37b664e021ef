"""Claims that are only in memory, and the records that they came with."""

from __future__ import annotations

import logging
from collections.abc import Container, MutableMapping, Sequence
from dataclasses import dataclass

import asyncpg

from penstock.core.attempt import AttemptId
from penstock.core.leases import Lease
from penstock.errors import ValueRefused
from penstock.kafka.processing.processor import Delivery
from penstock.postgres import leases
from penstock.postgres.halving import in_halves

log = logging.getLogger(__name__)

# Seconds for which a claim waits for a transaction that locks its task, or for the commit of the
# result before it.
WAITS_S = 15.0


@dataclass(slots=True)
class ClaimRecord:
    """An unacknowledged claim record, and how many of its attempts are only in memory."""

    delivery: Delivery
    remaining: int

    def resolve(self) -> None:
        """The lease of one of its attempts has ended or is stored."""
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
        by_heartbeat: whether a heartbeat brought it, not a claim record.
    """

    lease: Lease
    record: ClaimRecord
    since_s: float
    by_heartbeat: bool


async def write_claims(
    pool: asyncpg.Pool[asyncpg.Record], claims: Sequence[Claim]
) -> tuple[set[AttemptId], set[AttemptId], set[int]]:
    """Writes claims; returns the attempts that are `running` now, and those that are refused.

    The last set has the ids of tasks that another transaction locks, or whose worker went on before
    its last result is committed; their claims are not written.

    An attempt whose claim PostgreSQL cannot store has no lease; its result still counts.

    Raises:
        PostgresUnavailable: claims may be written or not.
    """
    current: set[AttemptId] = set()
    refused: set[AttemptId] = set()
    locked: set[int] = set()

    async def write(part: Sequence[Claim]) -> tuple[set[AttemptId], set[int]]:
        return await leases.claimed(
            pool, [claim.lease for claim in part], [claim.by_heartbeat for claim in part]
        )

    for part, answer in await in_halves(claims, write):
        if not isinstance(answer, ValueRefused):
            current |= answer[0]
            locked |= answer[1]
            continue
        attempt_id = part[0].lease.attempt_id
        refused.add(attempt_id)
        log.error(
            "A claim has a value that PostgreSQL cannot store; its attempt gets no lease",
            extra={"event": "claim_unstorable", "task": attempt_id.task_id, "error": answer.reason},
        )
    return current, refused, locked


def without_waiting(
    claims: Sequence[Claim], waiting: Container[int], kept: MutableMapping[AttemptId, Claim], now_s: float
) -> list[Claim]:
    """The claims whose tasks do not wait.

    Those that have waited for `WAITS_S` are removed from `kept`: the recount finds an attempt that
    runs.
    """
    for claim in claims:
        attempt_id = claim.lease.attempt_id
        late = attempt_id.task_id in waiting and now_s - claim.since_s > WAITS_S
        if late and kept.get(attempt_id) is claim:
            del kept[attempt_id]
            claim.record.resolve()
    return [claim for claim in claims if claim.lease.attempt_id.task_id not in waiting]
