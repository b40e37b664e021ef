"""Runs one service as one process.

Guarantees: SIGTERM or SIGINT makes the service drain and stop. A second signal, at least a second
later, or a drain that exceeds its grace period, ends the process at once (status 70). An exception
that leaves the service ends the process with its message and the status of `exit_status`, so that a
supervisor restarts it; `SystemExit` of one of its tasks ends nothing (`concurrency.exits`). A
service that lacks a server, or loses a session, begins again in its process: an outage ends none.
Tasks and threads that outlive the service cannot keep the process. A process that cannot make
progress ends instead of looking alive.

One module, because all of this decides how one process ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from penstock import logs, tracing
from penstock.concurrency.exits import event_loop, fault_of_place, run_to_end
from penstock.concurrency.outages import Wait
from penstock.concurrency.retry import retry_until_available
from penstock.concurrency.stall_detector import LoopWatchdog
from penstock.errors import (
    CannotStart,
    Conflict,
    Fatal,
    Forbidden,
    Invalid,
    KafkaRefused,
    NotFound,
    OtherDeployment,
    PenstockError,
    SessionLost,
    SettingsError,
    Unauthenticated,
    Unavailable,
)
from penstock.forking import default_signals_in_children
from penstock.variables import misspelt

EXIT_FAILED = 1
EXIT_FORCED = 70
# The variable with the path of a file that exists while the service is ready.
READY_VARIABLE = "PENSTOCK_READY_FILE"
# How long the event loop of a service may stall.
STALL_S = 60.0
# How long tasks and threads that outlive the service, such as a handler that cannot be cancelled,
# may delay the exit.
EXIT_TIMEOUT_S = 5.0
# Signals within this time count as one: `timeout` and some supervisors signal a process and its
# group, which it is in.
REPEAT_S = 1.0

_STATUSES: tuple[tuple[type[PenstockError], int], ...] = (
    (Invalid, 3),
    (Conflict, 3),
    (Unauthenticated, 3),
    (Forbidden, 3),
    (NotFound, 4),
    (Unavailable, 5),
    (SettingsError, 6),
    (OtherDeployment, 6),
    (CannotStart, 6),
    (KafkaRefused, 6),
)

# A service that ran for so many seconds had reached its servers: delays begin anew.
STEADY_S = 20.0

# Called once the service is ready.
Ready = Callable[[], None]
# A service runs until `stopping` is set and nothing is in flight any more, or raises.
Service = Callable[[asyncio.Event, Ready], Awaitable[None]]
# Called with the error of a service that begins again.
OnWait = Callable[[PenstockError], Awaitable[None]]

log = logging.getLogger("penstock.process")


async def _do_nothing(_error: PenstockError) -> None:
    """Is called for a program without a metrics server."""


def run(
    name: str,
    service: Service,
    *,
    grace_s: float = 40.0,
    stall_s: float | None = None,
    on_wait: OnWait = _do_nothing,
    resumes: bool = True,
    hurry: Callable[[], None] | None = None,
    log_ids: Callable[[], Mapping[str, object]] = dict,
) -> int:
    """Runs `service` to its end and returns the exit status.

    Args:
        name: for the log.
        service: see `Service`.
        grace_s: seconds a drain may take before the process ends by force.
        stall_s: seconds for which the event loop may stall before the process ends; None for a
            service with its own watchdog.
        on_wait: called whenever the service waits for a server, before it begins again.
        resumes: False if the service may begin again only until it is ready. The handlers of a
            worker may outlive it.
        hurry: called at the second signal, to end the drain at once. Without it the second signal
            ends the process, and with it the third.
        log_ids: returns members of each JSON log entry; see `logs.configure`.
    """
    if fault := fault_of_place():
        return report_start_failure(name, CannotStart(fault))
    if stall_s is not None:
        service = _with_watchdog(service, stall_s)
    if ready_file := os.environ.get(READY_VARIABLE):
        # An earlier process in the same container may have left the file.
        Path(ready_file).unlink(missing_ok=True)
    try:
        logs.configure(name, tracing.current_trace_id, log_ids)
        tracing.configure(name)
    except PenstockError as error:
        return report_start_failure(name, error)
    for variable, nearest in misspelt(os.environ).items():
        log.warning(
            "No process reads this variable",
            extra={"event": "variable_unknown", "variable": variable, "nearest": nearest},
        )
    reduce_garbage_collection()
    with event_loop() as loop:
        supervise = _supervise(name, service, grace_s, on_wait, resumes=resumes, hurry=hurry)
        status = run_to_end(loop, loop.create_task(supervise))
        # The loop now waits for all remaining tasks and threads. A task that swallows its
        # cancellation would block it without end.
        exit_timer = _after(EXIT_TIMEOUT_S, lambda: _abandon(name, status))
    tracing.shutdown()
    exit_timer.cancel()
    return status


def _with_watchdog(service: Service, stall_s: float) -> Service:
    """Returns the service with a watchdog: a process without progress has failed (O2a)."""

    async def watched(stopping: asyncio.Event, ready: Ready) -> None:
        await run_with_background(service(stopping, ready), watch_loop(stall_s))

    return watched


async def watch_loop(stall_s: float) -> None:
    """Ends the process when its event loop stalls for `stall_s` seconds; runs until cancelled."""
    watchdog = LoopWatchdog()
    with watchdog.guard():
        await watchdog.run(stall_s)


def report_start_failure(name: str, error: PenstockError) -> int:
    """Logs in the configured format why a service cannot start, and returns the exit status."""
    logs.configure_for_errors(name)
    _log_failure(name, error)
    return exit_status(error)


def exit_status(error: PenstockError) -> int:
    """The exit status for an error, the same for services, workers and the command line."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), EXIT_FAILED)


