"""Rejections (`rejected.schema.json`): records that break their contract, with the reason."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime

import orjson

from penstock.errors import Invalid, InvalidRecord

# Most bytes of an original: with them in base64 the rejection fits its topic. A compressed record
# may have been larger than any topic permits.
MAX_ORIGINAL_BYTES = 1_000_000
# A longer record key is left out.
MAX_KEY_BYTES = 1_000


def rejection_key(record_key: bytes | None) -> bytes | None:
    """The record key of a rejection: that of its record, unless it is too long."""
    return record_key if record_key is not None and len(record_key) <= MAX_KEY_BYTES else None


def encode_rejection(
    invalid: Invalid, *, topic: str, partition: int, offset: int, original: bytes, at: datetime
) -> bytes:
    """The value of a rejection.

    Args:
        invalid: its faults; the pointer is that of the first.
        topic: full name of the topic of the record.
        partition: its partition.
        offset: its offset.
        original: the record's value, to the byte; a very long one is cut.
        at: when it was rejected.
    """
    cut = {"size": len(original)} if len(original) > MAX_ORIGINAL_BYTES else {}
    return orjson.dumps(
        {
            "reason": invalid.reasons,
            "pointer": invalid.pointer,
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "original": base64.b64encode(original[:MAX_ORIGINAL_BYTES]).decode("ascii"),
            "rejected_at": at,
            **cut,
        }
    )


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected record.

    Attributes:
        topic: full name of its topic.
        partition: its partition.
        offset: its offset.
        pointer: the field at fault.
        reason: the fault.
        rejected_at: when it was rejected.
        original: its value, to the byte.
    """

    topic: str
    partition: int
    offset: int
    pointer: str
    reason: str
    rejected_at: datetime
    original: bytes


def decode_rejection(data: bytes) -> Rejection:
    """Reads the value of a rejection.

    Raises:
        InvalidRecord: it is no rejection.
    """
    try:
        raw = orjson.loads(data)
        original = base64.b64decode(raw["original"], validate=True)
        at = datetime.fromisoformat(raw["rejected_at"])
        return Rejection(
            raw["topic"], raw["partition"], raw["offset"], raw["pointer"], raw["reason"], at, original
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRecord(f"not a rejection: {error!r}") from error
