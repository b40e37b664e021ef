"""Records claims, outcomes and deferrals of callbacks in PostgreSQL, in bulk.

Guarantees: an attempt is numbered in PostgreSQL before it is made, and each number is given once. A
record is acknowledged when PostgreSQL holds the state of its callbacks. An outcome is recorded in
PostgreSQL first, together with its records for `callbacks.results` and `callbacks.dead`, which
`results` publishes: no state of Kafka causes a second call. While PostgreSQL is unavailable, every
method waits for it.

A record is acknowledged when its attempt is claimed, because PostgreSQL makes the callback due
again after the horizon. Records are acknowledged in order, so waiting for a call that hangs would
block the reading of further records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg

from penstock.callbacks.receiver import InFlight
from penstock.callbacks.router import Deferral
from penstock.callbacks.settings import CallbacksSettings
from penstock.concurrency.retry import retry_until_available
from penstock.contracts.callback_end import CallbackEnd
from penstock.contracts.event import Callback
from penstock.core.target import TargetId
from penstock.postgres import callbacks
from penstock.postgres.callback_outbox import OutboxRow
from penstock.postgres.callbacks import CallbackAttempt, OutcomeRow

# Seconds that a batch of claims waits for more, if the batch before had at least
# `CLAIM_LINGER_FROM`: under low load the wait would only delay the call.
CLAIM_LINGER_S = 0.005
CLAIM_LINGER_FROM = 4
# Outcomes wait longer, because no call waits for them, and longest under load. A crash repeats the
# calls whose outcomes wait, so the time is short.
OUTCOME_LINGER_S = 0.02
OUTCOME_BUSY_FROM = 50
OUTCOME_BUSY_LINGER_S = 0.05


# Not frozen: there is one per call, see `caller.CallResult`.
@dataclass(slots=True)
class EndedAttempt:
    """An attempt that was made.

    Attributes:
        callback: as it was received.
        row: its outcome for PostgreSQL.
        took_s: duration of the call in seconds.
        status: HTTP status of the answer; None without one.
        error: why the call failed; None when it delivered.
        gone: why its target is disabled from now on; None if it is not.
    """

    callback: Callback
    row: OutcomeRow
    took_s: float
    status: int | None
    error: dict[str, Any] | None
    gone: str | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of recording outcomes.

    Attributes:
        enqueued: records of ended callbacks, to be published.
        due_in_s: seconds until the first next attempt is due; None without one.
        gone: targets that were disabled.
    """

    enqueued: list[OutboxRow]
    due_in_s: float | None
    gone: list[TargetId]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The result of claiming attempts.

    Attributes:
        granted: callbacks whose attempt is to be made.
        refused: callbacks whose attempt was made before, is under way, waits for an earlier
            callback, or is not pending any more; PostgreSQL holds their state.
        held_targets: targets for which a callback was held behind an earlier held one.
        requeued: whether a refused callback is due now, because the earlier one has ended.
    """

    granted: list[InFlight]
    refused: list[InFlight]
    held_targets: set[TargetId] = field(default_factory=set)
    requeued: bool = False


class Ledger:
    """Records batches of callbacks.

    Args:
        settings: of the service.
        pool: of the database.
        owner: unique name of this process.

    Attributes:
        held: callbacks held since the start.
    """

    def __init__(self, settings: CallbacksSettings, pool: asyncpg.Pool[asyncpg.Record], owner: str) -> None:
        self._settings = settings
        self._pool = pool
        self._owner = owner
        self.held = 0

    async def claim(self, batch: Sequence[InFlight]) -> Claimed:
        """Records the next attempt of each callback; the caller settles the records."""
        attempts: dict[CallbackAttempt, InFlight] = {}
        for in_flight in batch:
            attempts.setdefault((in_flight.callback.id, in_flight.callback.attempt), in_flight)
        claims = await self._claim(attempts)
        held = {attempts[attempt].callback.target for attempt in claims.held}
        self.held += len(claims.held)
        requeued = bool(claims.behind) and await retry_until_available(
            lambda: callbacks.requeue_unblocked(self._pool, claims.behind),
            waiting_for=_waiting_for(batch, "claim"),
        )
        granted = [in_flight for attempt, in_flight in attempts.items() if attempt in claims.granted]
        for attempt, uncounted in claims.granted.items():
            attempts[attempt].uncounted = uncounted
        granted_ids = set(map(id, granted))
        refused = [in_flight for in_flight in batch if id(in_flight) not in granted_ids]
        return Claimed(granted, refused, held, requeued)

    async def _claim(self, attempts: Mapping[CallbackAttempt, InFlight]) -> callbacks.Claims:
        wanted, horizon_s = list(attempts), self._settings.horizon_s
        waiting_for = _waiting_for(wanted, "claim")
        if any(in_flight.callback.ordered for in_flight in attempts.values()):
            return await retry_until_available(
                lambda: callbacks.claim_in_order(self._pool, wanted, horizon_s=horizon_s),
                waiting_for=waiting_for,
            )
        granted = await retry_until_available(
            lambda: callbacks.claim(self._pool, wanted, horizon_s=horizon_s), waiting_for=waiting_for
        )
        return callbacks.Claims(granted=granted)

    async def record_outcomes(self, batch: Sequence[EndedAttempt]) -> Recorded:
        """Records the outcomes of attempts, and disables targets that are gone.

        Args:
            batch: no two attempts of one callback; claims ensure that.
        """
        rows = [ended.row for ended in batch]
        ends = [ended for ended in batch if ended.row.state != "pending"]
        now = datetime.now(UTC)
        records = [record for ended in ends for record in _end(ended, now).records()]
        ordered = {ended.callback.id for ended in ends if ended.callback.ordered}
        gone = {ended.callback.target: ended.gone for ended in ends if ended.gone is not None}
        enqueued = await retry_until_available(
            lambda: callbacks.record_outcomes(
                self._pool, rows, records, ordered=ordered, gone=gone, owner=self._owner
            ),
            waiting_for=_waiting_for(batch, "outcome"),
        )
        due_s = [row.due_in_s for row in rows if row.state == "pending"]
        if ordered:
            # The next callback of their task is due now.
            due_s.append(0.0)
        return Recorded(enqueued, min(due_s, default=None), list(gone))

    async def postpone(self, batch: Sequence[Deferral]) -> float:
        """Returns callbacks to PostgreSQL; returns the seconds until the first one is due."""
        due_s = [deferral.due_in_s or 0.0 for deferral in batch]
        attempts = [deferral.attempt for deferral in batch]
        uncounted = [deferral.uncounted for deferral in batch]
        await retry_until_available(
            lambda: callbacks.postpone(self._pool, attempts, due_s, uncounted),
            waiting_for=_waiting_for(batch, "postponement"),
        )
        for deferral in batch:
            deferral.in_flight.record.settle()
        return min(due_s)

    async def hold(self, batch: Sequence[Deferral]) -> None:
        """Holds callbacks in PostgreSQL until their targets may be called."""
        attempts = [deferral.attempt for deferral in batch]
        uncounted = [deferral.uncounted for deferral in batch]
        await retry_until_available(
            lambda: callbacks.hold(
                self._pool, attempts, uncounted, [not deferral.queued for deferral in batch]
            ),
            waiting_for=_waiting_for(batch, "hold"),
        )
        for deferral in batch:
            deferral.in_flight.record.settle()
        self.held += len(batch)


def claim_linger_s(previous: int) -> float:
    """Seconds that a batch of claims waits for more, by the size of the batch before."""
    return CLAIM_LINGER_S if previous >= CLAIM_LINGER_FROM else 0.0


def outcome_linger_s(previous: int) -> float:
    """Seconds that a batch of outcomes waits for more, by the size of the batch before."""
    return OUTCOME_BUSY_LINGER_S if previous >= OUTCOME_BUSY_FROM else OUTCOME_LINGER_S


def _waiting_for(batch: Sequence[object], noun: str) -> str:
    return f"the {noun} of {len(batch)} callbacks"


def _end(ended: EndedAttempt, now: datetime) -> CallbackEnd:
    return CallbackEnd(
        callback=ended.callback,
        outcome=ended.row.state,
        attempts=ended.row.attempt,
        at=now,
        status=ended.status,
        took_s=ended.took_s,
        error=ended.error,
    )
