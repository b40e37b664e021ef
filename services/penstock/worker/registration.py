"""Checks what is registered with a worker: handlers, their arguments, functions of the start."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from penstock.core.retry import Backoff
from penstock.errors import SettingsError
from penstock.settings import MOST
from penstock.worker.callables import call_problem, yields

P = ParamSpec("P")
R = TypeVar("R")

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
# The longest delay of a task, in seconds: that of `stage-results.schema.json`.
_MOST_DELAY_S = 31_536_000


def suggesting(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose error for an unknown keyword names the nearest known one."""
    known = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY and name != "self"
    ]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for unknown in kwargs.keys() - set(known):
            nearest = get_close_matches(unknown, known, 1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}"
            raise TypeError(f"{function.__name__}() has no argument {unknown!r}: {hint}")
        return function(*args, **kwargs)

    return checked


def split_name(name: str) -> tuple[str, str]:
    """Type and stage of `type.stage`.

    Raises:
        SettingsError: it is no such name.
    """
    type_name, dot, stage_name = name.partition(".") if isinstance(cast("Any", name), str) else ("", "", "")
    if not (type_name and dot and stage_name):
        raise SettingsError(f"stage({name!r}): give type and stage, as in 'media.probe'")
    return type_name, stage_name


def check_handler(name: str, handler: Any) -> None:
    """Checks that a call of a handler can return an outcome.

    Raises:
        SettingsError: each of its attempts would fail.
    """
    if not callable(handler) or inspect.isclass(handler):
        kind = "a class: give an object of it" if inspect.isclass(handler) else "no function"
        raise SettingsError(f"stage({name!r}): {handler!r} is {kind}")
    if yields(handler):
        raise SettingsError(
            f"stage({name!r}): {handler!r} has a `yield`, but a handler returns one outcome: use `return`"
        )
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        # A function of C without a signature.
        return
    if not any(each.kind in _POSITIONAL for each in parameters):
        raise SettingsError(f"stage({name!r}): {handler!r} must take the task as its first parameter")


def check_hook(registered_as: str, function: Any) -> None:
    """Checks a function of `Worker.on_start` or `Worker.on_stop`.

    Raises:
        SettingsError: a call would fail, or run nothing.
    """
    if not callable(function):
        raise SettingsError(f"{registered_as}({function!r}): it is no function")
    if yields(function):
        raise SettingsError(
            f"{registered_as}({function!r}): it has a `yield`, so a call would run nothing: "
            "register a function of on_start and one of on_stop"
        )
    if problem := call_problem(function):
        raise SettingsError(f"{registered_as}({function!r}): it must take no arguments: {problem}")


def check_policy(
    name: str, *, timeout_s: float, max_attempts: int | None, backoff: Backoff | None, concurrency: int | None
) -> None:
    """Checks the numbers of a stage.

    Raises:
        SettingsError: one of them is not possible.
    """
    for argument, value in (("max_attempts", max_attempts), ("concurrency", concurrency)):
        if value is None:
            continue
        if type(cast("Any", value)) is not int:
            raise SettingsError(f"stage({name!r}): {argument}={value!r} must be an integer")
        if value < 1:
            raise SettingsError(f"stage({name!r}): {argument}={value} must be at least 1")
    # In this form the comparison also refuses NaN.
    if not (_is_number(timeout_s) and 0 < timeout_s <= MOST):
        raise SettingsError(f"stage({name!r}): timeout_s={timeout_s!r} must be above 0 and at most {MOST:g}")
    if backoff is not None:
        _check_backoff(name, backoff)


def _check_backoff(name: str, backoff: Backoff) -> None:
    if not isinstance(cast("Any", backoff), Backoff):
        raise SettingsError(
            f"stage({name!r}): backoff={backoff!r} must be a Backoff, as in Backoff(base_s=30, max_s=3600)"
        )
    values = (backoff.base_s, backoff.factor, backoff.max_s, backoff.jitter)
    if not all(map(_is_number, values)):
        raise SettingsError(f"stage({name!r}): {backoff} must have numbers")
    problems = backoff.problems()
    if not backoff.max_s <= _MOST_DELAY_S:
        problems.append(f"max_s={backoff.max_s} must be at most {_MOST_DELAY_S:,}")
    if problems:
        raise SettingsError(f"stage({name!r}): backoff: {'; '.join(problems)}")


def exceptions_of(
    name: str, permanent: type[BaseException] | Iterable[type[BaseException]]
) -> tuple[type[BaseException], ...]:
    """The exceptions of `permanent`.

    Raises:
        SettingsError: one of them is no class of exceptions.
    """
    exceptions: tuple[Any, ...] = (permanent,) if isinstance(permanent, type) else tuple(permanent)
    for each in exceptions:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise SettingsError(f"stage({name!r}): permanent={each!r} is no class of exceptions")
    return exceptions


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
