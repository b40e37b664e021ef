"""Encodes moments and priorities, and names the argument that cannot be encoded."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.core.task import Priority
from penstock.errors import InvalidRecord

_MAX_SHOWN = 60


def encode_moment(moment: datetime | None, name: str) -> str | None:
    """The moment in ISO 8601 and UTC; a naive moment is local time.

    Raises:
        InvalidRecord: UTC has no such year.
    """
    if moment is None:
        return None
    try:
        return moment.astimezone(UTC).isoformat()
    except (OverflowError, ValueError) as error:
        raise InvalidRecord(
            f"expected a datetime in the years 1 to 9999 of UTC, got {shown(moment)}", pointer=f"/{name}"
        ) from error


def priority_name(priority: Priority | str, name: str = "priority") -> str:
    """The priority's name on the wire.

    Raises:
        InvalidRecord: there is no such priority.
    """
    if isinstance(priority, Priority):
        return priority.name
    if priority not in Priority.__members__:
        raise InvalidRecord(
            f"expected one of {', '.join(Priority.__members__)}, got {shown(priority)}", pointer=f"/{name}"
        )
    return priority


def shown(value: object) -> str:
    """The beginning of a value's `repr`."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