def reduce_garbage_collection() -> None:
    """Excludes the objects of the start from garbage collection, and collects less often.

    A service creates tens of thousands of short-lived records a second, none of them in cycles.
    With Python's default threshold of 700 objects, collecting took a tenth of the CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def run_all(*parts: Awaitable[None]) -> None:
    """Runs all parts of a service concurrently until all end; cancels the rest when one fails.

    Raises:
        Fatal: a part was cancelled without a request.
        Exception: the first failure, as it was raised.
    """
    await _run_until(lambda tasks: not tasks, [asyncio.ensure_future(part) for part in parts])


async def run_with_background(main: Awaitable[None], *background: Awaitable[None]) -> None:
    """Runs `main` and the background parts concurrently; cancels those when `main` ends.

    Raises:
        Exception: the first failure of any part, as it was raised; the rest is cancelled.
    """
    main_task = asyncio.ensure_future(main)
    tasks = [main_task, *(asyncio.ensure_future(part) for part in background)]
    await _run_until(lambda tasks: main_task not in tasks, tasks)


async def _run_until(
    ended: Callable[[Collection[asyncio.Future[None]]], bool], tasks: Collection[asyncio.Future[None]]
) -> None:
    """Waits until `ended` is true of the tasks that still run; cancels these at the end."""
    every = tuple(tasks)
    try:
        while not ended(tasks):
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # First those with an error: it may be why a library has cancelled another.
            for task in sorted(done, key=lambda task: task.cancelled()):
                if task.cancelled():
                    # Without it, the others would go on as if nothing were missing.
                    raise Fatal("a part of this process was cancelled without a request")
                task.result()
    finally:
        for task in every:
            task.cancel()
        # All of them, or asyncio logs the exceptions of those that failed together with the first.
        for result in await asyncio.gather(*every, return_exceptions=True):
            if isinstance(result, Fatal) and not isinstance(result, SessionLost):
                # Also when an outage ended the others: a part that did not stop must not act beside
                # the one that begins again in this process.
                raise result


@contextmanager
def stop_signals(
    first: Callable[[], None], second: Callable[[], None], *numbers: signal.Signals
) -> Iterator[None]:
    """Calls `first` on the first signal, and `second` on each at least `REPEAT_S` later."""
    loop = asyncio.get_running_loop()
    first_s: float | None = None

    def on_signal() -> None:
        nonlocal first_s
        if first_s is None:
            first_s = loop.time()
            first()
        elif loop.time() - first_s >= REPEAT_S:
            second()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        with default_signals_in_children(*numbers):
            yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _supervise(
    name: str,
    service: Service,
    grace_s: float,
    on_wait: OnWait = _do_nothing,
    *,
    resumes: bool = True,
    hurry: Callable[[], None] | None = None,
) -> int:
    stopping = asyncio.Event()

    def stop() -> None:
        log.info("The process stops", extra={"event": "process_stopping", "program": name})
        stopping.set()
        _after(grace_s, lambda: _force_exit(name, grace_s))

    def end() -> None:
        nonlocal hurry
        if hurry is not None:
            log.warning(
                "A second signal ends the drain; a third one ends the process at once",
                extra={"event": "drain_ended", "program": name},
            )
            hurry()
            hurry = None
            return
        log.warning(
            "A further signal ended the process at once",
            extra={"event": "process_forced", "program": name},
        )
        os._exit(EXIT_FORCED)

    with stop_signals(stop, end, signal.SIGTERM, signal.SIGINT):
        return await _status_of(name, partial(_serve, name, service, stopping, on_wait, resumes))


async def _serve(
    name: str, service: Service, stopping: asyncio.Event, on_wait: OnWait, resumes: bool
) -> None:
    """Runs the service, and again after an outage.

    Raises:
        PenstockError: what the service raised while it stopped, or any other error of it.
    """
    final: PenstockError | None = None
    was_ready = False
    wait = Wait()

    def ready() -> None:
        nonlocal was_ready
        was_ready = True
        wait.end()
        _report_ready(name)

    async def attempt() -> None:
        nonlocal final, was_ready
        if stopping.is_set():
            return
        try:
            await service(stopping, ready)
        except (Unavailable, SessionLost) as error:
            if stopping.is_set() or (was_ready and not resumes):
                final = error
                return
            if was_ready:
                was_ready = False
                withdraw_ready(name)
            await on_wait(error)
            raise

    await retry_until_available(
        attempt,
        waiting_for=f"start of {name}",
        retry_on=(Unavailable, SessionLost),
        restarts_after_s=STEADY_S,
        wait=wait,
    )
    if final is not None:
        raise final


async def _status_of(name: str, serve: Callable[[], Awaitable[None]]) -> int:
    try:
        await serve()
    except PenstockError as error:
        _log_failure(name, error)
        return exit_status(error)
    except Exception:
        log.exception("The process failed", extra={"event": "process_failed", "program": name})
        return EXIT_FAILED
    log.info("The process stopped", extra={"event": "process_stopped", "program": name})
    return 0


def _log_failure(name: str, error: PenstockError) -> None:
    # Without a traceback, since the message describes these errors completely.
    log.error(
        "The process ends with an error",
        extra={"event": "process_ended", "program": name, "kind": type(error).__name__, "error": error},
    )


def _report_ready(name: str) -> None:
    log.info("The process is ready", extra={"event": "process_ready", "program": name})
    # A supervisor may wait for the file, which does not depend on the log level.
    if ready_file := os.environ.get(READY_VARIABLE):
        Path(ready_file).touch()


def withdraw_ready(name: str) -> None:
    """Reports that the service is not ready, until it reports that it is."""
    log.warning("The process is not ready", extra={"event": "readiness_withdrawn", "program": name})
    if ready_file := os.environ.get(READY_VARIABLE):
        Path(ready_file).unlink(missing_ok=True)


def _after(delay_s: float, action: Callable[[], None]) -> threading.Timer:
    # A thread fires even when the event loop is stuck.
    timer = threading.Timer(delay_s, action)
    timer.daemon = True
    timer.start()
    return timer


class ExitTimer:
    """Ends the process (status 1) `delay_s` seconds after `start`, unless cancelled.

    Any thread may use it.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Starts the timer."""
        self._timer = _after(self._delay_s, lambda: os._exit(EXIT_FAILED))

    def cancel(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()


def _abandon(name: str, status: int) -> None:
    log.warning(
        "A task or thread did not end in time; leaving it",
        extra={"event": "task_abandoned", "program": name, "timeout_s": EXIT_TIMEOUT_S},
    )
    os._exit(status)


def _force_exit(name: str, grace_s: float) -> None:
    log.error(
        "The process did not stop in time; ending it",
        extra={"event": "stop_timed_out", "program": name, "timeout_s": grace_s},
    )
    os._exit(EXIT_FORCED)
