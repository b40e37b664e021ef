"""The results of attempts: of what handlers return, and of what they raise."""

from __future__ import annotations

import inspect
import random
import reprlib
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import Failure, StageResult, handed_back
from penstock.core import completion
from penstock.core.access import namespace_of
from penstock.core.retry import StageRetries
from penstock.worker.outcomes import KEEP, Done, Fail, Next, RetryAfter, Spawn, Wait
from penstock.worker.suspending import read_suspending
from penstock.worker.typed_contexts import InvalidContext, json_default

# Most characters of a traceback, of which the end is kept, and of a message.
TRACEBACK_LIMIT = 20_000
MESSAGE_LIMIT = 2_000
# Characters that are searched for secrets before the limits cut: a cut could divide a secret.
SEARCHED_CHARS = 200_000


def conclude(ready: ReadyTask, retries: StageRetries, returned: Any, started_ms: int) -> StageResult:
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
        return failed(ready, retries, started_ms, failure_of(error), permanent=True)
    if outcome is completion.Outcome.FAIL:
        return failed(ready, retries, started_ms, **fields)
    return make_result(ready, outcome, started_ms, **fields)


def _read(returned: Any) -> tuple[completion.Outcome, dict[str, Any]]:
    """The outcome that a handler returned, and the fields of its result.

    Raises:
        TypeError: it is no outcome, or one of its fields has a wrong type or value.
        InvalidRecord: its context is not JSON or contradicts its content type.
        BaseException: raised by a method of an object of the handler.
    """
    match returned:
        case Next(stage=name, context=value, delay_s=delay_s):
            return completion.Outcome.NEXT, {
                "next_stage": _stage_name("Next", name),
                "context": None if value is KEEP else Context.encode(value, json_default),
                "delay_ms": _milliseconds(delay_s) or None,
            }
        case Done(result=value):
            return completion.Outcome.DONE, {"context": Context.encode(value, json_default)}
        case Fail(reason=reason, permanent=permanent):
            error = Failure(kind="Fail", message=_message(str(reason)))
            return completion.Outcome.FAIL, {"permanent": bool(permanent), "failure": error}
        case RetryAfter(delay_s=delay_s, reason=reason):
            return completion.Outcome.RETRY, {
                "delay_ms": _milliseconds(delay_s) or None,
                "error": Failure(kind="RetryAfter", message=_message(str(reason))) if reason else None,
            }
        case Spawn() | Wait():
            return read_suspending(returned, partial(_stage_name, type(returned).__name__))
    if inspect.iscoroutine(returned):
        # It would warn later that it was never awaited.
        returned.close()
    raise TypeError(
        f"the handler returned {type(returned).__name__} ({_shown(returned)}); "
        "it must return Next, Done, Fail, RetryAfter, Spawn or Wait"
    )


def _stage_name(outcome: str, name: Any) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= 200 or _writable(name) != name:
        raise TypeError(
            f"{outcome} needs the name of a stage (1 to 200 characters, no NUL, no lone surrogate), "
            f"not {_shown(name)}"
        )
    # A subclass of str, such as an enumeration, becomes its text.
    return str.__str__(name)


def returned_result(
    ready: ReadyTask, reason: str, delay_ms: int | None = None, started_ms: int | None = None
) -> StageResult:
    """The result of a claimed attempt that did not end.

    Args:
        ready: the attempt.
        reason: for the task's history.
        delay_ms: milliseconds until the next attempt can start; None is at once.
        started_ms: when the attempt began, milliseconds since 1970; None is now.
    """
    now = now_ms()
    began_ms = now if started_ms is None else started_ms
    return handed_back(ready.fence, reason, delay_ms=delay_ms, started_ms=began_ms, finished_ms=now)


def make_result(ready: ReadyTask, outcome: completion.Outcome, started_ms: int, **fields: Any) -> StageResult:
    """A result that ends now."""
    return StageResult(
        fence=ready.fence, outcome=outcome, started_ms=started_ms, finished_ms=now_ms(), **fields
    )


def failed(
    ready: ReadyTask, retries: StageRetries, started_ms: int, failure: Failure, *, permanent: bool = False
) -> StageResult:
    """The result of an attempt that has failed."""
    delay_ms = None
    if retries.backoff is not None and not permanent:
        delay_ms = retries.delay_ms(ready.tries + 1, random.random())  # noqa: S311 (no secret)
    return make_result(
        ready,
        completion.Outcome.FAIL,
        started_ms,
        error=failure,
        max_attempts=retries.max_attempts,
        delay_ms=delay_ms,
        permanent=permanent,
    )


def failure_of(error: BaseException) -> Failure:
    """The failure of an exception of a handler, or of a context that does not fit it."""
    if isinstance(error, InvalidContext):
        # The traceback would show the worker, and no line of the handler.
        return Failure(kind=type(error).__name__, message=_message(message_of(error)))
    return make_failure(type(error).__name__, message_of(error), error)


def make_failure(kind: str, message: str, error: BaseException) -> Failure:
    """A failure with the traceback of an exception."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as broken:  # noqa: BLE001 (the handler's class has a broken attribute)
        text = f"the traceback cannot be printed: {type(broken).__name__}"
    if len(text) > SEARCHED_CHARS:
        # Whole lines: the end of a secret could not be recognised.
        text = text[-SEARCHED_CHARS:].partition("\n")[2] or "The last line is too long to be shown.\n"
    return Failure(
        kind=_writable(kind[:200])[:200],
        message=_message(message),
        traceback=_writable(text),
    )


def without_secrets(result: StageResult, redact: Callable[[str], str] | None) -> StageResult:
    """The result with an error without secrets and within its limits.

    The platform shows it to many.

    Args:
        result: of an attempt.
        redact: removes secrets; None leaves them.
    """
    error = result.error
    if error is None:
        return result
    message, trace = error.message, error.traceback
    if redact is not None:
        message, trace = redact(message), trace and redact(trace)
    message, trace = message[:MESSAGE_LIMIT], trace and trace[-TRACEBACK_LIMIT:]
    return replace(result, error=Failure(kind=error.kind, message=message, traceback=trace))


def message_of(error: BaseException) -> str:
    """The message of an exception, or its class without one."""
    try:
        return str(error) or type(error).__name__
    except BaseException as broken:  # noqa: BLE001 (the handler's class has a broken `__str__`)
        return f"{type(error).__name__}, which cannot be printed: {type(broken).__name__}"


def _message(text: str) -> str:
    # `without_secrets` cuts it.
    return _writable(text[:SEARCHED_CHARS])


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


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
