"""The worker: registers handlers, and wires its parts."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from penstock import process
from penstock.errors import SettingsError
from penstock.objects import ObjectStore
from penstock.settings import MOST
from penstock.worker.execution import Execution, Stage
from penstock.worker.handler_pool import HandlerPool
from penstock.worker.loop_thread import loop_thread
from penstock.worker.platform_client import PlatformClient
from penstock.worker.settings import WorkerSettings

# Seconds that the handlers' loop gets to end after the platform client has failed.
FAILURE_GRACE_S = 15.0
# Seconds beyond the drain in which the last results must be written.
LAST_RESULTS_S = 15.0
# Seconds after the drain, at least, in which the object store can take the last results.
STORE_S = 5.0

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])


class Worker:
    """Runs stages of tasks.

    Wrong settings are reported when the worker runs, in one line without a traceback, because the
    operator corrects them.

    Args:
        settings: all settings; left out, they are read from the environment (`PENSTOCK_KAFKA` and
            so on).
        given: single settings with precedence over the environment, such as `kafka="broker:9092"`.
    """

    def __init__(self, settings: WorkerSettings | None = None, **given: Any) -> None:
        self._settings: WorkerSettings | SettingsError
        try:
            self._settings = settings or WorkerSettings.load(**given)
        except SettingsError as error:
            self._settings = error
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._stages: dict[tuple[str, str], Stage] = {}

    @property
    def settings(self) -> WorkerSettings:
        """All settings.

        Raises:
            SettingsError: a setting is wrong.
        """
        if isinstance(self._settings, SettingsError):
            raise self._settings
        return self._settings

    def stage(
        self, name: str, *, timeout_s: float | None = None, max_attempts: int | None = None
    ) -> Callable[[AnyHandler], AnyHandler]:
        """Registers the handler of a stage.

        Args:
            name: `type.stage`, split at the first dot.
            timeout_s: seconds that it may take; None is the worker's setting.
            max_attempts: attempts, the first included; None is the type's setting.

        Raises:
            SettingsError: the name or a limit is not possible, or the stage has a handler already.
        """
        type_name, dot, stage_name = name.partition(".")
        if not (type_name and dot and stage_name):
            raise SettingsError(f"stage({name!r}): give type and stage, as in 'media.probe'")
        if (type_name, stage_name) in self._stages:
            raise SettingsError(f"stage({name!r}) has a handler already")
        if max_attempts is not None and max_attempts < 1:
            raise SettingsError(f"stage({name!r}): max_attempts={max_attempts} must be at least 1")
        limit_s = timeout_s
        if limit_s is None:
            # With wrong settings the worker never runs, so any limit will do.
            limit_s = MOST if isinstance(self._settings, SettingsError) else self._settings.timeout_s
        # In this form the comparison also refuses NaN.
        if not 0 < limit_s <= MOST:
            raise SettingsError(f"stage({name!r}): timeout_s={limit_s} must be above 0 and at most {MOST:g}")

        def register(handler: AnyHandler) -> AnyHandler:
            self._stages[type_name, stage_name] = Stage(handler, limit_s, max_attempts)
            return handler

        return register

    def _limits(self) -> dict[str, dict[str, int]]:
        """By type: most attempts by stage, for stages with a limit of their own."""
        limits: dict[str, dict[str, int]] = {type_name: {} for type_name, _stage in self._stages}
        for (type_name, stage_name), stage in self._stages.items():
            if stage.max_attempts is not None:
                limits[type_name][stage_name] = stage.max_attempts
        return limits

    def run(self) -> None:
        """Works until SIGTERM or SIGINT, then drains; ends the process with an exit status.

        Raises:
            SystemExit: always.
        """
        drain_s = 0.0 if isinstance(self._settings, SettingsError) else self._settings.drain_timeout_s
        raise SystemExit(process.run("worker", self.serve, grace_s=drain_s + LAST_RESULTS_S, resumes=False))

    async def serve(self, stopping: asyncio.Event, ready: process.Ready = lambda: None) -> None:
        """Works until `stopping` is set, then drains.

        Raises:
            SettingsError: a setting is wrong, or no stage is registered.
            KafkaUnavailable: no broker answered at the start.
        """
        settings = self.settings
        if not self._stages:
            raise SettingsError("the worker has no stage: register handlers with @worker.stage('type.stage')")
        loop = asyncio.get_running_loop()
        # A gateway sends contexts inline, and stores those it receives.
        objects = None if settings.worker_gateway else ObjectStore(settings.objects)
        # Synchronous handlers need a thread each: without one they would only wait here.
        is_async = any(stage.is_async for stage in self._stages.values())
        slots = settings.pool if is_async else min(settings.pool, settings.threads)
        async with loop_thread("penstock platform") as platform:
            client = PlatformClient(
                settings,
                self.id,
                self._limits(),
                slots,
                lambda claimed: loop.call_soon_threadsafe(pool.start_all, claimed),
                lambda attempt_ids: loop.call_soon_threadsafe(pool.drop, attempt_ids),
                lambda attempt_id: loop.call_soon_threadsafe(pool.begin, attempt_id),
                lambda attempt_id: loop.call_soon_threadsafe(pool.end_turn, attempt_id),
                lambda attempt_id: pool.waits(attempt_id),  # noqa: PLW0108 (the pool follows)
                objects,
            )
            pool = HandlerPool(
                Execution(self._stages, objects, settings.threads),
                client.add,
                slots,
                lambda attempt_id: platform.call_soon(client.announce, attempt_id),
                lambda attempt_id: platform.call_soon(client.ended, attempt_id),
                lambda holds: platform.call_soon(client.hold, holds),
            )
            pulled = asyncio.Event()

            async def work() -> None:
                await stopping.wait()
                platform.call_soon(client.stop)
                await pulled.wait()
                drained_by_s = loop.time() + settings.drain_timeout_s
                await pool.drain(settings.drain_timeout_s)
                platform.call_soon(client.finish, max(drained_by_s - loop.time(), STORE_S))
                # The client ends the service once all results are reported.
                await asyncio.Event().wait()

            # Ends the process when a handler blocks this loop, which then cannot receive the
            # client's failure.
            exit_timer = process.ExitTimer(FAILURE_GRACE_S)

            async def run_client() -> None:
                try:
                    await client.run(
                        lambda: loop.call_soon_threadsafe(ready),
                        lambda: loop.call_soon_threadsafe(process.withdraw_ready, "worker"),
                        lambda: loop.call_soon_threadsafe(pulled.set),
                    )
                except Exception:
                    exit_timer.start()
                    raise

            try:
                await process.run_with_background(platform.run(run_client()), work(), pool.watch())
            finally:
                exit_timer.cancel()
