"""Dependencies: the further parameters of handlers, which providers give by name.

    @worker.provide
    async def session(db):
        async with db.acquire() as connection:
            yield connection

    @worker.stage("order.charge")
    async def charge(task, session): ...

An async generator is opened for each attempt that needs it, and closed after it. Any other function
is called once, when the worker starts. A value is given as it is. Providers may need others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.errors import SettingsError
from penstock.worker.callables import is_unopened, opens, yields
from penstock.worker.lifecycle import Results
from penstock.worker.outcomes import Task

# The parameter of providers that is the task of the attempt.
TASK = "task"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that a provider may fill.

    Attributes:
        name: its name, which is that of its provider.
        required: whether it has no default.
    """

    name: str
    required: bool


@dataclass(frozen=True, slots=True)
class _Opened:
    """A provider that is opened for each attempt."""

    name: str
    open: Callable[..., AbstractAsyncContextManager[Any]]
    needs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The dependencies of one handler.

    Attributes:
        names: its parameters.
        values: those of the worker.
        opened: providers of attempts, each after those that it needs.
    """

    names: tuple[str, ...]
    values: Mapping[str, Any]
    opened: tuple[_Opened, ...]

    async def open(self, stack: AsyncExitStack, task: Task) -> dict[str, Any]:
        """The arguments of an attempt; `stack` closes what was opened."""
        found = {**self.values, TASK: task}
        for each in self.opened:
            needed = {name: found[name] for name in each.needs}
            found[each.name] = await stack.enter_async_context(each.open(**needed))
        return {name: found[name] for name in self.names}


class Providers:
    """The providers of a worker, by name."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._values: dict[str, Any] = {}

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Adds a function.

        Raises:
            SettingsError: the name is no parameter's, or has a provider.
        """
        self._check(name)
        if not callable(function):
            raise SettingsError(f"provide({name!r}): {function!r} is no function")
        if yields(function) and not opens(function):
            raise SettingsError(f"provide({name!r}): write `async def`, as a generator must be async here")
        self._functions[name] = function

    def add_value(self, name: str, value: Any) -> None:
        """Adds a value; one that is added again takes its place, since each start adds its own.

        Raises:
            SettingsError: the name is no parameter's, or has a function.
        """
        if name in self._values:
            del self._values[name]
        self._check(name)
        self._values[name] = value

    def _check(self, name: Any) -> None:
        if not isinstance(name, str) or not name.isidentifier() or name == TASK:
            raise SettingsError(f"provide({name!r}): give the name of a parameter other than {TASK!r}")
        if name in self._functions or name in self._values:
            raise SettingsError(f"provide({name!r}): the name has a provider already")

    async def resolve(
        self,
        handlers: Mapping[tuple[str, str], Callable[..., Any]],
        results: Results = (),
    ) -> dict[tuple[str, str], Dependencies]:
        """The dependencies of handlers that have any; calls the functions of the worker.

        Args:
            handlers: by (type, stage).
            results: of functions that were called at the start; they are not called again.

        Raises:
            SettingsError: a provider is missing, or needs itself.
            Exception: of a function.
        """
        needed = {stage: parameters_of(handler, skipped=1) for stage, handler in handlers.items()}
        order = self._ordered(needed)
        values = dict(self._values)
        opened: dict[str, _Opened] = {}
        for name in order:
            function = self._functions[name]
            needs = self._given(parameters_of(function), {TASK})
            if opens(function):
                opened[name] = _Opened(name, partial(_open, function), needs)
                continue
            if returned := [value for hook, value in results if hook is function]:
                values[name] = returned[0]
                continue
            if wrong := [each for each in needs if each == TASK or each in opened]:
                raise SettingsError(
                    f"provide({name!r}): it is called once, so it cannot need {', '.join(wrong)} of an attempt"
                )
            value = function(**{each: values[each] for each in needs})
            values[name] = await value if inspect.isawaitable(value) else value
            if is_unopened(values[name]):
                raise SettingsError(
                    f"provide({name!r}): it returned {values[name]!r}, which nothing opens: "
                    "give an async generator function itself"
                )
        return {
            stage: self._dependencies(names, values, opened)
            for stage, parameters in needed.items()
            if (names := self._given(parameters))
        }

    def _dependencies(
        self, names: tuple[str, ...], values: Mapping[str, Any], opened: Mapping[str, _Opened]
    ) -> Dependencies:
        wanted = {*names}
        chosen: list[_Opened] = []
        for each in reversed([*opened.values()]):
            if each.name in wanted:
                wanted |= {*each.needs}
                chosen.append(each)
        return Dependencies(
            names,
            {name: value for name, value in values.items() if name in wanted},
            tuple(reversed(chosen)),
        )

    def _given(self, parameters: Iterable[Parameter], further: Iterable[str] = ()) -> tuple[str, ...]:
        known = {*self._functions, *self._values, *further}
        return tuple(each.name for each in parameters if each.name in known)

    def _ordered(self, needed: Mapping[tuple[str, str], list[Parameter]]) -> list[str]:
        """The functions that are needed, each behind those that it needs.

        Raises:
            SettingsError: a provider is missing, or needs itself.
        """
        order: list[str] = []
        missing: list[str] = []

        def visit(needs: Iterable[Parameter], of: str, path: tuple[str, ...], *, is_handler: bool) -> None:
            for each in needs:
                if each.name in self._values or (each.name == TASK and not is_handler):
                    continue
                function = self._functions.get(each.name)
                if function is None:
                    if each.required:
                        missing.append(f"{each.name!r} ({of})")
                elif each.name in path:
                    raise SettingsError(
                        f"provide({each.name!r}): it needs itself: {' → '.join((*path, each.name))}"
                    )
                elif each.name not in order:
                    inner = parameters_of(function)
                    visit(inner, f"provider {each.name!r}", (*path, each.name), is_handler=False)
                    order.append(each.name)

        for (type_name, stage), parameters in needed.items():
            visit(parameters, f"stage '{type_name}.{stage}'", (), is_handler=True)
        if missing:
            has = ", ".join(sorted({*self._functions, *self._values})) or "none"
            raise SettingsError(
                f"no provider for {', '.join(missing)}; the worker has: {has}. "
                "Register one with @worker.provide or worker.provide(name, value)"
            )
        return order


def _open(function: Callable[..., Any], **needed: Any) -> AbstractAsyncContextManager[Any]:
    """Opens a provider: an async generator, or what `asynccontextmanager` has made of one."""
    made = function(**needed)
    if isinstance(made, AbstractAsyncContextManager):
        return made
    return asynccontextmanager(lambda: made)()


def parameters_of(function: Callable[..., Any], *, skipped: int = 0) -> list[Parameter]:
    """The parameters of a function that can be given by name.

    Args:
        function: a handler or a provider.
        skipped: how many of the first ones are left out.

    Raises:
        SettingsError: a further one cannot be given by name.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []
    found = []
    for number, each in enumerate(parameters):
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        if number < skipped and each.kind is not each.KEYWORD_ONLY:
            continue
        required = each.default is each.empty
        if each.kind is each.POSITIONAL_ONLY:
            if required:
                raise SettingsError(f"the parameter {each.name!r} of {function!r} cannot be given by name")
            continue
        found.append(Parameter(each.name, required))
    return found
