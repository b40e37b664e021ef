"""Runs one attempt. Every handler leads to exactly one result.

An exception of a handler is its failure, including `SystemExit`: only the worker ends its process.
A handler that exceeds its time is cancelled. If it swallows the cancellation, or runs on a thread,
it is abandoned: the attempt fails, and a later outcome of the handler is dropped.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from penstock import forking, tracing
from penstock.contracts.progress import Progress
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import AWAY_MS, Failure, StageResult
from penstock.core.attempt import AttemptId, count_of
from penstock.core.retry import Backoff, StageRetries
from penstock.errors import CorruptObject, ObjectsUnavailable
from penstock.objects import ObjectStore
from penstock.worker.around import Around
from penstock.worker.callables import is_async
from penstock.worker.contexts import Contexts
from penstock.worker.current import attempt_scope
from penstock.worker.going_on import go_on
from penstock.worker.handler_call import ABANDON_S, HandlerTimeout, Raised, call_on_thread
from penstock.worker.log_buffer import LogBuffer, RunLog
from penstock.worker.missing_handlers import MissingHandlers
from penstock.worker.outcomes import Outcome, Task
from penstock.worker.priority_semaphore import PrioritySemaphore
from penstock.worker.results import (
    conclude,
    failed,
    failure_of,
    make_failure,
    message_of,
    now_ms,
    returned_result,
    without_secrets,
)
from penstock.worker.typed_contexts import InvalidContext, Reader

# Called with the task, and with its dependencies by name.
Handler = Callable[..., Outcome | Awaitable[Outcome]]

SELF_CANCELLED = "the handler cancelled itself"


@dataclass(frozen=True, slots=True)
class Stage:
    """A registered handler.

    Attributes:
        handler: async, or run on a thread; the coroutine that it may return there runs in the loop.
        timeout_s: seconds that it may take.
        max_attempts: attempts, the first included; None is the type's limit.
        read: converts the context for a handler with a typed one; None leaves it as it is.
        permanent: exceptions after which the stage is not tried again.
        backoff: delays after failures; None are the type's.
        concurrency: most attempts of the stage at once in this process; None is no limit.
        retries: `max_attempts` and `backoff`.
        is_async: whether the handler is a coroutine function.
    """

    handler: Handler
    timeout_s: float
    max_attempts: int | None
    read: Reader | None = None
    permanent: tuple[type[BaseException], ...] = ()
    backoff: Backoff | None = None
    concurrency: int | None = None
    retries: StageRetries = field(init=False)
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "retries", StageRetries(self.max_attempts, self.backoff))
        object.__setattr__(self, "is_async", is_async(self.handler))


class Execution:
    """Runs attempts.

    Args:
        stages: handlers by (type, stage).
        objects: the object store of large contexts; None when a gateway sends them inline.
        threads: most synchronous handlers at once.
        logs: takes what handlers log; None leaves it in the worker's own output.
        report: called with each report of progress, from any thread.
        around: middleware and dependencies, which have started; None is nothing.
        redact: removes secrets from what the platform shows: reports of progress, and the errors of
            attempts.
        abandon_s: seconds that a handler gets to end after its cancellation, before it is
            abandoned.
    """

    def __init__(
        self,
        stages: Mapping[tuple[str, str], Stage],
        objects: ObjectStore | None,
        threads: int,
        logs: LogBuffer | None = None,
        report: Callable[[AttemptId, Progress], object] = lambda _attempt_id, _progress: None,
        around: Around | None = None,
        redact: Callable[[str], str] | None = None,
        *,
        abandon_s: float = ABANDON_S,
    ) -> None:
        self._abandon_s = abandon_s
        # None costs nothing in each attempt.
        self._around = around or None
        self.stages = stages
        self._report = report
        self._redact = redact
        self._contexts = Contexts(objects)
        self._threads = PrioritySemaphore(threads)
        self._missing = MissingHandlers(stages.keys())
        self._logs = logs
        self._process = os.getpid()

    async def run(self, ready: ReadyTask, abandon: Callable[[StageResult], None]) -> StageResult | None:
        """Runs one attempt to its result.

        Args:
            ready: the attempt.
            abandon: called with the result when the handler does not end after its cancellation.
                This call then continues until the handler ends, and returns None.

        Raises:
            CancelledError: the worker stops; the handler was cancelled.
        """
        if ready.traceparent is None:
            return await self._logged(ready, abandon)
        fence = ready.fence
        with tracing.span(
            "attempt",
            ready.traceparent,
            kind="consumer",
            task_id=fence.id,
            type=ready.type,
            stage=fence.stage,
            attempt=count_of(fence.attempt),
        ) as span:
            result = await self._logged(ready, abandon)
            if span is not None and result is not None:
                span.set_attributes(outcome=result.outcome.value)
                if result.error is not None:
                    span.fail(result.error.kind)
            return result

    def cancelled_itself(self, ready: ReadyTask) -> StageResult:
        """The failure of an attempt whose handler cancelled the task in which it ran."""
        stage = self.stages[ready.type, ready.fence.stage]
        return failed(ready, stage.retries, 0, Failure(kind="CancelledError", message=SELF_CANCELLED))

    async def _logged(self, ready: ReadyTask, abandon: Callable[[StageResult], None]) -> StageResult | None:
        """Runs one attempt; its log ends with its result."""
        run_log = self._logs.begin(ready.attempt_id.counted, ready.token) if self._logs is not None else None

        def abandon_logged(result: StageResult) -> None:
            result = without_secrets(result, self._redact)
            if run_log is not None:
                run_log.conclude(result)
            abandon(result)

        result = None
        try:
            result = await self._run(ready, abandon_logged, run_log)
            if result is not None:
                result = without_secrets(result, self._redact)
        finally:
            # Without a result the attempt was cancelled, or has ended when it was abandoned.
            if run_log is not None:
                run_log.conclude(result)
        return result

    async def _run(
        self, ready: ReadyTask, abandon: Callable[[StageResult], None], run_log: RunLog | None
    ) -> StageResult | None:
        started_ms = now_ms()
        stage = self.stages.get((ready.type, ready.fence.stage))
        if stage is None:
            return self._missing.hand_back(ready)
        timeout = HandlerTimeout(
            stage.timeout_s,
            lambda failure: abandon(failed(ready, stage.retries, started_ms, failure)),
            self._abandon_s,
        )
        try:
            fence, value = ready.fence, await self._contexts.value_of(ready)
            if stage.read is not None:
                value = stage.read(value)
            task = Task(
                fence.id,
                ready.type,
                fence.stage,
                fence.step,
                count_of(fence.attempt),
                ready.tries,
                value,
                run_log=run_log,
                _report=lambda _counted, progress: self._report(ready.attempt_id, progress),
                _redact=self._redact,
            )
            with attempt_scope(task):
                returned = await self._call(stage, task, ready, timeout)
            result = self._conclude(ready, stage, returned, started_ms)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            failure = make_failure("CancelledError", SELF_CANCELLED, error)
            result = failed(ready, stage.retries, started_ms, failure)
        except TimeoutError as error:
            failure = make_failure("Timeout", message_of(error), error)
            result = failed(
                ready, stage.retries, started_ms, failure, permanent=isinstance(error, stage.permanent)
            )
        except Raised as raised:
            permanent = isinstance(raised.error, stage.permanent)
            result = failed(ready, stage.retries, started_ms, failure_of(raised.error), permanent=permanent)
        except ObjectsUnavailable as error:
            # Not charged: the handler has not run.
            result = returned_result(ready, message_of(error), AWAY_MS, started_ms)
        except BaseException as error:  # noqa: BLE001 (the error is the handler's result)
            # The next attempt would have the same context.
            permanent = isinstance(error, (CorruptObject, InvalidContext, *stage.permanent))
            result = failed(ready, stage.retries, started_ms, failure_of(error), permanent=permanent)
        return None if timeout.abandoned else result

    def _conclude(self, ready: ReadyTask, stage: Stage, returned: Any, started_ms: int) -> StageResult:
        result = conclude(ready, stage.retries, returned, started_ms)
        if result.next_stage is not None:
            self._missing.on_next(ready.type, ready.fence.stage, result.next_stage)
            go_on(ready, result, self.stages, time.monotonic())
        return result

    async def _call(self, stage: Stage, task: Task, ready: ReadyTask, limit: HandlerTimeout) -> Any:
        try:
            if self._around is not None:
                return await self._surrounded(self._around, stage, task, ready, limit)
            if stage.is_async:
                with limit:
                    return await cast("Awaitable[Outcome]", stage.handler(task))
            async with self._threads.permit(ready.priority):
                with limit:
                    return await call_on_thread(stage.handler, task, limit)
        finally:
            forking.end_if_child(self._process, sys.exception())
            # Those of threads that the handler has started.
            task.end_commands()

    async def _surrounded(
        self, around: Around, stage: Stage, task: Task, ready: ReadyTask, limit: HandlerTimeout
    ) -> Outcome:
        """Calls a handler inside the worker's middleware; its time includes theirs."""

        async def call(task: Task, arguments: Mapping[str, Any]) -> Any:
            if stage.is_async:
                try:
                    return await cast("Awaitable[Outcome]", stage.handler(task, **arguments))
                finally:
                    # Before the parent's middleware.
                    forking.end_if_child(self._process, sys.exception())
            try:
                return await call_on_thread(partial(stage.handler, **arguments), task, limit)
            except Raised as raised:
                if isinstance(raised.error, StopIteration):
                    raise
                error = raised.error
            # Middleware sees the error of the handler, with its own cause and context: they would
            # be replaced in the block above.
            raise error

        async with AsyncExitStack() as stack:
            if not stage.is_async:
                await stack.enter_async_context(self._threads.permit(ready.priority))
            with limit:
                return await around.call((ready.type, ready.fence.stage), task, call)
