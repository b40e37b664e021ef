"""Records claims, outcomes and withdrawals of callbacks in PostgreSQL and Kafka, in bulk.

Guarantees: an attempt is numbered in PostgreSQL before it is made, and each number is given once. A
record is acknowledged when PostgreSQL holds the state of its callbacks. The outcome of a callback
is published on `callbacks.results`, and a dead callback on `callbacks.dead`, before PostgreSQL
records it. While a server is unavailable, every method waits for it.

A record is acknowledged when its attempt is claimed, because PostgreSQL makes the callback due
again after the horizon. Records are acknowledged in order, so waiting for a call that hangs would
block the reading of further records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg
import orjson
from aiokafka import AIOKafkaProducer

from penstock.callbacks.receiver import InFlight
from penstock.callbacks.router import Withdrawal
from penstock.callbacks.settings import CallbacksSettings
from penstock.concurrency.retry import retry_until_available
from penstock.contracts.event import Callback
from penstock.core.target import TargetId
from penstock.errors import RecordsRefused
from penstock.kafka.connection import translated
from penstock.kafka.outbox import send_all
from penstock.kafka.topics import CALLBACKS_DEAD, CALLBACKS_RESULTS
from penstock.postgres import callbacks
from penstock.postgres.callbacks import CallbackAttempt, OutcomeRow

log = logging.getLogger(__name__)

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
    """

    callback: Callback
    row: OutcomeRow
    took_s: float
    status: int | None
    error: dict[str, Any] | None


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
        producer: with acks=all, for results and dead callbacks.

    Attributes:
        held: callbacks held since the start.
    """

    def __init__(
        self, settings: CallbacksSettings, pool: asyncpg.Pool[asyncpg.Record], producer: AIOKafkaProducer
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._producer = producer
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
        wanted, horizon_s = list(attempts), self._settings.callback_horizon_s
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

    async def record_outcomes(self, batch: Sequence[EndedAttempt]) -> float | None:
        """Publishes the results of ended callbacks, then records the outcomes of attempts.

        Args:
            batch: no two attempts of one callback; claims ensure that.

        Returns:
            Seconds until the first of their next attempts is due; None without one.
        """
        rows = [ended.row for ended in batch]
        now = datetime.now(UTC)
        results = [_result(ended, now) for ended in batch if ended.row.state != "pending"]
        topic = self._settings.prefix + CALLBACKS_RESULTS.name
        try:
            await retry_until_available(
                lambda: send_all(self._producer, topic, results), waiting_for=_waiting_for(results, "result")
            )
        except RecordsRefused as error:
            # PostgreSQL has the outcomes; the topic only announces them.
            log.error(  # noqa: TRY400 (the traceback says nothing about the records)
                "Kafka refuses results of callbacks; they are not announced",
                extra={
                    "event": "callback_results_refused",
                    "results": len(error.records),
                    "error": str(error),
                },
            )
        ordered = {
            ended.callback.id for ended in batch if ended.callback.ordered and ended.row.state != "pending"
        }
        await retry_until_available(
            lambda: callbacks.record_outcomes(self._pool, rows, ordered),
            waiting_for=_waiting_for(batch, "outcome"),
        )
        due_s = [row.due_in_s for row in rows if row.state == "pending"]
        if ordered:
            # The next callback of their task is due now.
            due_s.append(0.0)
        return min(due_s, default=None)

    async def postpone(self, batch: Sequence[Withdrawal]) -> float:
        """Returns callbacks to PostgreSQL; returns the seconds until the first one is due."""
        due_s = [withdrawal.due_in_s or 0.0 for withdrawal in batch]
        attempts = [withdrawal.attempt for withdrawal in batch]
        uncounted = [withdrawal.uncounted for withdrawal in batch]
        await retry_until_available(
            lambda: callbacks.postpone(self._pool, attempts, due_s, uncounted),
            waiting_for=_waiting_for(batch, "postponement"),
        )
        for withdrawal in batch:
            withdrawal.in_flight.record.settle()
        return min(due_s)

    async def hold(self, batch: Sequence[Withdrawal]) -> set[TargetId]:
        """Holds callbacks in PostgreSQL until their targets may be called; returns the targets."""
        attempts = [withdrawal.attempt for withdrawal in batch]
        uncounted = [withdrawal.uncounted for withdrawal in batch]
        await retry_until_available(
            lambda: callbacks.hold(self._pool, attempts, uncounted), waiting_for=_waiting_for(batch, "hold")
        )
        for withdrawal in batch:
            withdrawal.in_flight.record.settle()
        self.held += len(batch)
        return {withdrawal.in_flight.callback.target for withdrawal in batch}

    async def publish_dead(self, ended: EndedAttempt) -> None:
        """Publishes a dead callback, before its outcome is recorded."""
        callback = ended.callback
        value = orjson.dumps(
            {
                "id": callback.id,
                "target": callback.target.url,
                "task_id": callback.task_id,
                "attempt": ended.row.attempt,
                "body": callback.body.decode(),
                "error": ended.error,
                "dead_at": datetime.now(UTC),
                **callback.masked_options(),
            }
        )

        async def send() -> None:
            with translated():
                await self._producer.send_and_wait(
                    self._settings.prefix + CALLBACKS_DEAD.name, value, key=callback.target.url.encode()
                )

        try:
            await retry_until_available(send, waiting_for=f"publishing the dead callback {callback.id}")
        except RecordsRefused as error:
            # PostgreSQL has the dead callback, from where it can be replayed.
            log.error(  # noqa: TRY400 (the traceback says nothing about the record)
                "Kafka refuses a dead letter; the callback is only in PostgreSQL",
                extra={"event": "dead_letter_refused", "callback": callback.id, "error": str(error)},
            )


def claim_linger_s(previous: int) -> float:
    """Seconds that a batch of claims waits for more, by the size of the batch before."""
    return CLAIM_LINGER_S if previous >= CLAIM_LINGER_FROM else 0.0


def outcome_linger_s(previous: int) -> float:
    """Seconds that a batch of outcomes waits for more, by the size of the batch before."""
    return OUTCOME_BUSY_LINGER_S if previous >= OUTCOME_BUSY_FROM else OUTCOME_LINGER_S


def _waiting_for(batch: Sequence[object], noun: str) -> str:
    return f"the {noun} of {len(batch)} callbacks"


def _result(ended: EndedAttempt, now: datetime) -> tuple[bytes, bytes]:
    callback = ended.callback
    value = orjson.dumps(
        {
            "id": callback.id,
            "target": callback.target.url,
            "task_id": callback.task_id,
            "outcome": ended.row.state,
            "attempts": ended.row.attempt,
            "status": ended.status,
            "took_ms": round(ended.took_s * 1000),
            "error": ended.error,
            "at": now,
        }
    )
    return str(callback.task_id).encode(), value
