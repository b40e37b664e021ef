"""Runs one attempt. Every handler leads to exactly one result.

An exception of a handler is its failure, including `SystemExit`: only the worker ends its process.
A handler that exceeds its time is cancelled. If it swallows the cancellation, or runs on a thread,
it is abandoned: the attempt fails, and a later outcome of the handler is dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import reprlib
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from penstock import tracing
from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import AWAY_MS, HANDED_BACK, Failure, StageResult
from penstock.core import completion
from penstock.core.access import namespace_of
from penstock.core.task import Priority
from penstock.errors import CorruptObject, ObjectsUnavailable
from penstock.objects import ObjectStore
from penstock.worker.contexts import Contexts
from penstock.worker.missing_handlers import MissingHandlers
from penstock.worker.outcomes import KEEP, Done, Fail, Next, Outcome, RetryAfter, Task
from penstock.worker.priority_semaphore import PrioritySemaphore

Handler = Callable[[Task], Outcome | Awaitable[Outcome]]

# Most characters of a traceback, of which the end is kept, and of a message.
TRACEBACK_LIMIT = 20_000
MESSAGE_LIMIT = 2_000
# Seconds that a handler gets to end after its cancellation, before it is abandoned.
ABANDON_S = 5.0
SELF_CANCELLED = "the handler cancelled itself"


@dataclass(frozen=True, slots=True)
class Stage:
    """A registered handler.

    Attributes:
        handler: async, or synchronous and run on a thread.
        timeout_s: seconds that it may take.
        max_attempts: attempts, the first included; None is the type's limit.
        is_async: whether the handler is a coroutine function.
    """

    handler: Handler
    timeout_s: float
    max_attempts: int | None
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_async", inspect.iscoroutinefunction(self.handler))


class HandlerTimeout:
    """The timeout of an async handler, as a `with` block around it.

    Costs a third of `asyncio.timeout`, and handles a handler that swallows its cancellation.

    Args:
        timeout_s: seconds until the handler is cancelled.
        abandon: called when the handler has not ended `ABANDON_S` after its cancellation.
    """

    def __init__(self, timeout_s: float, abandon: Callable[[Failure], None]) -> None:
        self.abandoned = False
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
            raise TimeoutError(f"the handler took longer than {self._timeout_s:g} s") from error

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
    """

    def __init__(
        self, stages: Mapping[tuple[str, str], Stage], objects: ObjectStore | None, threads: int
    ) -> None:
        self._stages = stages
        self._contexts = Contexts(objects)
        self._threads = PrioritySemaphore(threads)
        self._missing = MissingHandlers(stages.keys())

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
            return await self._run(ready, abandon)
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
            result = await self._run(ready, abandon)
            if span is not None and result is not None:
                span.set_attributes(outcome=result.outcome.value)
                if result.error is not None:
                    span.fail(result.error.kind)
            return result

    def cancelled_itself(self, ready: ReadyTask) -> StageResult:
        """The failure of an attempt whose handler cancelled the task in which it ran."""
        stage = self._stages[ready.type, ready.fence.stage]
        return _failed(ready, stage, 0, Failure(kind="CancelledError", message=SELF_CANCELLED))

    async def _run(self, ready: ReadyTask, abandon: Callable[[StageResult], None]) -> StageResult | None:
        started_ms = _now_ms()
        stage = self._stages.get((ready.type, ready.fence.stage))
        if stage is None:
            return self._missing.hand_back(ready)
        timeout = HandlerTimeout(
            stage.timeout_s, lambda failure: abandon(_failed(ready, stage, started_ms, failure))
        )
        try:
            fence, value = ready.fence, await self._contexts.value_of(ready)
            task = Task(fence.id, ready.type, fence.stage, fence.step, fence.attempt, ready.tries, value)
            if stage.is_async:
                with timeout:
                    returned = await cast("Awaitable[Outcome]", stage.handler(task))
            else:
                returned = await self._on_thread(stage, task, ready.priority)
            result = _conclude(ready, stage, returned, started_ms)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            failure = _failure("CancelledError", SELF_CANCELLED, error)
            result = _failed(ready, stage, started_ms, failure)
        except TimeoutError as error:
            result = _failed(ready, stage, started_ms, _failure("Timeout", _message_of(error), error))
        except _Raised as raised:
            result = _failed(ready, stage, started_ms, _failure_of(raised.error))
        except ObjectsUnavailable as error:
            # Not charged: the handler has not run.
            failure = Failure(kind=HANDED_BACK, message=_message_of(error))
            result = _result(ready, completion.Outcome.RETRY, started_ms, delay_ms=AWAY_MS, error=failure)
        except BaseException as error:  # noqa: BLE001 (the error is the handler's result)
            # After a corrupt object, the next attempt would have the same context.
            permanent = isinstance(error, CorruptObject)
            result = _failed(ready, stage, started_ms, _failure_of(error), permanent=permanent)
        return None if timeout.abandoned else result

    async def _on_thread(self, stage: Stage, task: Task, priority: Priority) -> Any:
        async with self._threads.permit(priority):
            future = _start_thread(stage.handler, task)
            try:
                done, _pending = await asyncio.wait({future}, timeout=stage.timeout_s)
            except asyncio.CancelledError:
                task.cancelled = True
                raise
            if done:
                outcome, error = future.result()
                if error is not None:
                    raise _Raised(error)
                return outcome
        # A thread cannot be ended from outside. It is abandoned, and its permit goes to another
        # attempt.
        task.cancelled = True
        future.cancel()
        raise TimeoutError(f"the handler took longer than {stage.timeout_s:g} s; its thread was abandoned")


