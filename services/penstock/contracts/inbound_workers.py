"""Reads the records of workers about themselves and validates them by their schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contracts.parsing import parse
from penstock.contracts.validation import conform
from penstock.contracts.worker_status import RECORD_BYTES
from penstock.core.attempt import AttemptId
from penstock.core.worker_list import OfType, WorkerStatus
from penstock.errors import InvalidRecord, TooLarge

# Name of the schema in schemas/messages.
SCHEMA = "worker-status"
# More than any record has; it may come compressed.
MOST_BYTES = 2 * RECORD_BYTES


def decode_statuses(data: bytes) -> list[WorkerStatus]:
    """The workers of a record: its writer first, then those over HTTP.

    Raises:
        InvalidRecord: the record breaks `worker-status.schema.json`.
        TooLarge: it is larger than any such record.
    """
    if len(data) > MOST_BYTES:
        raise TooLarge(f"a record of {len(data):,} bytes; {MOST_BYTES:,} is the limit")
    raw = parse(data)
    try:
        conform(raw, SCHEMA)
        return [_status_from_wire(each) for each in (raw, *raw.get("over_http", ()))]
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Validation did not foresee this content. Without the translation it would stop the
        # gateway's reader.
        raise InvalidRecord(f"cannot be read: {error!r}") from error


def _status_from_wire(raw: Mapping[str, Any]) -> WorkerStatus:
    return WorkerStatus(
        id=raw["id"],
        kind=raw["kind"],
        host=raw["host"],
        interval_s=raw["interval_s"],
        types={name: _type_from_wire(each) for name, each in raw["types"].items()},
        version=raw.get("version"),
        # JSON Schema counts 81.0 among the integers.
        slots=None if "slots" not in raw else int(raw["slots"]),
        room=None if "room" not in raw else int(raw["room"]),
        silent_ms=int(raw.get("silent_ms", 0)),
        stopped=raw.get("stopped", False),
    )


def _type_from_wire(raw: Mapping[str, Any]) -> OfType:
    return OfType(
        tuple(raw["stages"]) if "stages" in raw else None,
        int(raw.get("in_flight", 0)),
        tuple(
            AttemptId(int(task), int(step), int(attempt)) for task, step, attempt in raw.get("attempts", ())
        ),
    )
