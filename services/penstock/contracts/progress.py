"""The progress of attempts: a header of a heartbeat record, and a member of an HTTP report.

A header, because a fault in it must not cost the attempts their heartbeat, as a fault in the value
of the record would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.core.attempt import AttemptId

HEADER = "penstock-progress"
# Most reports of one record. With messages of the most bytes, the header is below half of the
# broker's limit for a record.
REPORTS_PER_RECORD = 500
MAX_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an attempt is, by its handler.

    Attributes:
        fraction: from 0 to 1; None when the handler does not know it.
        message: at most `MAX_MESSAGE` characters without control characters.
    """

    fraction: float | None = None
    message: str = ""

    def to_wire(self) -> dict[str, Any]:
        """The JSON object, without members that say nothing."""
        wire: dict[str, Any] = {}
        if self.fraction is not None:
            wire["fraction"] = self.fraction
        if self.message:
            wire["message"] = self.message
        return wire

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> Progress:
        """Reads an object that is valid by its schema."""
        fraction = raw.get("fraction")
        return cls(None if fraction is None else float(fraction), raw.get("message", ""))


def progress_line(fraction: float | None, message: str) -> str:
    """A report of progress on one line: 40 %, frame 1,200 of 3,000."""
    # Rounded down: 100 % is the end.
    share = "" if fraction is None else f"{int(fraction * 100)} %"
    return ", ".join(part for part in (share, message) if part)


def headers_of(reports: Mapping[AttemptId, Progress]) -> list[tuple[str, bytes]]:
    """The headers of a heartbeat record with these reports; none without reports."""
    if not reports:
        return []
    wire = [{"task": tuple(attempt_id), **progress.to_wire()} for attempt_id, progress in reports.items()]
    return [(HEADER, orjson.dumps(wire))]


def in_parts(
    reports: Iterable[tuple[AttemptId, Progress]], most: int = REPORTS_PER_RECORD
) -> list[dict[AttemptId, Progress]]:
    """Reports in parts, each of which fits into one record."""
    entries = list(reports)
    return [dict(entries[begin : begin + most]) for begin in range(0, len(entries), most)]
