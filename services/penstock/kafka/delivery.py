"""What a service sees of its processor: its settings, and a record in hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiokafka import AIOKafkaProducer

from penstock.contracts.rejected import encode_rejection
from penstock.errors import Invalid
from penstock.kafka.connection import translated
from penstock.settings import Progressing, option


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(Progressing):
    """What a processor adds to the way to Kafka."""

    max_in_flight: int = option(5_000, "Most records in hand and not settled; nothing more is taken beyond.")

    def validate(self) -> list[str]:
        """Something must be in hand for anything to move."""
        problems = super().validate()
        if self.max_in_flight < 1:
            problems.append(f"max_in_flight={self.max_in_flight} must be at least 1")
        return problems


class Delivery:
    """One record in hand.

    Attributes:
        topic: name without the deployment's prefix.
        partition: of the topic.
        offset: in the partition.
        generation: of the consumer group, in which it was delivered.
        timestamp: the broker's, seconds since 1970.
        key: the record's key.
        value: the record's value; empty when it has none.

    Args:
        settle: takes the delivery when its effects are durable.
        topic: bare name.
        message: Faust's.
    """

    __slots__ = ("_settle", "generation", "key", "offset", "partition", "timestamp", "topic", "value")

    def __init__(self, settle: Callable[[Delivery], None], topic: str, message: Any) -> None:
        self._settle = settle
        self.topic = topic
        self.partition: int = message.partition
        self.offset: int = message.offset
        self.generation: int = message.generation_id
        self.timestamp: float = message.timestamp
        self.key: bytes | None = message.key
        self.value: bytes = message.value or b""

    def ids(self) -> dict[str, object]:
        """By which an entry of the log can be found."""
        return {"topic": self.topic, "partition": self.partition, "offset": self.offset}

    def settle(self) -> None:
        """Its effects are durable. In any order, any number of times; ignored once its generation is over."""
        self._settle(self)


Handler = Callable[[Delivery], Awaitable[None]]


async def park(
    producer: AIOKafkaProducer, prefix: str, delivery: Delivery, invalid: Invalid, part: bytes | None
) -> None:
    """Writes a record that breaks its contract, or the part of it that does, to `<topic>.rejected`.

    Raises:
        KafkaUnavailable: it is not parked.
    """
    topic = prefix + delivery.topic
    value = encode_rejection(
        invalid,
        topic=topic,
        partition=delivery.partition,
        offset=delivery.offset,
        original=delivery.value if part is None else part,
        at=datetime.now(UTC),
    )
    with translated():
        await producer.send_and_wait(f"{topic}.rejected", value, key=delivery.key)
