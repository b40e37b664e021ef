"""Writes records that break their contract to the rejected topic, with the reason."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from aiokafka import AIOKafkaProducer

from penstock.contracts.rejected import encode_rejection, rejection_key
from penstock.errors import Invalid, RecordsRefused, UnknownFlow, UnknownType
from penstock.kafka.processing.outbox import send_all
from penstock.kafka.topology.topics import Topic

log = logging.getLogger(__name__)


class Rejections:
    """The rejected records of a topic.

    Args:
        producer: acks=all.
        prefix: of topics.
        topic: of the records.
        rejected_topic: of the rejections.
    """

    def __init__(self, producer: AIOKafkaProducer, prefix: str, topic: Topic, rejected_topic: Topic) -> None:
        self._producer = producer
        self._topic = prefix + rejected_topic.name
        self._name = topic.name
        self._source = prefix + topic.name

    def of(self, record: Any, invalid: Invalid) -> tuple[bytes | None, bytes]:
        """The key and the value of a record's rejection; logs the reason."""
        place = {"partition": record.partition, "offset": record.offset, "error": invalid}
        if isinstance(invalid, UnknownType):
            # The type may have been lost with a database that went back.
            log.warning(
                "A submission of an unknown type was rejected; register the type, then run `penstock rejected replay`",
                extra={"event": "type_unknown", **place},
            )
        if isinstance(invalid, UnknownFlow):
            # The definition may have been lost with a database that went back.
            log.warning(
                "A submission of an unknown flow was rejected; upload the definition, then run `penstock rejected "
                "replay --flow NAME`",
                extra={"event": "flow_unknown", **place},
            )
        log.info(
            "A submitted record was rejected",
            extra={"event": "record_rejected", "topic": self._name, **place},
        )
        value = encode_rejection(
            invalid,
            topic=self._source,
            partition=record.partition,
            offset=record.offset,
            original=record.value or b"",
            at=datetime.now(UTC),
        )
        return rejection_key(record.key), value

    async def write(self, rejections: Sequence[tuple[bytes | None, bytes]]) -> None:
        """Returns once Kafka has keys and values of rejections, or has refused them.

        Raises:
            KafkaUnavailable: some may not be there; write all of them again.
        """
        try:
            await send_all(self._producer, self._topic, rejections)
        except RecordsRefused as error:
            # The topic takes less than `topics.toml` declares. The records behind must not wait.
            log.error(  # noqa: TRY400 (the traceback says nothing about the records)
                "Kafka refuses rejected submissions; only the log has their reasons",
                extra={"event": "rejections_refused", "records": len(error.records), "error": str(error)},
            )
