"""Running one service as one process.

Guarantees: SIGTERM or SIGINT asks the service to drain and stop; a second one, or a drain that outlasts its
grace, ends the process at once (status 70). An exception that leaves the service ends the process with
its message and the status of `exit_status`, so that a supervisor restarts it; what it leaves behind cannot keep
the process. In doubt this harness stops: a process that
cannot go on must not look alive.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock import logs, tracing
from penstock.errors import (
    CannotStart,
    Conflict,
    Forbidden,
    Invalid,
    KafkaRefused,
    NotFound,
    PenstockError,
    SettingsError,
    Unauthenticated,
    Unavailable,
)
from penstock.kafka.watchdog import LoopWatchdog

EXIT_FAILED = 1
EXIT_FORCED = 70
# Names the file that is there while a service serves.
READY_VARIABLE = "PENSTOCK_READY_FILE"
# How long the loop of a service may stand still.
STALL_S = 60.0
# How long what a service has left behind (a handler that cannot be cancelled) may keep its process.
LEAVE_S = 5.0

_STATUSES: tuple[tuple[type[PenstockError], int], ...] = (
    (Invalid, 3),
    (Conflict, 3),
    (Unauthenticated, 3),
    (Forbidden, 3),
    (NotFound, 4),
    (Unavailable, 5),
    (SettingsError, 6),
    (CannotStart, 6),
    (KafkaRefused, 6),
)

# Told once the service serves; the second line of a supervisor's "started".
Ready = Callable[[], None]
# A service: runs until `stopping` is set and everything in hand is settled, or raises.
Service = Callable[[asyncio.Event, Ready], Awaitable[None]]

log = logging.getLogger("penstock.process")


def run(name: str, service: Service, *, grace_s: float = 40.0, stall_s: float | None = None) -> int:
    """Runs `service` to its end and returns the exit status.

    Args:
        name: for the log.
        service: see `Service`.
        grace_s: seconds a drain may take before the process ends by force.
        stall_s: seconds for which the event loop may stand still before the process ends; None for a service that
            watches over itself.
    """
    if stall_s is not None:
        service = _watched(service, stall_s)
    if mark := os.environ.get(READY_VARIABLE):
        # Of a process before this one, in the same container.
        Path(mark).unlink(missing_ok=True)
    try:
        logs.configure(name, tracing.current_trace_id)
        tracing.configure(name)
    except PenstockError as error:
        return cannot_begin(name, error)
    collect_garbage_seldom()
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        status = runner.run(_supervise(name, service, grace_s))
        # The runner now waits for every task and thread that is left, for ever if one swallows its cancellation.
        leaving = _after(LEAVE_S, lambda: _leave(name, status))
    tracing.shutdown()
    leaving.cancel()
    return status


def _watched(service: Service, stall_s: float) -> Service:
    """The service, whose process ends when its loop stands still: alive but not progressing is a failure (O2a)."""

    async def watched(stopping: asyncio.Event, ready: Ready) -> None:
        await leading(service(stopping, ready), keep_wound(stall_s))

    return watched


async def keep_wound(stall_s: float) -> None:
    """Lets the process end when the loop it runs in stands still for `stall_s` seconds, until cancelled."""
    watchdog = LoopWatchdog()
    with watchdog.guard():
        while True:
            watchdog.wind(stall_s)
            await asyncio.sleep(stall_s / 6)


def cannot_begin(name: str, error: PenstockError) -> int:
    """Says in the log, in the format that is asked for, why a service does not begin; returns the exit status."""
    logs.configure_for_errors(name)
    _say_failed(name, error)
    return exit_status(error)


def exit_status(error: PenstockError) -> int:
    """The status with which a process ends that an error ends: the same for services, workers and the command line."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), EXIT_FAILED)


def collect_garbage_seldom() -> None:
    """Lets go of the start-up's objects and collects a tenth as often.

    A service makes tens of thousands of short-lived records a second, none of them in cycles; collecting every
    700 of them took a tenth of the CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """Uvloop's event loop where it is installed (it ships with the services' extra), else asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415 (optional dependency)
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def together(*parts: Awaitable[None]) -> None:
    """Runs the parts of a service side by side until all end; when one fails the others are cancelled.

    Raises:
        Exception: the first failure, as it was raised.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def leading(main: Awaitable[None], *attendants: Awaitable[None]) -> None:
    """Runs `main` to its end with endless attendants beside it, which are cancelled then.

    Raises:
        Exception: the first failure of any, as it was raised; the others are cancelled.
    """
    leader = asyncio.ensure_future(main)
    tasks = [leader, *(asyncio.ensure_future(attendant) for attendant in attendants)]
    try:
        while not leader.done():
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            tasks = [task for task in tasks if not task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _supervise(name: str, service: Service, grace_s: float) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            log.warning("%s: stopped by force on a second signal", name)
            os._exit(EXIT_FORCED)
        log.info("%s: stopping", name)
        stopping.set()
        _after(grace_s, lambda: _force(name, grace_s))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await service(stopping, lambda: _say_ready(name))
    except PenstockError as error:
        _say_failed(name, error)
        return exit_status(error)
    except Exception:
        log.exception("%s: failed", name)
        return EXIT_FAILED
    log.info("%s: stopped", name)
    return 0


def _say_failed(name: str, error: PenstockError) -> None:
    # No traceback: the message says it all.
    log.error("%s: %s: %s", name, type(error).__name__, error)


def _say_ready(name: str) -> None:
    log.info("%s: ready", name)
    # Whoever started this process may wait for the mark; unlike the log it is there at every log level.
    if mark := os.environ.get(READY_VARIABLE):
        Path(mark).touch()


def withdraw_ready(name: str) -> None:
    """Takes back that a service serves, until it says so again."""
    log.warning("%s: not ready", name)
    if mark := os.environ.get(READY_VARIABLE):
        Path(mark).unlink(missing_ok=True)


def _after(delay_s: float, act: Callable[[], None]) -> threading.Timer:
    # A thread, so that it fires even when the loop is stuck.
    timer = threading.Timer(delay_s, act)
    timer.daemon = True
    timer.start()
    return timer


class Deadline:
    """Ends the process (status 1) a while after `begin`, unless it is cancelled before; from any thread."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """Time runs."""
        self._timer = _after(self._delay_s, lambda: os._exit(EXIT_FAILED))

    def cancel(self) -> None:
        """It need not end."""
        if self._timer is not None:
            self._timer.cancel()


def _leave(name: str, status: int) -> None:
    log.warning("%s: something in it did not end within %.0f s of its end: leaving it", name, LEAVE_S)
    os._exit(status)


def _force(name: str, grace_s: float) -> None:
    log.error("%s: did not stop within %.0f s: ending the process", name, grace_s)
    os._exit(EXIT_FORCED)
