"""Limits of dry runs, and timestamps of filters, for the bulk changes of callbacks and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from penstock.errors import InvalidRecord

# Most matches that a dry run counts, and most that it shows.
MAX_COUNTED = 100_000
MAX_EXAMPLES = 5


def timestamp_in(raw: Mapping[str, Any], name: str, base: str = "") -> datetime | None:
    """A timestamp in a body that conforms to its schema; None without one.

    Args:
        raw: the object with the field.
        name: name of the field.
        base: JSON Pointer to the object.

    Raises:
        InvalidRecord: the date does not exist.
    """
    try:
        # The conversion to UTC may exceed the years that datetime has.
        return datetime.fromisoformat(raw[name]).astimezone(UTC) if name in raw else None
    except (ValueError, OverflowError) as error:
        # The schema permits leap seconds; datetime does not.
        raise InvalidRecord(f"no such time: {error}", pointer=f"{base}/{name}") from error
