"""Rejections (`rejected.schema.json`): records that break their contract, with the reason."""

from __future__ import annotations

import base64
from datetime import datetime

import orjson

from penstock.errors import Invalid

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
        invalid: its fault, and where.
        topic: full name of the topic of the record.
        partition: its partition.
        offset: its offset.
        original: the record's value, to the byte; a very long one is cut.
        at: when it was rejected.
    """
    cut = {"size": len(original)} if len(original) > MAX_ORIGINAL_BYTES else {}
    return orjson.dumps(
        {
            "reason": invalid.reason,
            "pointer": invalid.pointer,
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "original": base64.b64encode(original[:MAX_ORIGINAL_BYTES]).decode("ascii"),
            "rejected_at": at,
            **cut,
        }
    )
