"""An event loop that `SystemExit` and `KeyboardInterrupt` of a task or a callback do not end.

asyncio and uvloop raise both out of the loop, wherever they are raised in it. By then the task has
its exception, as with any other one, and its waiters receive it. So the loop can continue where it
was: it loses neither callbacks nor timers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.concurrency.event_loop import event_loop_factory

T = TypeVar("T")

log = logging.getLogger(__name__)


def fault_of_place() -> str:
    """Why a service cannot be run from here; empty if it can."""
    if threading.current_thread() is not threading.main_thread():
        return (
            "run() handles signals, which only the main thread receives: call it there, or run serve() of a worker "
            "in an event loop of this thread"
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ""
    return "run() starts an event loop, and one runs in this thread already: await serve() of a worker"


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A new event loop; at the end its tasks are cancelled, and its threads are waited for."""
    runner = asyncio.Runner(loop_factory=event_loop_factory())
    try:
        yield runner.get_loop()
    finally:
        try:
            runner.close()
        except SystemExit as error:
            # A task that was cancelled has raised it: the status of the process stays.
            log_refused(error)


def run_to_end(loop: asyncio.AbstractEventLoop, main: asyncio.Task[T]) -> T:
    """Runs the loop until a task has ended, through each exit of another task or of a callback.

    Raises:
        BaseException: of the task.
        KeyboardInterrupt: Ctrl-C, while no handler of the loop receives SIGINT.
    """
    while True:
        try:
            return loop.run_until_complete(main)
        except (SystemExit, KeyboardInterrupt) as error:
            is_ctrl_c = isinstance(error, KeyboardInterrupt) and (
                signal.getsignal(signal.SIGINT) is signal.default_int_handler
            )
            if is_ctrl_c or _raised_by(main, error):
                raise
            log_refused(error)
            if main.done():
                _finish_stop(loop)
                return main.result()


def _finish_stop(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the stop at the end of a task, which an exit at the same moment has left in the loop.

    Otherwise it would end the next run of a uvloop, and with it the cleanup: the status of the
    process would be lost.
    """
    # The callback of the ended task runs in the first turn at the latest, and its stop in the next.
    turns = 0
    while turns < 2:
        loop.stop()
        try:
            loop.run_forever()
            turns += 1
        except (SystemExit, KeyboardInterrupt) as error:
            log_refused(error)


def _raised_by(main: asyncio.Task[Any], error: BaseException) -> bool:
    # After an exit, uvloop still runs what is ready: the task may have ended meanwhile.
    return main.done() and not main.cancelled() and main.exception() is error


def log_refused(error: BaseException) -> None:
    """Logs an exit; the waiters of its task receive it."""
    log.error(
        "A task or callback called for the end of the process, which goes on",
        extra={"event": "exit_refused"},
        exc_info=error,
    )
