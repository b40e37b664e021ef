"""Runs one attempt. Every handler leads to exactly one result.

An exception of a handler is its failure, including `SystemExit`: only the worker ends its process.
A handler that exceeds its time is cancelled. If it swallows the cancellation, or runs on a thread,
it is abandoned: the attempt fails, and a later outcome of the handler is dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from penstock import forking, tracing
from penstock.contracts.progress import Progress
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import AWAY_MS, HANDED_BACK, Failure, StageResult
from penstock.core import completion
from penstock.core.attempt import AttemptId
from penstock.core.retry import Backoff, StageRetries
from penstock.errors import CorruptObject, ObjectsUnavailable
from penstock.objects import ObjectStore
from penstock.worker.around import Around
from penstock.worker.callables import is_async
from penstock.worker.contexts import Contexts
from penstock.worker.current import CurrentAttempt, attempt_scope
from penstock.worker.log_buffer import LogBuffer, RunLog
from penstock.worker.missing_handlers import MissingHandlers
from penstock.worker.outcomes import Outcome, Task
from penstock.worker.priority_semaphore import PrioritySemaphore
from penstock.worker.results import (
    conclude,
    failed,
    failure_of,
    make_failure,
    make_result,
    message_of,
    now_ms,
    without_secrets,
)
from penstock.worker.typed_contexts import InvalidContext, Reader

# Called with the task, and with its dependencies by name.
Handler = Callable[..., Outcome | Awaitable[Outcome]]

# Seconds that a handler gets to end after its cancellation, before it is abandoned.
ABANDON_S = 5.0
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


class HandlerTimeout:
    """The timeout of a handler, as a `with` block around it.

    Costs a third of `asyncio.timeout`, and handles a handler that swallows its cancellation.

    Args:
        timeout_s: seconds until the handler is cancelled.
        abandon: called when the handler has not ended `ABANDON_S` after its cancellation.

    Attributes:
        abandoned: whether `abandon` was called.
        on_thread: whether a thread of the handler runs, which cannot be ended from outside.
    """

    def __init__(self, timeout_s: float, abandon: Callable[[Failure], None]) -> None:
        self.abandoned = False
        self.on_thread = False
        self._timeout_s = timeout_s
        self._abandon = abandon
        self._expired = False
        self._task: asyncio.Task[Any]
        self._timer: asyncio.TimerHandle

    def __enter__(self) -> None:
        current = asyncio.current_task()
        assert current is not None
        self._task = current
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self._timer.cancel()
        if not self._expired:
            return
        other_cancellations = self._task.uncancel()
        # Another cancellation is the worker's stop, and has precedence. A handler that swallowed
        # the timeout's cancellation and ended has its own outcome.
        if isinstance(error, asyncio.CancelledError) and other_cancellations == 0:
            thread = "; its thread was abandoned" if self.on_thread else ""
            raise TimeoutError(f"the handler took longer than {self._timeout_s:g} s{thread}") from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
        self._timer = asyncio.get_running_loop().call_later(ABANDON_S, self._abandon_handler)

    def _abandon_handler(self) -> None:
        self.abandoned = True
        message = (
            f"the handler took longer than {self._timeout_s:g} s, swallowed its cancellation "
            f"and was abandoned {ABANDON_S:g} s later"
        )
        self._abandon(Failure(kind="Timeout", message=message))


class _Raised(Exception):  # noqa: N818 (not an error of its own)
    """Carries a synchronous handler's error: `StopIteration` cannot leave a coroutine."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


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
    ) -> None:
        # None costs nothing in each attempt.
        self._around = around or None
        self._stages = stages
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
            attempt=fence.attempt,
        ) as span:
            result = await self._logged(ready, abandon)
            if span is not None and result is not None:
                span.set_attributes(outcome=result.outcome.value)
                if result.error is not None:
                    span.fail(result.error.kind)
            return result

    def cancelled_itself(self, ready: ReadyTask) -> StageResult:
        """The failure of an attempt whose handler cancelled the task in which it ran."""
        stage = self._stages[ready.type, ready.fence.stage]
        return failed(ready, stage.retries, 0, Failure(kind="CancelledError", message=SELF_CANCELLED))

    async def _logged(self, ready: ReadyTask, abandon: Callable[[StageResult], None]) -> StageResult | None:
        """Runs one attempt; its log ends with its result."""
        run_log = self._logs.begin(ready.fence.attempt_id) if self._logs is not None else None

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
        stage = self._stages.get((ready.type, ready.fence.stage))
        if stage is None:
            return self._missing.hand_back(ready)
        timeout = HandlerTimeout(
            stage.timeout_s, lambda failure: abandon(failed(ready, stage.retries, started_ms, failure))
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
                fence.attempt,
                ready.tries,
                value,
                run_log=run_log,
                _report=self._report,
                _redact=self._redact,
            )
            with attempt_scope(CurrentAttempt(task, run_log)):
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
        except _Raised as raised:
            permanent = isinstance(raised.error, stage.permanent)
            result = failed(ready, stage.retries, started_ms, failure_of(raised.error), permanent=permanent)
        except ObjectsUnavailable as error:
            # Not charged: the handler has not run.
            failure = Failure(kind=HANDED_BACK, message=message_of(error))
            result = make_result(ready, completion.Outcome.RETRY, started_ms, delay_ms=AWAY_MS, error=failure)
        except BaseException as error:  # noqa: BLE001 (the error is the handler's result)
            # The next attempt would have the same context.
            permanent = isinstance(error, (CorruptObject, InvalidContext, *stage.permanent))
            result = failed(ready, stage.retries, started_ms, failure_of(error), permanent=permanent)
        return None if timeout.abandoned else result

    def _conclude(self, ready: ReadyTask, stage: Stage, returned: Any, started_ms: int) -> StageResult:
        result = conclude(ready, stage.retries, returned, started_ms)
        if result.next_stage is not None:
            self._missing.on_next(ready.type, ready.fence.stage, result.next_stage)
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
                    return await _on_thread(stage.handler, task, limit)
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
                return await _on_thread(partial(stage.handler, **arguments), task, limit)
            except _Raised as raised:
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


