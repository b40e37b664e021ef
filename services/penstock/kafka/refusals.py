"""The errors of a broker about the records of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from aiokafka import errors
from aiokafka.errors import (
    BrokerResponseError,
    InvalidProducerEpoch,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    PolicyViolationError,
    ProducerFenced,
    RecordListTooLargeError,
    RecordTooLargeError,
    UnknownProducerId,
    UnsupportedForMessageFormatError,
)

from penstock.errors import RecordsRefused


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc]  # aiokafka has no types
    """INVALID_RECORD, which aiokafka would take for an unknown error."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The broker's validation of the record failed."


errors.kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)

# The broker refuses the records and would refuse them again.
REFUSALS = (
    InvalidRecordError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    RecordTooLargeError,
    UnsupportedForMessageFormatError,
)


# The broker does not know the sequence of the producer, because it has lost records of it. The
# batch is not written. `producer_epoch` has begun a new sequence.
SEQUENCE_LOST = (InvalidProducerEpoch, OutOfOrderSequenceNumber, ProducerFenced, UnknownProducerId)


def refusal_error(records: Mapping[int, str]) -> RecordsRefused:
    """The exception for Kafka's reasons, by the records' positions in the call."""
    why = next(iter(records.values()))
    return RecordsRefused(
        f"Kafka refuses {len(records)} records ({why}): a limit or policy of the topic or cluster forbids them",
        records=records,
    )
