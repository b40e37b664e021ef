"""Captures what handlers log and print, by the current attempt.

A handler of the root logger, and stand-ins for `sys.stdout` and `sys.stderr`, ask the context
variable to whose log a line belongs. Without a current attempt nothing is captured.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from penstock.worker.current import current_attempt
from penstock.worker.log_buffer import RunLog

_STREAM_EMIT = logging.StreamHandler.emit.__code__


class _Captured(threading.local):
    record: logging.LogRecord | None = None


_captured = _Captured()


class CaptureHandler(logging.Handler):
    """Adds records to the log of the attempt whose handler logs them."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Emits without the handler's lock: one thread that holds it would stop all others."""
        task = current_attempt.get()
        if task is not None and task.run_log is not None:
            _capture(record, task.run_log)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits and never raises."""
        self.handle(record)


def _current_log() -> RunLog | None:
    task = current_attempt.get()
    return None if task is None else task.run_log


def _capture(record: logging.LogRecord, log: RunLog) -> None:
    # A record may come both to the root logger and to a handler that writes to a captured stream.
    if _captured.record is not record:
        _captured.record = record
        log.add_record(record)


class CapturedStream:
    """Stands in for an output stream.

    Args:
        stream: the stream.
        source: its name in the log.
        repeats: whether captured text also goes to the stream.
    """

    def __init__(self, stream: TextIO, source: str, *, repeats: bool) -> None:
        self.__dict__.update(_stream=stream, _source=source, _repeats=repeats)

    def write(self, text: str) -> int:
        """Writes to the log of the current attempt, or to the stream."""
        log = _current_log()
        if log is not None and log.how_ended is None and isinstance(text, str):
            frame = sys._getframe(1)  # noqa: SLF001 (it has no other way in)
            if frame.f_code is _STREAM_EMIT:
                _capture(frame.f_locals["record"], log)
            else:
                log.write(self._source, text)
            if not self._repeats:
                return len(text)
        return int(self._stream.write(text))

    @property
    def uncaptured(self) -> TextIO | None:
        """The stream, for what is captured otherwise; None if captured text does not go there."""
        return self._stream if self._repeats else None

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each of the texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stream, name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def _outside_attempts(_record: logging.LogRecord) -> bool:
    return _current_log() is None


@contextmanager
def capturing(mode: str) -> Iterator[None]:
    """Captures for the time of a `with` block.

    Args:
        mode: `on` leaves the lines in the worker's own output as well, `only` does not, `off`
            captures nothing (`WorkerSettings.task_logs`).
    """
    if mode == "off":
        yield
        return
    repeats = mode == "on"
    root = logging.getLogger()
    handler = CaptureHandler()
    own = [] if repeats else list(root.handlers)
    for each in own:
        each.addFilter(_outside_attempts)
    root.addHandler(handler)
    stdout, stderr = sys.stdout, sys.stderr
    captured = (
        CapturedStream(stdout, "stdout", repeats=repeats),
        CapturedStream(stderr, "stderr", repeats=repeats),
    )
    sys.stdout, sys.stderr = captured
    try:
        yield
    finally:
        root.removeHandler(handler)
        for each in own:
            each.removeFilter(_outside_attempts)
        # Something else may have replaced them meanwhile.
        if sys.stdout is captured[0]:
            sys.stdout = stdout
        if sys.stderr is captured[1]:
            sys.stderr = stderr


def _forget_attempt() -> None:
    # A child process has no thread that ships.
    current_attempt.set(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_attempt)
