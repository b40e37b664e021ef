"""Rejections (`rejected.schema.json`): records that break their contract, with the reason."""

from __future__ import annotations

import base64
from datetime import datetime

import orjson

from penstock.errors import Invalid


def encode_rejection(
    invalid: Invalid, *, topic: str, partition: int, offset: int, original: bytes, at: datetime
) -> bytes:
    """The value of a rejection.

    Args:
        invalid: its fault, and where.
        topic: full name of the topic of the record.
        partition: its partition.
        offset: its offset.
        original: the record's value, to the byte.
        at: when it was rejected.
    """
    return orjson.dumps(
        {
            "reason": invalid.reason,
            "pointer": invalid.pointer,
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "original": base64.b64encode(original).decode("ascii"),
            "rejected_at": at,
        }
    )
