"""Hands back attempts of stages for which this worker has no handler.

While an upgrade adds a stage, workers with and without its handler read one topic. An attempt that
is handed back does not count as a failure, and its task is released again after a delay, perhaps to
a worker that has the handler. The delay grows, so that a stage which no worker has costs little.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection

from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult, handed_back
from penstock.core.going_on import is_follow
from penstock.core.retry import Backoff

log = logging.getLogger(__name__)

# Slow growth: beside one worker without the handler, a task may meet it several times in a row.
BACKOFF = Backoff(base_s=0.5, factor=1.5, max_s=20.0, jitter=0.5)
# Tasks name their stages, so names may come without end.
MOST_LOGGED = 1_000


class MissingHandlers:
    """Hands back attempts, and logs each stage once.

    Args:
        stages: (type, stage) of the handlers.
    """

    def __init__(self, stages: Collection[tuple[str, str]]) -> None:
        self._stages = stages
        self._logged: set[tuple[str, str]] = set()
        self._named: set[tuple[str, str]] = set()

    def on_next(self, type_name: str, stage: str, next_stage: str) -> None:
        """Warns once of a stage that a handler names and that this worker does not have.

        Another worker may have it, so its result stands.

        Args:
            type_name: of the task.
            stage: whose handler named it.
            next_stage: that the task enters.
        """
        named = (type_name, next_stage)
        if named in self._stages or named in self._named or len(self._named) >= MOST_LOGGED:
            return
        self._named.add(named)
        log.warning(
            "A handler sends its task to a stage that this worker has no handler for",
            extra={
                "event": "next_stage_unhandled",
                "task_type": type_name,
                "stage": stage,
                "next_stage": next_stage,
                "has": self._has(type_name),
            },
        )

    def _has(self, type_name: str) -> str:
        return ", ".join(sorted(name for of_type, name in self._stages if of_type == type_name))

    def hand_back(self, ready: ReadyTask) -> StageResult:
        """The result of an attempt whose stage has no handler here."""
        stage, type_name = ready.fence.stage, ready.type
        has = self._has(type_name)
        reason = f"this worker has no handler for stage {stage!r} of {type_name}; it has: {has}"
        if (type_name, stage) not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add((type_name, stage))
            log.warning(
                "This worker has no handler for a stage, and hands its tasks back to other workers",
                extra={"event": "handler_missing", "task_type": type_name, "stage": stage, "has": has},
            )
        # Attempts that neither failed nor lost their worker: an upper bound of those handed back.
        # Numbers that a worker has chosen tell nothing.
        attempt = 0 if is_follow(ready.fence.attempt) else ready.fence.attempt
        before = max(0, attempt - ready.tries)
        return handed_back(
            ready.fence,
            reason,
            no_handler=True,
            delay_ms=round(BACKOFF.delay_s(before + 1, random.random()) * 1000),  # noqa: S311 (no secret)
            finished_ms=time.time_ns() // 1_000_000,
        )
