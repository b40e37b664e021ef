"""The worker: registers handlers, and runs them."""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from penstock import process
from penstock.core.early_start import EARLY_START
from penstock.core.redaction import Redactor
from penstock.core.retry import Backoff
from penstock.errors import CannotStart, GatewayUnavailable, SettingsError
from penstock.objects import ObjectStore
from penstock.settings import MOST
from penstock.worker.around import Around
from penstock.worker.capture import capturing
from penstock.worker.current import current_ids
from penstock.worker.execution import Stage
from penstock.worker.lifecycle import Lifecycle
from penstock.worker.metrics import end_stand_in, stand_in
from penstock.worker.middleware import Middleware, check_middleware, name_of
from penstock.worker.registered import Registered
from penstock.worker.registration import (
    check_handler,
    check_hook,
    check_policy,
    exceptions_of,
    split_name,
    suggesting,
)
from penstock.worker.settings import WorkerSettings
from penstock.worker.type_registration import TypeRegistration
from penstock.worker.typed_contexts import reader_of
from penstock.worker.types import CHANGE, Type, types_of
from penstock.worker.wiring import run_attempts

# Seconds beyond the drain in which the last results must be written.
LAST_RESULTS_S = 15.0

# Set while `penstock worker` imports a module, which must not run its worker then.
importing: ContextVar[bool] = ContextVar("importing", default=False)

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])
AnyMiddleware = TypeVar("AnyMiddleware", bound=Middleware)


