"""The attempt with which a worker goes on by itself, once the result before it is on Kafka."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.contracts.context import INLINE_LIMIT_BYTES
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.completion import Fence, Outcome
from penstock.core.going_on import follow_number

if TYPE_CHECKING:
    # That module imports this one.
    from penstock.worker.execution import Stage


def go_on(
    ready: ReadyTask, result: StageResult, stages: Mapping[tuple[str, str], Stage], now_s: float
) -> None:
    """Lets the task's next attempt follow its result, where that is permitted.

    Args:
        ready: the attempt that has ended.
        result: of it.
        stages: the worker's handlers by type and stage.
        now_s: on the monotonic clock of `ReadyTask.goes_on_until_s`.
    """
    context, stage = result.context, result.next_stage
    if (
        result.outcome is not Outcome.NEXT
        or stage is None
        or result.delay_ms is not None
        or ready.goes_on_until_s <= now_s
        or (handler := stages.get((ready.type, stage))) is None
        # Its attempts take turns in the backlog.
        or handler.concurrency is not None
        # A large one is stored on the way to Kafka.
        or (context is not None and (context.ref is not None or context.size > INLINE_LIMIT_BYTES))
    ):
        return
    fence = result.fence
    result.goes_on = follow_number(random.random())  # noqa: S311 (no secret)
    result.follows = ReadyTask(
        Fence(fence.id, fence.step + 1, stage, result.goes_on),
        ready.type,
        ready.context if context is None else context,
        ready.lease_ms,
        priority=ready.priority,
        traceparent=ready.traceparent,
        goes_on_until_s=ready.goes_on_until_s,
    )
