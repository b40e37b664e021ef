"""What all requests have in common that can be rehearsed: those about callbacks and those about tasks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from penstock.errors import InvalidRecord

# How many a dry run counts, and how many it shows.
COUNTED = 100_000
SHOWN = 5


def moment_of(raw: Mapping[str, Any], name: str, base: str = "") -> datetime | None:
    """A moment in a body that conforms to its schema; None when it is not there.

    Args:
        raw: the object that may have it.
        name: of the field.
        base: pointer to the object.

    Raises:
        InvalidRecord: there is no such moment.
    """
    try:
        # In UTC there may be no such year.
        return datetime.fromisoformat(raw[name]).astimezone(UTC) if name in raw else None
    except (ValueError, OverflowError) as error:
        # The schema lets leap seconds through.
        raise InvalidRecord(f"no such moment: {error}", pointer=f"{base}/{name}") from error