def _conclude(ready: ReadyTask, stage: Stage, returned: Any, started_ms: int) -> StageResult:
    """The result of what a handler returned; its context is inline, however large.

    It is read here in full, and alone: in the batch of results it could spoil the others.
    """
    try:
        outcome, fields = _read(returned)
        context = fields.get("context")
        if context is not None and context.ref is not None:
            context.ref.require_namespace(namespace_of(ready.type), "/context_ref")
    except BaseException as error:  # noqa: BLE001 (raised by an object of the handler, or by `_read`)
        # The handler has done its work, and would do it again with the same outcome.
        return _failed(ready, stage, started_ms, _failure_of(error), permanent=True)
    if outcome is completion.Outcome.FAIL:
        fields["max_attempts"] = stage.max_attempts
    return _result(ready, outcome, started_ms, **fields)


def _read(returned: Any) -> tuple[completion.Outcome, dict[str, Any]]:
    """The outcome that a handler returned, and the fields of its result.

    Raises:
        TypeError: it is no outcome, or one of its fields has a wrong type or value.
        InvalidRecord: its context is not JSON or contradicts its content type.
        BaseException: raised by a method of an object of the handler.
    """
    match returned:
        case Next(stage=name, context=value, delay_s=delay_s):
            name = cast("Any", name)
            if not isinstance(name, str) or not 1 <= len(name) <= 200 or _writable(name) != name:
                raise TypeError(
                    "Next needs the name of a stage (1 to 200 characters, no NUL, no lone surrogate), "
                    f"not {_shown(name)}"
                )
            return completion.Outcome.NEXT, {
                # A subclass of str, such as an enumeration, becomes its text.
                "next_stage": str.__str__(name),
                "context": None if value is KEEP else Context.encode(value),
                "delay_ms": _milliseconds(delay_s),
            }
        case Done(result=value):
            return completion.Outcome.DONE, {"context": Context.encode(value)}
        case Fail(reason=reason, permanent=permanent):
            error = Failure(kind="Fail", message=_message(str(reason)))
            return completion.Outcome.FAIL, {"permanent": bool(permanent), "error": error}
        case RetryAfter(delay_s=delay_s, reason=reason):
            return completion.Outcome.RETRY, {
                "delay_ms": _milliseconds(delay_s),
                "error": Failure(kind="RetryAfter", message=_message(str(reason))) if reason else None,
            }
    if inspect.iscoroutine(returned):
        # It would warn later that it was never awaited.
        returned.close()
    raise TypeError(
        f"the handler returned {type(returned).__name__} ({_shown(returned)}); "
        "it must return Next, Done, Fail or RetryAfter"
    )