async def _on_thread(handler: Callable[[Task], Any], task: Task, limit: HandlerTimeout) -> Any:
    """The outcome of a handler that is no coroutine function.

    It may still return a coroutine, as a lambda does or a decorated function. Only a call can show
    that, so it is made on a thread, which the other kind needs.

    Raises:
        _Raised: the handler has raised an error on its thread.
        Exception: raised by its coroutine.
    """
    future = _start_thread(handler, task)
    limit.on_thread = True
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        # The thread is abandoned, and its permit goes to another attempt.
        task.cancel()
        future.cancel()
        raise
    limit.on_thread = False
    returned, error = future.result()
    if error is not None:
        raise _Raised(error)
    return await returned if inspect.isawaitable(returned) else returned


def _start_thread(
    handler: Callable[[Task], Any], task: Task
) -> asyncio.Future[tuple[Any, None] | tuple[None, BaseException]]:
    """Runs a synchronous handler on its own daemon thread, which cannot keep the process alive.

    The future's result is the handler's outcome, or its error.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, None] | tuple[None, BaseException]] = loop.create_future()
    context, process = contextvars.copy_context(), os.getpid()

    def settle(ended: tuple[Any, None] | tuple[None, BaseException]) -> None:
        if not future.done():
            future.set_result(ended)
        elif inspect.iscoroutine(ended[0]):
            # Nothing awaits it any more: it would warn.
            ended[0].close()

    def run() -> None:
        ended: tuple[Any, None] | tuple[None, BaseException]
        try:
            ended = (context.run(handler, task), None)
        except BaseException as error:  # noqa: BLE001 (the loop turns it into a result)
            ended = (None, error)
        forking.end_if_child(process, ended[1])
        # The process may have stopped meanwhile.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, ended)

    threading.Thread(target=run, name=f"{task.type}.{task.stage}-{task.attempt_id}", daemon=True).start()
    return future
