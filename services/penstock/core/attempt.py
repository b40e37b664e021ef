"""The identity of an attempt in leases, records and rows."""

from __future__ import annotations

from typing import NamedTuple


class AttemptId(NamedTuple):
    """One attempt of one step of one task.

    Attributes:
        task_id: of the task.
        step: position in the task's sequence of stages, from 0; a stage that is visited twice has
            two steps.
        attempt: of this step, counted from 0.
    """

    task_id: int
    step: int
    attempt: int

    @property
    def log_path(self) -> str:
        """The path of the attempt's log at a gateway."""
        return f"/tasks/{self.task_id}/logs/{self.step}/{self.attempt}"
