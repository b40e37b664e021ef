"""The fields of a submission that need no conversion: the base of `Submission` and `Draft`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFields:
    """The fields of a task that a producer sets and that need no conversion.

    Attributes:
        type: name of a registered task type.
        stage: the task's first stage; None is the type's first stage.
        key: tenant or resource that the type's limits and fair queueing count the task for; None is
            none.
        idempotency_key: a second submission with the same type and idempotency key returns the
            first task.
        events: the transitions that are published, "final" or "all"; None is the type's choice.
        labels: free names and values, for finding the task again.
    """

    type: str
    stage: str | None = None
    key: str | None = None
    idempotency_key: str | None = None
    events: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def wire_fields(self) -> dict[str, Any]:
        """These fields as a JSON object, without those that have their default."""
        values = {name: getattr(self, name) for name in FIELD_NAMES}
        wire = {name: value for name, value in values.items() if value is not None and value != {}}
        if "labels" in wire:
            wire["labels"] = dict(self.labels)
        return wire


FIELD_NAMES = tuple(task_field.name for task_field in fields(TaskFields))
