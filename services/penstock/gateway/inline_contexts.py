"""Fetches large contexts for HTTP workers, which cannot reach the object store."""

from __future__ import annotations

import dataclasses

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import AWAY_MS, Failure, StageResult, handed_back
from penstock.core.access import namespace_of
from penstock.core.completion import Outcome
from penstock.errors import CorruptObject, ObjectsUnavailable, TooLarge
from penstock.gateway.views import MAX_CONTEXT_BYTES
from penstock.objects import ObjectStore


async def with_inline_context(objects: ObjectStore, task: ReadyTask) -> ReadyTask | StageResult:
    """The task with its context inline, or the end of its attempt when its context cannot be read.

    While the store does not answer at all, the attempt is handed back, which is not charged. The
    tasks beside it, which may not need the store, do not wait.

    Args:
        objects: the object store.
        task: as its ready record has it.
    """
    if task.context.ref is None:
        return task
    try:
        context: Context = await objects.check_out(
            task.context, namespace_of(task.type), limit_bytes=MAX_CONTEXT_BYTES
        )
    except (CorruptObject, TooLarge) as error:
        return _failed(task, error, permanent=True)
    except ObjectsUnavailable as error:
        # One object that cannot be read must not hold up all others. A later attempt may read
        # it.
        if await objects.answers():
            return _failed(task, error, permanent=False)
        return handed_back(task.fence, str(error)[:2000], delay_ms=AWAY_MS)
    return dataclasses.replace(task, context=context)


def _failed(task: ReadyTask, error: Exception, *, permanent: bool) -> StageResult:
    failure = Failure(kind=type(error).__name__, message=str(error)[:2000])
    return StageResult(fence=task.fence, outcome=Outcome.FAIL, permanent=permanent, error=failure)
