"""Checks arguments that would otherwise be sent as something else, or fail without their name.

A text is a sequence of characters, so `callbacks="https://…"` would be a list of one-letter URLs.
Everything else about a value is judged by the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from penstock.core.task import Priority
from penstock.errors import InvalidRecord

_MAX_SHOWN = 60


def list_of(values: Iterable[Any], name: str) -> list[Any]:
    """The values of an argument as a list.

    Raises:
        InvalidRecord: it is a single value.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidRecord(f"expected a list, got {shown(values)}", pointer=f"/{name}")
    return list(values)


def ids_of(values: Iterable[int], name: str = "ids") -> list[int]:
    """The ids of an argument as a list.

    Raises:
        InvalidRecord: it is a single value, or a value is no integer.
    """
    ids = list_of(values, name)
    for index, value in enumerate(ids):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidRecord(f"expected an id, got {shown(value)}", pointer=f"/{name}/{index}")
    return ids


def mapping_of(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The names and values of an argument.

    Raises:
        InvalidRecord: it has no names.
    """
    if not isinstance(value, Mapping):
        raise InvalidRecord(f"expected names with values, got {shown(value)}", pointer=f"/{name}")
    return dict(value)


def encode_moment(moment: datetime | None, name: str) -> str | None:
    """The moment in ISO 8601 and UTC; a naive moment is local time.

    Raises:
        InvalidRecord: it is no `datetime`, or UTC has no such year.
    """
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        raise InvalidRecord(f"expected a datetime, got {shown(moment)}", pointer=f"/{name}")
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
