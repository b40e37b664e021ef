"""The settings of a processor, and a record that it delivers to a service."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiokafka import AIOKafkaProducer

from penstock.contracts.rejected import encode_rejection, rejection_key
from penstock.errors import Invalid, InvalidRecord, KafkaUnavailable, RecordsRefused
from penstock.kafka.client.connection import translated
from penstock.settings import Progressing, option

log = logging.getLogger(__name__)

# The most invalid parts of a record that are rejected one by one.
MAX_REJECTED_PARTS = 100


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(Progressing):
    """The settings of a processor."""

    max_in_flight: int = option(
        5_000,
        "Maximum number of records in flight (fetched, not acknowledged); at this number consumption pauses.",
    )

    def validate(self) -> list[str]:
        """Without a record in flight there is no progress to miss."""
        problems = super().validate()
        if self.max_in_flight < 1:
            problems.append(f"max_in_flight={self.max_in_flight} must be at least 1")
        return problems


class Delivery:
    """One record in flight.

    Attributes:
        topic: name without the deployment's prefix.
        partition: of the topic.
        offset: in the partition.
        generation: of the consumer group, in which it was delivered.
        timestamp: the broker's, seconds since 1970.
        key: the record's key.
        value: the record's value; empty when it has none.

    Args:
        settle: called with the delivery when its effects are durable.
        reject: publishes an invalid part of the record to `<topic>.rejected`.
        topic: name without the deployment's prefix.
        message: the record, as Faust has it.
    """

    __slots__ = (
        "_headers",
        "_reject",
        "_settle",
        "generation",
        "key",
        "offset",
        "partition",
        "timestamp",
        "topic",
        "value",
    )

    def __init__(
        self,
        settle: Callable[[Delivery], None],
        reject: Callable[[Delivery, Invalid, bytes], Awaitable[None]],
        topic: str,
        message: Any,
    ) -> None:
        self._settle = settle
        self._reject = reject
        self.topic = topic
        self.partition: int = message.partition
        self.offset: int = message.offset
        self.generation: int = message.generation_id
        self.timestamp: float = message.timestamp
        self.key: bytes | None = message.key
        self.value: bytes = message.value or b""
        self._headers: Any = message.headers

    def header(self, name: str) -> bytes | None:
        """The value of a header of the record; None without it."""
        headers = self._headers or ()
        for key, value in headers.items() if isinstance(headers, Mapping) else headers:
            if key == name:
                return bytes(value) if value is not None else None
        return None

    def ids(self) -> dict[str, object]:
        """The fields that identify the record in a log entry."""
        return {"topic": self.topic, "partition": self.partition, "offset": self.offset}

    def settle(self) -> None:
        """Acknowledges it once its effects are durable; in any order of records, and also twice."""
        self._settle(self)

    async def reject_parts(self, faults: Sequence[tuple[Invalid, bytes]]) -> None:
        """Copies invalid parts of the record to `<topic>.rejected`, without the rest.

        A record with more than `MAX_REJECTED_PARTS` invalid parts is copied once, as a whole:
        otherwise one record could keep its partition waiting for many thousand rejections.

        Raises:
            KafkaUnavailable: not all parts were published.
        """
        if len(faults) > MAX_REJECTED_PARTS:
            first, _part = faults[0]
            whole = InvalidRecord(
                f"{len(faults):,} entries break the contract, the first one: {first.reason}",
                pointer=first.pointer,
            )
            await self._reject(self, whole, self.value)
            return
        for invalid, part in faults:
            await self._reject(self, invalid, part)


Handler = Callable[[Delivery], Awaitable[None]]


async def write_rejection(
    producer: AIOKafkaProducer, prefix: str, delivery: Delivery, invalid: Invalid, part: bytes | None
) -> None:
    """Copies a record that breaks its contract, or the part of it that does, to `<topic>.rejected`.

    A record that Kafka refuses there is named without its content.

    Raises:
        KafkaUnavailable: it is not written.
    """
    topic = prefix + delivery.topic

    def rejection(original: bytes) -> bytes:
        return encode_rejection(
            invalid,
            topic=topic,
            partition=delivery.partition,
            offset=delivery.offset,
            original=original,
            at=datetime.now(UTC),
        )

    try:
        with translated():
            await producer.send_and_wait(
                f"{topic}.rejected",
                rejection(delivery.value if part is None else part),
                key=rejection_key(delivery.key),
            )
    except RecordsRefused as error:
        log.error(  # noqa: TRY400 (the traceback says nothing about the record)
            "Kafka refuses a rejected record; naming it without its content",
            extra={"event": "rejection_refused", **delivery.ids(), "error": str(error)},
        )
        try:
            with translated():
                await producer.send_and_wait(f"{topic}.rejected", rejection(b""))
        except RecordsRefused as again:
            # The topic takes no record at all, until an operator changes it.
            raise KafkaUnavailable(str(again)) from again
