"""The identity of an attempt in leases, records and rows."""

from __future__ import annotations

from typing import NamedTuple

# The number of an attempt identifies it within its step, and counts from 0. An attempt that a
# worker runs because it went on by itself (`core.going_on`) is the first of its step. While it
# runs, it has a number at random from this one on, in place of 0.
CHOSEN = 1_000_000_000


def count_of(attempt: int) -> int:
    """The attempts of the step before the one with this number: the number that people see."""
    return 0 if attempt >= CHOSEN else attempt


class AttemptId(NamedTuple):
    """One attempt of one step of one task.

    Attributes:
        task_id: of the task.
        step: position in the task's sequence of stages, from 0; a stage that is visited twice has
            two steps.
        attempt: its number in this step.
    """

    task_id: int
    step: int
    attempt: int

    @property
    def counted(self) -> AttemptId:
        """The attempt with its count, as people see it."""
        return self if self.attempt < CHOSEN else self._replace(attempt=count_of(self.attempt))

    @property
    def log_path(self) -> str:
        """The path of the attempt's log at a gateway."""
        return f"/tasks/{self.task_id}/logs/{self.step}/{count_of(self.attempt)}"
