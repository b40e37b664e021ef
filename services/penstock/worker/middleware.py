"""Middleware: async functions around each attempt, such as for traces, metrics and sessions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from penstock.errors import SettingsError
from penstock.worker.callables import call_problem, is_async
from penstock.worker.outcomes import Outcome, Task

# Calls the next middleware, or the handler; returns the outcome, or raises.
CallNext = Callable[[Task], Awaitable[Outcome]]
Middleware = Callable[[Task, CallNext], Awaitable[Outcome]]


def check_middleware(middleware: Any) -> None:
    """Checks what `Worker.middleware` registers.

    Raises:
        SettingsError: it is no async function of two arguments.
    """
    if not is_async(middleware):
        raise SettingsError(
            f"middleware({name_of(middleware)}): give an async function, as in "
            "`async def traced(task, call_next): return await call_next(task)`"
        )
    if problem := call_problem(middleware, "task", "call_next"):
        raise SettingsError(f"middleware({name_of(middleware)}): it must take (task, call_next): {problem}")


def within(middleware: Iterable[Middleware], call: CallNext) -> CallNext:
    """The call inside all middleware; the first one is the outermost."""
    for each in reversed([*middleware]):
        call = partial(_step, each, call)
    return call


async def _step(middleware: Middleware, call_next: CallNext, task: Task) -> Outcome:
    returned = await middleware(task, call_next)
    if returned is None:
        raise TypeError(
            f"the middleware {name_of(middleware)} returned None: return what call_next has returned"
        )
    return returned


def name_of(function: Any) -> str:
    """The name of a function, for errors."""
    return getattr(function, "__name__", None) or repr(function)
