"""Finds out whether a callable that a user registers is async, or a generator."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

# The results of `contextmanager` and `asynccontextmanager`.
_MANAGERS = (contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager)  # noqa: SLF001 (they have no public names)


def innermost(function: Any) -> Any:
    """The function whose body a call runs: inside `partial`, and of an object with `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return getattr(function, "__call__", function)  # noqa: B004 (the method is what is looked at)


def is_async(function: Any) -> bool:
    """Whether a call returns a coroutine for certain; other functions may return one as well."""
    return any(map(inspect.iscoroutinefunction, (function, innermost(function))))


def yields(function: Any) -> bool:
    """Whether the body of a function has a `yield`, so that a call runs nothing of it."""
    body = innermost(function)
    return inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body)


def opens(function: Any) -> bool:
    """Whether a function is an async generator, perhaps with a decorator around it."""
    body = innermost(function)
    return inspect.isasyncgenfunction(body) or (
        not is_async(body) and inspect.isasyncgenfunction(inspect.unwrap(body))
    )


def is_unopened(value: Any) -> bool:
    """Whether a value is a generator, or the context manager of one, that nothing has begun."""
    return inspect.isgenerator(value) or inspect.isasyncgen(value) or isinstance(value, _MANAGERS)


def call_problem(function: Any, *arguments: object) -> str | None:
    """Why a call with these arguments cannot succeed; None if it can, or none is known."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        # A function of C without a signature.
        return None
    return None
