"""Running one attempt: whatever the handler does, one result comes of it."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import Failure, StageResult
from penstock.core import completion
from penstock.errors import PenstockError
from penstock.objects import ObjectStore
from penstock.worker.outcomes import KEEP, Done, Fail, Next, Outcome, RetryAfter, Task

Handler = Callable[[Task], Outcome | Awaitable[Outcome]]

# What is kept of a traceback and of a message: the end tells most.
TRACEBACK_LIMIT = 20_000
MESSAGE_LIMIT = 2_000


@dataclass(frozen=True, slots=True)
class Stage:
    """A registered handler.

    Attributes:
        handler: async, or sync and then run on a thread.
        timeout_s: seconds it may take.
        max_attempts: tries, the first included; None is the type's own limit.
    """

    handler: Handler
    timeout_s: float
    max_attempts: int | None

    @property
    def is_async(self) -> bool:
        """Whether calling the handler gives an awaitable."""
        return inspect.iscoroutinefunction(self.handler)


class Execution:
    """Runs attempts.

    Args:
        stages: handlers by (type, stage).
        objects: where large contexts are.
        threads: most synchronous handlers at once.
    """

    def __init__(self, stages: Mapping[tuple[str, str], Stage], objects: ObjectStore, threads: int) -> None:
        self._stages = stages
        self._objects = objects
        self._threads = asyncio.Semaphore(threads)

    async def run(self, ready: ReadyTask) -> StageResult:
        """Runs one attempt to its result.

        Raises:
            CancelledError: the worker stops; the handler was cancelled.
        """
        started_ms = _now_ms()
        stage = self._stages.get((ready.type, ready.fence.stage))
        if stage is None:
            known = ", ".join(sorted(name for type_name, name in self._stages if type_name == ready.type))
            reason = (
                f"this worker has no handler for stage {ready.fence.stage!r} of {ready.type}; it has: {known}"
            )
            return _result(
                ready, completion.Outcome.FAIL, started_ms, error=Failure(kind="NoHandler", message=reason)
            )
        try:
            context = await self._objects.check_out(ready.context) if ready.context.ref else ready.context
            fence = ready.fence
            task = Task(
                fence.id, ready.type, fence.stage, fence.step, fence.attempt, ready.tries, context.decode()
            )
            outcome = await self._call(stage, task)
            return await self._conclude(ready, stage, outcome, started_ms)
        except TimeoutError as error:
            failure = _failure("Timeout", str(error) or "TimeoutError", error)
        except PenstockError as error:
            failure = _failure(type(error).__name__, str(error), error)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            failure = _failure("CancelledError", "the handler cancelled itself", error)
        except Exception as error:  # noqa: BLE001 (whatever the handler raises is its result)
            failure = _failure(type(error).__name__, str(error), error)
        return _result(
            ready, completion.Outcome.FAIL, started_ms, error=failure, max_attempts=stage.max_attempts
        )

    async def _call(self, stage: Stage, task: Task) -> Any:
        if stage.is_async:
            return await self._in_time(cast("Awaitable[Outcome]", stage.handler(task)), stage.timeout_s)
        async with self._threads:
            future = _on_thread(stage.handler, task)
            done, _pending = await asyncio.wait({future}, timeout=stage.timeout_s)
            if done:
                return future.result()
        # Nothing can end a thread from outside: it is left to itself, and its place is given to another.
        future.cancel()
        raise TimeoutError(f"the handler took longer than {stage.timeout_s:g} s; its thread was left behind")

    async def _in_time(self, handling: Awaitable[Outcome], timeout_s: float) -> Outcome:
        # What asyncio.timeout does, with a third of its work: it is done at the rate of stages.
        current = asyncio.current_task()
        assert current is not None
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            current.cancel()

        timer = asyncio.get_running_loop().call_later(timeout_s, expire)
        try:
            outcome = await handling
        except asyncio.CancelledError:
            # Another cancellation beside ours is the worker's stop, and wins.
            if expired and current.uncancel() == 0:
                raise TimeoutError(f"the handler took longer than {timeout_s:g} s") from None
            raise
        else:
            if expired:
                current.uncancel()  # the handler swallowed it and ended in its own way
            return outcome
        finally:
            timer.cancel()

    async def _conclude(self, ready: ReadyTask, stage: Stage, outcome: Any, started_ms: int) -> StageResult:
        match outcome:
            case Next(stage=name, context=value, delay_s=delay_s):
                if not isinstance(cast("Any", name), str) or not 1 <= len(name) <= 200:
                    raise TypeError(f"Next needs the name of a stage (1 to 200 characters), not {name!r}")
                context = None if value is KEEP else await self._objects.check_in(Context.encode(value))
                return _result(
                    ready,
                    completion.Outcome.NEXT,
                    started_ms,
                    next_stage=name,
                    context=context,
                    delay_ms=_milliseconds(delay_s),
                )
            case Done(result=value):
                context = await self._objects.check_in(Context.encode(value))
                return _result(ready, completion.Outcome.DONE, started_ms, context=context)
            case Fail(reason=reason, permanent=permanent):
                return _result(
                    ready,
                    completion.Outcome.FAIL,
                    started_ms,
                    permanent=bool(permanent),
                    max_attempts=stage.max_attempts,
                    error=Failure(kind="Fail", message=str(reason)[:MESSAGE_LIMIT]),
                )
            case RetryAfter(delay_s=delay_s, reason=reason):
                error = Failure(kind="RetryAfter", message=str(reason)[:MESSAGE_LIMIT]) if reason else None
                return _result(
                    ready, completion.Outcome.RETRY, started_ms, delay_ms=_milliseconds(delay_s), error=error
                )
            case _:
                raise TypeError(
                    f"the handler returned {type(outcome).__name__} ({str(outcome)[:100]!r}); "
                    "it must return Next, Done, Fail or RetryAfter"
                )


def handed_back(ready: ReadyTask, reason: str) -> StageResult:
    """The result of an attempt that was claimed and not run to its end: another worker shall have it, at once."""
    return _result(
        ready, completion.Outcome.RETRY, _now_ms(), error=Failure(kind="HandedBack", message=reason)
    )


def _on_thread(handler: Handler, task: Task) -> asyncio.Future[Any]:
    """Runs a synchronous handler on a daemon thread of its own: one that hangs must not keep the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = (future.set_result, context.run(handler, task))
        except BaseException as error:  # noqa: BLE001 (handed to the loop, which makes a result of it)
            outcome = (future.set_exception, error)
        # A loop that has closed meanwhile has nobody left to tell.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=f"{task.type}.{task.stage}-{task.token}", daemon=True).start()
    return future


def _result(ready: ReadyTask, outcome: completion.Outcome, started_ms: int, **fields: Any) -> StageResult:
    return StageResult(
        fence=ready.fence, outcome=outcome, started_ms=started_ms, finished_ms=_now_ms(), **fields
    )


def _failure(kind: str, message: str, error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    return Failure(kind=kind[:200], message=message[:MESSAGE_LIMIT], traceback=text[-TRACEBACK_LIMIT:])


def _milliseconds(seconds: float) -> int:
    if not isinstance(cast("Any", seconds), int | float) or not 0 <= seconds <= 31_536_000:
        raise TypeError(f"a delay must be from 0 to 31,536,000 seconds, not {seconds!r}")
    return round(seconds * 1000)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
