"""The code that a worker runs around handlers: middleware and dependencies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

from penstock.worker.dependencies import Dependencies, Providers
from penstock.worker.lifecycle import Results
from penstock.worker.middleware import Middleware, within
from penstock.worker.outcomes import Outcome, Task

Stage = tuple[str, str]
# Calls a handler with further arguments.
CallHandler = Callable[[Task, Mapping[str, Any]], Awaitable[Outcome]]


class HasHandler(Protocol):
    """A registered stage."""

    @property
    def handler(self) -> Callable[..., Any]:
        """The handler of the stage."""


class Around:
    """The middleware and the providers of a worker.

    Args:
        stages: the registered stages by (type, stage).
    """

    def __init__(self, stages: Mapping[Stage, HasHandler]) -> None:
        self.middleware: list[Middleware] = []
        self.providers = Providers()
        self._stages = stages
        self._needs: dict[Stage, Dependencies] = {}

    async def start(self, results: Results = ()) -> None:
        """Finds what each handler needs, when the functions of the start have run.

        Args:
            results: of these functions.

        Raises:
            SettingsError: a provider is missing.
            Exception: of a provider.
        """
        handlers = {name: stage.handler for name, stage in self._stages.items()}
        self._needs = await self.providers.resolve(handlers, results)

    def __bool__(self) -> bool:
        """Whether a handler has anything around it."""
        return bool(self.middleware or self._needs)

    async def call(self, stage: Stage, task: Task, call: CallHandler) -> Outcome:
        """Calls a handler inside the middleware, with its dependencies.

        Raises:
            Exception: of the handler, a middleware or a provider.
        """
        needs = self._needs.get(stage)

        async def innermost(task: Task) -> Outcome:
            if needs is None:
                return await call(task, {})
            raised: BaseException | None = None
            stack: AsyncExitStack[bool] = AsyncExitStack()
            async with stack:
                arguments = await needs.open(stack, task)
                try:
                    return await call(task, arguments)
                except BaseException as error:
                    # Raised again below, even if a provider swallows it.
                    raised = error
                    raise
            # A provider that swallows the error of a handler does not change it.
            assert raised is not None
            raise raised

        return await within(self.middleware, innermost)(task)
