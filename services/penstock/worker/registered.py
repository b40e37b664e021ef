"""The parts of a worker that run attempts: for the worker itself, and for `penstock.testing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.contracts.progress import Progress
from penstock.core.attempt import AttemptId
from penstock.core.early_start import EARLY_START, EarlyStart
from penstock.core.redaction import Redactor
from penstock.objects import ObjectStore
from penstock.worker.around import Around
from penstock.worker.execution import Execution, Stage
from penstock.worker.lifecycle import Lifecycle
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.settings import WorkerSettings
from penstock.worker.types import Type


@dataclass(frozen=True, slots=True)
class Registered:
    """The registered parts of a worker.

    Attributes:
        settings: of the worker.
        stages: handlers by (type, stage), in the order of their registration.
        lifecycle: the functions of `on_start` and `on_stop`.
        types: the task types that the code declares.
        around: middleware and dependencies.
        redactor: removes secrets from task logs, reports of progress and errors.
        early_start: when attempts are claimed.
    """

    settings: WorkerSettings
    stages: Mapping[tuple[str, str], Stage]
    lifecycle: Lifecycle
    types: tuple[Type, ...]
    around: Around
    redactor: Redactor
    early_start: EarlyStart = EARLY_START

    @property
    def limits(self) -> dict[str, dict[str, int]]:
        """By type: most attempts by stage, for stages with a limit of their own."""
        limits: dict[str, dict[str, int]] = {type_name: {} for type_name, _stage in self.stages}
        for (type_name, stage_name), stage in self.stages.items():
            if stage.max_attempts is not None:
                limits[type_name][stage_name] = stage.max_attempts
        return limits

    @property
    def stages_by_type(self) -> dict[str, list[str]]:
        """By type: the stages with a handler."""
        found: dict[str, list[str]] = {}
        for type_name, stage_name in self.stages:
            found.setdefault(type_name, []).append(stage_name)
        return found

    @property
    def concurrency(self) -> dict[tuple[str, str], int]:
        """Most attempts at once by (type, stage), for stages with a limit of their own."""
        return {
            name: stage.concurrency for name, stage in self.stages.items() if stage.concurrency is not None
        }

    @property
    def slots(self) -> int:
        """Most attempts at once."""
        # Synchronous handlers need a thread each: without one they would only wait here.
        is_async = any(stage.is_async for stage in self.stages.values())
        slots = self.settings.pool if is_async else min(self.settings.pool, self.settings.threads)
        if len(limits := self.concurrency) == len(self.stages):
            # As many as can run: the other tasks stay where another worker finds them.
            slots = min(slots, sum(limits.values()))
        return slots

    def execution(
        self,
        objects: ObjectStore | None,
        logs: LogBuffer | None,
        report: Callable[[AttemptId, Progress], object],
    ) -> Execution:
        """Runs single attempts; see `Execution`."""
        return Execution(
            self.stages, objects, self.settings.threads, logs, report, self.around, self.redactor.text
        )