def _new_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class Worker:
    """Runs stages of tasks.

    Wrong settings are reported when the worker runs, in one line without a traceback, because the
    operator corrects them.

    Args:
        settings: all settings; left out, they are read from the environment (`PENSTOCK_KAFKA` and
            so on).
        types: task types that the worker registers at a gateway before it takes its first task.
        types_differ: what it does when a registered type has other settings: "change" changes
            them, "refuse" ends the worker and names them.
        given: single settings with precedence over the environment, such as `kafka="broker:9092"`.

    Raises:
        TypeError: there is no such setting, or both were given.
        SettingsError: `types` is no list of types, or `types_differ` is impossible.
    """

    def __init__(
        self,
        settings: WorkerSettings | None = None,
        *,
        types: Iterable[Type] = (),
        types_differ: str = CHANGE,
        **given: Any,
    ) -> None:
        if settings is not None and given:
            raise TypeError(f"give either all settings or single ones, not both: {', '.join(given)}")
        self._types, self._types_differ = types_of(types, types_differ), types_differ
        self._settings: WorkerSettings | SettingsError
        try:
            self._settings = settings or WorkerSettings.load(**given)
        except SettingsError as error:
            self._settings = error
        self.id = _new_id()
        # Set by a second signal: running attempts are handed back.
        self._hurry = asyncio.Event()
        self._stages: dict[tuple[str, str], Stage] = {}
        self._redactor = Redactor(os.environ)
        self._around = Around(self._stages)
        self._early_start = EARLY_START
        self._lifecycle = Lifecycle(self._around.start)

    @property
    def settings(self) -> WorkerSettings:
        """All settings.

        Raises:
            SettingsError: a setting is wrong.
        """
        if isinstance(self._settings, SettingsError):
            raise self._settings
        return self._settings

    @suggesting
    def stage(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        max_attempts: int | None = None,
        permanent: type[BaseException] | Iterable[type[BaseException]] = (),
        backoff: Backoff | None = None,
        concurrency: int | None = None,
    ) -> Callable[[AnyHandler], AnyHandler]:
        """Registers the handler of a stage.

        The annotation of its first parameter may name the type of the context, as in `task:
        Task[Video]`. A context that does not fit fails its attempt for good.

        Args:
            name: `type.stage`, split at the first dot.
            timeout_s: seconds that it may take; None is the worker's setting.
            max_attempts: attempts, the first included; None is the type's setting.
            permanent: exceptions, or one, after which the stage is not tried again, because another
                attempt would fail likewise. `TimeoutError` includes the timeout of the handler.
            backoff: delays after failures, as in `Backoff(base_s=30, max_s=3600)`; None are those
                of the type, which apply in any case after the loss of a worker.
            concurrency: most attempts of this stage at once in this worker process; by default as
                many as the worker has handlers. Further ones are handed back for a while.

        Raises:
            TypeError: there is no such argument.
            SettingsError: the name, a limit, an exception or the type of the context is not
                possible, the stage has a handler already, or the handler can return no outcome.
        """
        type_name, stage_name = split_name(name)
        if (type_name, stage_name) in self._stages:
            raise SettingsError(f"stage({name!r}) has a handler already")
        limit_s = timeout_s
        if limit_s is None:
            # With wrong settings the worker never runs, so any limit will do.
            limit_s = MOST if isinstance(self._settings, SettingsError) else self._settings.timeout_s
        check_policy(
            name, timeout_s=limit_s, max_attempts=max_attempts, backoff=backoff, concurrency=concurrency
        )
        exceptions = exceptions_of(name, permanent)

        def register(handler: AnyHandler) -> AnyHandler:
            check_handler(name, handler)
            # The types of a handler in a function are local names there.
            read = reader_of(name, handler, sys._getframe(1).f_locals)  # noqa: SLF001 (the only way)
            self._stages[type_name, stage_name] = Stage(
                handler, limit_s, max_attempts, read, exceptions, backoff, concurrency
            )
            return handler

        return register

    def on_start(self, function: AnyHandler) -> AnyHandler:
        """Registers a function, async or not, that runs before the worker takes its first task.

        It takes no arguments, and runs in the event loop of async handlers. When it raises, the
        worker ends. Several run in the order of registration. `provide` gives handlers what it
        has opened. All attempts see the context variables that it sets.

        Raises:
            SettingsError: a call of the function would fail, or run nothing.
        """
        check_hook("on_start", function)
        self._lifecycle.starts.append(function)
        return function

    def on_stop(self, function: AnyHandler) -> AnyHandler:
        """Registers a function, async or not, that runs after the last handler has ended.

        Several run in the reverse order of registration, and have ten seconds together. They also
        run when a function of `on_start` raises.

        Raises:
            SettingsError: a call of the function would fail, or run nothing.
        """
        check_hook("on_stop", function)
        self._lifecycle.stops.append(function)
        return function

    def middleware(self, function: AnyMiddleware) -> AnyMiddleware:
        """Registers an async function around each attempt, of every stage, async or not.

            @worker.middleware
            async def traced(task: Task, call_next: CallNext) -> Outcome:
                with tracer.start_as_current_span(task.stage):
                    return await call_next(task)

        It returns what `call_next` returns, or another outcome. What it raises fails the attempt
        as an error of the handler does. The timeout of the stage includes it. Of several, the one
        that was registered first is the outermost.

        Raises:
            SettingsError: it is no async function of two arguments.
        """
        check_middleware(function)
        self._around.middleware.append(function)
        return function

    @overload
    def provide(self, provider: AnyHandler, /) -> AnyHandler: ...

    @overload
    def provide(self, name: str, /) -> Callable[[AnyHandler], AnyHandler]: ...

    @overload
    def provide(self, name: str, value: object, /) -> None: ...

    def provide(self, provider: Any, *value: Any) -> Any:
        """Registers what handlers receive as further parameters, by name.

            @worker.provide
            async def session(db: Pool) -> AsyncIterator[Connection]:
                async with db.acquire() as connection:
                    yield connection

            @worker.stage("order.charge")
            async def charge(task: Task[Order], session: Connection) -> Outcome: ...

        An async generator is opened for each attempt that needs it, and closed after it; it sees
        the error of the attempt. Any other function is called once, after the functions of
        `on_start`; one that is itself such a function is not called again. `provide(name, value)`
        gives a value, also from a function of `on_start`. The parameters of a provider are other
        providers, and `task` for an async generator. A required parameter without a provider ends
        the worker at its start.

        Args:
            provider: a function that has the name of the parameter; or the name, for a function
                with another name.
            value: the value of that name.

        Raises:
            SettingsError: the name is not possible or has a provider, or the function is no
                provider.
        """
        if value:
            self._around.providers.add_value(provider, *value)
            return None
        if not isinstance(provider, str):
            self._around.providers.add(name_of(provider), provider)
            return provider

        def register(function: AnyHandler) -> AnyHandler:
            self._around.providers.add(provider, function)
            return function

        return register

    def redact(self, value: str) -> None:
        """Removes a secret from task logs, wherever it appears in them.

        The values of environment variables are removed without this call if their names end with
        TOKEN, SECRET, PASSWORD or PASSPHRASE, or with the word KEY.

        Args:
            value: at least six characters.

        Raises:
            ValueError: it is shorter, and would blank other text.
        """
        self._redactor.add(value)

    @property
    def registered(self) -> Registered:
        """The handlers of this worker, and its functions of start and stop.

        Raises:
            SettingsError: a setting is wrong, or no stage is registered.
        """
        if not self._stages:
            raise SettingsError("the worker has no stage: register handlers with @worker.stage('type.stage')")
        return Registered(
            self.settings,
            self._stages,
            self._lifecycle,
            self._types,
            self._around,
            self._redactor,
            self._early_start,
        )

    def with_settings(self, settings: WorkerSettings) -> Worker:
        """A worker with the same handlers and other settings, which registers no types.

        The time limits of stages stay.
        """
        other = copy.copy(self)
        other._types = ()  # noqa: SLF001 (the same class)
        other._settings = settings  # noqa: SLF001 (the same class)
        other.id = _new_id()
        other._hurry = asyncio.Event()  # noqa: SLF001 (the same class)
        return other

    def run(self) -> None:
        """Works until SIGTERM or SIGINT, then drains; ends the process with an exit status.

        Raises:
            SystemExit: always.
            CannotStart: `penstock worker` imports the module.
        """
        if importing.get():
            raise CannotStart(
                "the module calls worker.run() when it is imported: put the call below `if __name__ == '__main__':`"
            )
        drain_s = 0.0 if isinstance(self._settings, SettingsError) else self._settings.drain_timeout_s
        status = process.run(
            "worker",
            self.serve,
            grace_s=drain_s + LAST_RESULTS_S,
            on_wait=lambda error: stand_in(self.settings, error),
            resumes=False,
            hurry=self._hurry.set,
            log_ids=current_ids,
        )
        raise SystemExit(status)

    async def serve(self, stopping: asyncio.Event, ready: process.Ready = lambda: None) -> None:
        """Works until `stopping` is set, then drains.

        Raises:
            SettingsError: a setting is wrong, no stage is registered, or a type is refused.
            KafkaUnavailable: no broker answered at the start.
        """
        registered = self.registered
        settings = registered.settings
        registration = TypeRegistration(settings, self._types, self._types_differ, self._stages.keys())
        if self._types:
            # With `refuse`, the registration may wait for long.
            await stand_in(settings, GatewayUnavailable("the types of this worker are not registered yet"))
        if not await registration.before_start(stopping):
            return
        await end_stand_in(settings)
        # A gateway sends contexts inline, and stores those it receives.
        objects = None if settings.worker_gateway else ObjectStore(settings.objects)
        async with self._lifecycle.running():
            with capturing(settings.task_logs):
                await run_attempts(
                    self.id, registered, objects, self._hurry, stopping, ready, registration.run()
                )