def returned_result(ready: ReadyTask, reason: str) -> StageResult:
    """The result of a claimed attempt that did not end, so that the next one can start at once."""
    return _result(
        ready, completion.Outcome.RETRY, _now_ms(), error=Failure(kind=HANDED_BACK, message=reason)
    )


def _start_thread(
    handler: Handler, task: Task
) -> asyncio.Future[tuple[Any, None] | tuple[None, BaseException]]:
    """Runs a synchronous handler on its own daemon thread, which cannot keep the process alive.

    The future's result is the handler's outcome, or its error.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, None] | tuple[None, BaseException]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(ended: tuple[Any, None] | tuple[None, BaseException]) -> None:
        if not future.done():
            future.set_result(ended)

    def run() -> None:
        ended: tuple[Any, None] | tuple[None, BaseException]
        try:
            ended = (context.run(handler, task), None)
        except BaseException as error:  # noqa: BLE001 (the loop turns it into a result)
            ended = (None, error)
        # The process may have stopped meanwhile.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, ended)

    threading.Thread(target=run, name=f"{task.type}.{task.stage}-{task.token}", daemon=True).start()
    return future


def _result(ready: ReadyTask, outcome: completion.Outcome, started_ms: int, **fields: Any) -> StageResult:
    return StageResult(
        fence=ready.fence, outcome=outcome, started_ms=started_ms, finished_ms=_now_ms(), **fields
    )


def _failed(
    ready: ReadyTask, stage: Stage, started_ms: int, failure: Failure, *, permanent: bool = False
) -> StageResult:
    return _result(
        ready,
        completion.Outcome.FAIL,
        started_ms,
        error=failure,
        max_attempts=stage.max_attempts,
        permanent=permanent,
    )


def _failure_of(error: BaseException) -> Failure:
    return _failure(type(error).__name__, _message_of(error), error)


def _failure(kind: str, message: str, error: BaseException) -> Failure:
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as broken:  # noqa: BLE001 (the handler's class has a broken attribute)
        text = f"the traceback cannot be printed: {type(broken).__name__}"
    return Failure(
        kind=_writable(kind[:200])[:200],
        message=_message(message),
        traceback=_writable(text[-TRACEBACK_LIMIT:])[-TRACEBACK_LIMIT:],
    )


def _message_of(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except BaseException as broken:  # noqa: BLE001 (the handler's class has a broken `__str__`)
        return f"{type(error).__name__}, which cannot be printed: {type(broken).__name__}"


def _message(text: str) -> str:
    return _writable(text[:MESSAGE_LIMIT])[:MESSAGE_LIMIT]


def _shown(value: Any) -> str:
    """The beginning of a value's `repr`, which may be long or broken."""
    try:
        return reprlib.repr(value)[:100]
    except BaseException as broken:  # noqa: BLE001 (the handler's class has a broken `__repr__`)
        return f"a value that cannot be printed: {type(broken).__name__}"


def _writable(text: str) -> str:
    """Escapes lone surrogates, which UTF-8 refuses, and NULs, which PostgreSQL refuses."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _milliseconds(seconds: float) -> int:
    if not isinstance(cast("Any", seconds), int | float) or not 0 <= seconds <= 31_536_000:
        raise TypeError(f"a delay must be from 0 to 31,536,000 seconds, not {_shown(seconds)}")
    return round(seconds * 1000)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
