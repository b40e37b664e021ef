"""Forked children: they have default signals, and none of this process's connections.

Handlers fork: `multiprocessing` and `ProcessPoolExecutor` do so on Linux up to Python 3.13.

- Without the reset of signals, SIGTERM of a child would go through the descriptor that it inherits
  to the event loop of the parent, which would drain.
- A child that outlives the parent would keep its port, its locks and its connections. A child that
  closes or uses a connection would disturb that of the parent.
- A child whose code returns into that of the parent ends. It would be a second worker with the
  same attempts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

# Numbers of files, and their inodes: a number may be closed and used again for another file.
_private: dict[int, int] = {}
# Signals for which the event loop of a service has handlers.
_handled: list[signal.Signals] = []


class _Mask(threading.local):
    before: set[int | signal.Signals] | None = None


_mask = _Mask()


def keep_from_children(number: int) -> None:
    """Replaces a file by the null device in forked children.

    The number stays in use in the child: an object that holds it closes no other file.

    Args:
        number: of a socket, a pipe or a file that is open.
    """
    # A connection that has just ended may be closed.
    with suppress(OSError):
        _private[number] = os.fstat(number).st_ino


@contextmanager
def default_signals_in_children(*numbers: signal.Signals) -> Iterator[None]:
    """Gives the default handlers of signals to children that are forked in a `with` block.

    Args:
        numbers: signals that the event loop handles.
    """
    _handled.extend(numbers)
    try:
        yield
    finally:
        for number in numbers:
            # A child has none.
            with suppress(ValueError):
                _handled.remove(number)


def end_if_child(parent: int, error: BaseException | None) -> None:
    """Ends a forked child whose code returns into that of its parent, without cleanup.

    Args:
        parent: id of the process that runs the code; nothing happens in it.
        error: raised in the child; the status is that of `SystemExit`, or 1 for others.
    """
    if os.getpid() != parent:
        _end(error)


def _end(error: BaseException | None) -> NoReturn:
    status: object = 0
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code
        if not isinstance(status, int):
            # As Python does at the end of a program.
            sys.stderr.write(f"{status}\n")
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status & 0xFF if isinstance(status, int) else 1)


def _before() -> None:
    # A signal for the child may come before its handlers are reset.
    if _handled:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _unblock() -> None:
    before, _mask.before = _mask.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_child() -> None:
    try:
        if _handled:
            _reset_signals()
    finally:
        _unblock()
    if _private:
        _replace_files()


def _reset_signals() -> None:
    _handled.clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if _is_of_a_loop(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _replace_files() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number, inode in _private.items():
        with suppress(OSError):
            if os.fstat(number).st_ino == inode:
                os.dup2(null, number, inheritable=False)
    os.close(null)
    _private.clear()


def _is_of_a_loop(handler: object) -> bool:
    # uvloop's is a method of the loop, and asyncio's a function that does nothing.
    return isinstance(getattr(handler, "__self__", None), asyncio.AbstractEventLoop) or (
        getattr(handler, "__module__", None) == "asyncio.unix_events"
    )


# Not every system forks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_unblock, after_in_child=_in_child)
