"""Writes submissions that cannot become tasks to `submitted.rejected`, with the reason."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from aiokafka import AIOKafkaProducer

from penstock.contracts.rejected import encode_rejection, rejection_key
from penstock.errors import Invalid, RecordsRefused, UnknownType
from penstock.kafka.outbox import send_all
from penstock.kafka.topics import SUBMITTED, SUBMITTED_REJECTED

log = logging.getLogger(__name__)


class Rejections:
    """Rejected submissions.

    Args:
        producer: acks=all.
        prefix: of topics.
    """

    def __init__(self, producer: AIOKafkaProducer, prefix: str) -> None:
        self._producer = producer
        self._topic = prefix + SUBMITTED_REJECTED.name
        self._source = prefix + SUBMITTED.name

    def of(self, record: Any, invalid: Invalid) -> tuple[bytes | None, bytes]:
        """The key and the value of a record's rejection; logs the reason."""
        place = {"partition": record.partition, "offset": record.offset, "error": invalid}
        if isinstance(invalid, UnknownType):
            # The type may have been lost with a database that went back.
            log.warning(
                "A submission of an unknown type was rejected; register the type, then run `penstock topics replay-rejected`",
                extra={"event": "type_unknown", **place},
            )
        log.info(
            "A submitted record was rejected",
            extra={"event": "record_rejected", "topic": SUBMITTED.name, **place},
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
        """Returns once Kafka has them, or has refused them.

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
