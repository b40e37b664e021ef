"""The records that Kafka has not taken yet, by topic: they tell which topics take none.

An idempotent producer sends a batch again until the broker takes it, without a limit, because the
batches behind it depend on it. So the oldest batch of a partition is a probe of writes that costs
nothing: it shows that the partition takes no records, why, and when it takes them again. While it
waits, a caller that can try again later must add nothing: records would pile up in the producer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaError,
    KafkaStorageError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
)
from aiokafka.producer.sender import SendProduceReqHandler

from penstock.concurrency.outages import Wait, count_failed_attempt
from penstock.errors import KafkaUnavailable

# Seconds without an acknowledgement after which a topic takes no records. A broker is elected anew,
# and one that restarts is back, within them.
WRITE_S = 10.0

_REASONS: tuple[tuple[tuple[type[KafkaError], ...], str], ...] = (
    ((NotEnoughReplicasError, NotEnoughReplicasAfterAppendError), "too few replicas are in sync for a write"),
    ((KafkaStorageError,), "a broker cannot use its disk"),
)


def write_reason(error: KafkaError) -> str | None:
    """The reason of a broker for taking no records; None for other errors."""
    return next((reason for kinds, reason in _REASONS if isinstance(error, kinds)), None)


class PendingWrites:
    """The batches of one producer that Kafka has not acknowledged.

    Args:
        producer: not yet started.
    """

    def __init__(self, producer: Any) -> None:
        # By batch: its topic, when it was made on the monotonic clock, and why it was refused last.
        self._pending: dict[Any, tuple[str, float, str]] = {}
        # By batch that was refused for now.
        self._waits: dict[Any, Wait] = {}
        accumulator = producer._message_accumulator  # noqa: SLF001 (the client has no hook for batches)
        self._append = accumulator._append_batch  # noqa: SLF001 (as above)
        accumulator._append_batch = self._append_batch  # noqa: SLF001 (as above)

    def _append_batch(self, builder: Any, tp: Any) -> Any:
        """Replaces the client's method, which makes each batch."""
        batch = self._append(builder, tp)
        self._pending[batch] = tp.topic, time.monotonic(), ""

        def settle(future: asyncio.Future[Any]) -> None:
            self._pending.pop(batch, None)
            if (wait := self._waits.pop(batch, None)) is not None:
                wait.end()
            if not future.cancelled():
                # Retrieved, or asyncio logs it when the writer waits no longer.
                future.exception()

        batch.future.add_done_callback(settle)
        # `_note_refusals` finds this object by it.
        batch.pending_writes = self
        return batch

    def note(self, batch: Any, error: Any) -> None:
        """Keeps why a batch was refused for now."""
        count_failed_attempt()
        if batch in self._pending:
            topic, since_s, _reason = self._pending[batch]
            self._pending[batch] = topic, since_s, write_reason(error) or "no broker answers"
            self._waits.setdefault(batch, Wait()).begin(KafkaUnavailable(topic))

    def waiting(self, longer_than_s: float) -> dict[str, str]:
        """The topics whose records wait for so many seconds, each with the reason, if known."""
        before_s = time.monotonic() - longer_than_s
        return {topic: reason for topic, since_s, reason in self._pending.values() if since_s < before_s}


_by_producer: WeakKeyDictionary[AIOKafkaProducer, PendingWrites] = WeakKeyDictionary()


def observe_writes(producer: AIOKafkaProducer) -> None:
    """Begins to observe a producer that is not yet started."""
    _by_producer[producer] = PendingWrites(producer)


def require_writable(producer: AIOKafkaProducer, topic: str) -> None:
    """Checks that a topic takes records, as far as this producer knows.

    Raises:
        KafkaUnavailable: it has taken none for `WRITE_S` seconds, although there are some.
    """
    pending = _by_producer.get(producer)
    waiting = pending.waiting(WRITE_S) if pending is not None else {}
    if topic in waiting:
        raise _unavailable([topic], waiting[topic])


async def acknowledged(
    producer: AIOKafkaProducer, topic: str, futures: Iterable[asyncio.Future[Any]]
) -> None:
    """Returns when all of these batches are acknowledged or refused for good.

    Raises:
        KafkaUnavailable: that took longer than `WRITE_S`; Kafka may take them later.
    """
    futures = list(futures)
    if not futures:
        return
    _done, left = await asyncio.wait(futures, timeout=WRITE_S)
    if left:
        pending = _by_producer.get(producer)
        reason = pending.waiting(0.0).get(topic, "") if pending is not None else ""
        raise _unavailable([topic], reason)


async def probe_writes() -> None:
    """Checks that each topic takes the records that this process writes.

    Raises:
        KafkaUnavailable: one has taken none for `WRITE_S` seconds, although there are some.
    """
    waiting = {
        topic: reason
        for pending in _by_producer.values()
        for topic, reason in pending.waiting(WRITE_S).items()
    }
    if waiting:
        raise _unavailable(sorted(waiting), next(iter(waiting.values())))


def _unavailable(topics: list[str], reason: str) -> KafkaUnavailable:
    more = f" and {len(topics) - 3} more" if len(topics) > 3 else ""
    return KafkaUnavailable(
        f"Kafka takes no records of {', '.join(topics[:3])}{more}: {reason or 'it does not answer in time'}"
    )


def _note_refusals() -> None:
    can_retry = SendProduceReqHandler._can_retry  # noqa: SLF001 (the client has no hook for an error that it retries)

    def noting(self: Any, error: Any, batch: Any) -> bool:
        retried: bool = can_retry(self, error, batch)
        if retried and (pending := getattr(batch, "pending_writes", None)) is not None:
            pending.note(batch, error)
        return retried

    SendProduceReqHandler._can_retry = noting  # noqa: SLF001 (as above)


_note_refusals()
