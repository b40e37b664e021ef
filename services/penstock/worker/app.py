"""The worker: registration, and the parts that make it run."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from penstock import process
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.leases import Key
from penstock.errors import SettingsError
from penstock.objects import ObjectStore
from penstock.settings import MOST
from penstock.worker.beside import beside
from penstock.worker.execution import Execution, Stage, handed_back
from penstock.worker.hand import key_of
from penstock.worker.liaison import Liaison
from penstock.worker.settings import WorkerSettings
from penstock.worker.turns import Backlog

log = logging.getLogger(__name__)

# How long the handlers' loop may take to notice that the platform's has failed.
NOTICE_S = 15.0

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])


class Worker:
    """Runs stages of tasks.

    Settings that make no sense are told when it runs, in one line and without a traceback: they are the operator's.

    Args:
        settings: all of them; left out, they are read from the environment (`PENSTOCK_KAFKA` and so on).
        given: single settings that win over the environment, such as `kafka="broker:9092"`.
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
        """All of them.

        Raises:
            SettingsError: they make no sense.
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
            timeout_s: seconds it may take; None is the worker's setting.
            max_attempts: tries, the first included; None is the type's setting.

        Raises:
            SettingsError: no such name is possible, or the stage has a handler already.
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
            # Without settings it will never run.
            limit_s = MOST if isinstance(self._settings, SettingsError) else self._settings.timeout_s
        # Written so that NaN is refused too.
        if not 0 < limit_s <= MOST:
            raise SettingsError(f"stage({name!r}): timeout_s={limit_s} must be above 0 and at most {MOST:g}")

        def register(handler: AnyHandler) -> AnyHandler:
            self._stages[type_name, stage_name] = Stage(handler, limit_s, max_attempts)
            return handler

        return register

    def _limits(self) -> dict[str, dict[str, int]]:
        """By type, the stages that have their own limit of tries, with the limit."""
        limits: dict[str, dict[str, int]] = {type_name: {} for type_name, _stage in self._stages}
        for (type_name, stage_name), stage in self._stages.items():
            if stage.max_attempts is not None:
                limits[type_name][stage_name] = stage.max_attempts
        return limits

    def run(self) -> None:
        """Works until SIGTERM or SIGINT, then drains; ends the process with the service's status.

        Raises:
            SystemExit: always.
        """
        drain_s = 0.0 if isinstance(self._settings, SettingsError) else self._settings.drain_timeout_s
        # The drain, and then some for the last records.
        raise SystemExit(process.run("worker", self.serve, grace_s=drain_s + 15))

    async def serve(self, stopping: asyncio.Event, ready: process.Ready = lambda: None) -> None:
        """Works until `stopping` is set, then drains.

        Raises:
            SettingsError: they make no sense, or there is no stage.
            KafkaUnavailable: no broker answered at the start.
        """
        settings = self.settings
        if not self._stages:
            raise SettingsError("the worker has no stage: register handlers with @worker.stage('type.stage')")
        here = asyncio.get_running_loop()
        # A gateway hands contexts out inline and stores what it is given.
        objects = None if settings.worker_gateway else ObjectStore(settings.objects)
        async with beside("penstock platform") as platform:
            liaison = Liaison(
                settings,
                self.id,
                self._limits(),
                lambda claimed: here.call_soon_threadsafe(pool.start_all, claimed),
                lambda keys: here.call_soon_threadsafe(pool.drop, keys),
            )
            pool = Pool(Execution(self._stages, objects, settings.threads), liaison.add, settings.pool)
            pulled = asyncio.Event()

            async def work() -> None:
                await stopping.wait()
                platform.tell(liaison.stop)
                await pulled.wait()
                await pool.drain(settings.drain_timeout_s)
                platform.tell(liaison.finish)
                # The other loop has the rest.
                await asyncio.Event().wait()

            # A handler may block this loop when the other ends: then nobody here would notice.
            noticed = process.Deadline(NOTICE_S)

            async def speak() -> None:
                try:
                    await liaison.run(
                        lambda: here.call_soon_threadsafe(ready),
                        lambda: here.call_soon_threadsafe(process.withdraw_ready, "worker"),
                        lambda: here.call_soon_threadsafe(pulled.set),
                    )
                except Exception:
                    noticed.begin()
                    raise

            try:
                await process.leading(platform.call(speak()), work(), pool.watch())
            finally:
                noticed.cancel()


class Pool:
    """Runs so many attempts at once; the others wait, the most urgent first.

    Args:
        execution: runs one.
        report: takes results.
        size: how many at once.
    """

    def __init__(self, execution: Execution, report: Callable[[StageResult], None], size: int) -> None:
        self._execution = execution
        self._report = report
        self._size = size
        self._running: dict[Key, tuple[asyncio.Task[None], ReadyTask]] = {}
        self._backlog = Backlog()
        self._closed = False
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start_all(self, claimed: list[ReadyTask]) -> None:
        """Runs a batch of attempts, each now or, when all places are taken, when its turn comes."""
        for ready in claimed:
            if self._closed:
                self._report(handed_back(ready, "the worker is stopping"))
            else:
                self._backlog.add(ready)
        self._fill()

    def drop(self, keys: list[Key]) -> None:
        """Ends attempts that nobody wants any more, without a result: their handlers are cancelled."""
        unwanted = set(keys)
        self._backlog.drop(unwanted)
        for key in keys:
            entry = self._running.pop(key, None)
            if entry is not None:
                entry[0].cancel()
        self._fill()

    async def drain(self, timeout_s: float) -> None:
        """Hands back what waits, gives what runs `timeout_s` seconds, then cancels it and hands it back."""
        self._closed = True
        while self._backlog:
            self._report(handed_back(self._backlog.take(), "the worker is stopping"))
        if self._running:
            log.info("draining: %d handlers are still running", len(self._running))
            await asyncio.wait(self._tasks(), timeout=timeout_s)
        for task in self._tasks():
            task.cancel()
        if self._running:
            # A handler that swallows its cancellation must not keep the worker either.
            await asyncio.wait(self._tasks(), timeout=1.0)
        for key, (_task, ready) in list(self._running.items()):
            reason = f"the worker stopped after waiting {timeout_s:g} s for the handler"
            self._settle(key, handed_back(ready, reason))

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {task for task, _ready in self._running.values()}

    async def watch(self) -> None:
        """Waits until an attempt ends without a result, which is our mistake and not a handler's.

        Raises:
            Exception: whatever it was; better a worker that is restarted than an attempt that never ends.
        """
        await self._broken

    async def _run(self, ready: ReadyTask) -> None:
        key = key_of(ready)

        def abandon(result: StageResult) -> None:
            assert result.error is not None
            log.warning(
                "task %d, stage %s: %s",
                ready.fence.id,
                ready.fence.stage,
                result.error.message,
                extra={**ready.fence.ids(), "type": ready.type},
            )
            self._settle(key, result)

        result = await self._execution.run(ready, abandon)
        if result is not None:
            self._settle(key, result)

    def _settle(self, key: Key, result: StageResult) -> None:
        """Reports an attempt, unless it was reported before, and gives its place to the next."""
        if self._running.pop(key, None) is None:
            return
        self._report(result)
        self._fill()

    def _fill(self) -> None:
        while self._backlog and len(self._running) < self._size and not self._closed:
            ready = self._backlog.take()
            task = asyncio.create_task(self._run(ready))
            self._running[key_of(ready)] = (task, ready)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(error)
