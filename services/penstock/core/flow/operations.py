"""Bulk operations on flows: the verbs, and the flows that each one reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from penstock.core.flow.state import FlowStatus


class FlowVerb(StrEnum):
    """Changes that operators make to flows by filter."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    RECOVER = "recover"
    RERUN = "rerun"


_RUNNING = frozenset({FlowStatus.RUNNING})
_REACHABLE = {
    FlowVerb.PAUSE: _RUNNING,
    FlowVerb.RESUME: _RUNNING,
    FlowVerb.CANCEL: _RUNNING,
    # A running flow is recovered one by one: it may be refused, and only its operator can decide.
    FlowVerb.RECOVER: frozenset({FlowStatus.FAILED, FlowStatus.CANCELLED}),
    FlowVerb.RERUN: frozenset(FlowStatus) - _RUNNING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFilter:
    """The flows of an operation; a flow matches when it has all given properties.

    Without `ids` only flows without a parent match: a command reaches everything below them.

    Attributes:
        ids: its id is one of these.
        name: name of its definition.
        version: version of its definition.
        statuses: its state is one of these.
        labels: it has all of these.
        created_since: it was started then or later.
        created_until: it was started before.
        finished_since: it ended then or later.
        finished_until: it ended before.
        error: a part of its error; upper and lower case are equal.
        schedule: it is of this schedule, its backfills included.
    """

    ids: Sequence[int] | None = None
    name: str | None = None
    version: int | None = None
    statuses: Sequence[FlowStatus] | None = None
    labels: Mapping[str, str] | None = None
    created_since: datetime | None = None
    created_until: datetime | None = None
    finished_since: datetime | None = None
    finished_until: datetime | None = None
    error: str | None = None
    schedule: str | None = None

    def statuses_for(self, verb: FlowVerb) -> list[FlowStatus]:
        """The states of the filter in which a verb changes a flow."""
        return [
            status
            for status in FlowStatus
            if status in _REACHABLE[verb] and status in (self.statuses or FlowStatus)
        ]
