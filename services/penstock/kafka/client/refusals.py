"""The errors of a broker about the records of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from aiokafka import errors
from aiokafka.errors import (
    BrokerResponseError,
    InvalidProducerEpoch,
    InvalidTimestampError,
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


# The reasons of refusals in metrics; any other refusal is "invalid".
_REASONS: dict[type[BaseException], str] = {
    MessageSizeTooLargeError: "too_large",
    RecordListTooLargeError: "too_large",
    RecordTooLargeError: "too_large",
    PolicyViolationError: "policy",
    InvalidTimestampError: "timestamp",
}
INVALID = "invalid"
_OF_SIZE = tuple(kind.__name__ for kind, reason in _REASONS.items() if reason == "too_large")


def refuses_all(refused: Mapping[int, str], count: int) -> str | None:
    """Why a topic takes no record at all: it refused all of `count`, and none for its size.

    A setting of the topic is the reason then, such as compaction, and not the records.
    """
    reasons = set(refused.values())
    if len(refused) < count or any(why.startswith(_OF_SIZE) for why in reasons):
        return None
    return next(iter(reasons), None)


# Records of this process that Kafka has refused, by full topic name and reason; 0 for each reason
# on a topic that the process writes to.
refused: dict[str, dict[str, int]] = {}


def count_topic(topic: str) -> dict[str, int]:
    """The refused records of a topic to which this process writes, by reason."""
    counts = refused.get(topic)
    if counts is None:
        counts = refused[topic] = dict.fromkeys((*_REASONS.values(), INVALID), 0)
    return counts


def count_refusal(topic: str, error: BaseException, records: int = 1) -> None:
    """Counts records that Kafka refuses; errors that are no refusals count for nothing."""
    if isinstance(error, (*REFUSALS, InvalidTimestampError)):
        count_topic(topic)[_REASONS.get(type(error), INVALID)] += records


def refused_by_topic(prefix: str) -> dict[tuple[str, str], int]:
    """The records of this process that Kafka has refused, by topic without prefix and reason."""
    return {
        (topic.removeprefix(prefix), reason): records
        for topic, counts in refused.items()
        for reason, records in counts.items()
    }
