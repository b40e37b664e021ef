"""Noticing that nothing moves.

Two things can stand still. While the event loop turns, `Standstill` compares what should be moving from look to
look. When the loop itself is stuck nobody looks any more: `LoopWatchdog` is a timer of the interpreter's, wound
up from the loop, which ends the process even when a C extension holds the interpreter lock.

In doubt the process ends: its supervisor restarts it, and what was in hand is delivered again.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager


class Standstill:
    """Which of the things that should move have not.

    Args:
        limit_s: seconds after which a mark that has not changed is reported.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[str, tuple[Hashable, float]] = {}

    def look(self, now_s: float, marks: Mapping[str, Hashable]) -> list[str]:
        """The names whose mark has been the same for longer than the limit.

        Args:
            now_s: seconds on a clock that only grows.
            marks: name and present mark of everything that should be moving now. What is left out is at rest,
                and starts anew when it is named again.
        """
        self._since = {
            name: self._since[name] if name in self._since and self._since[name][0] == mark else (mark, now_s)
            for name, mark in marks.items()
        }
        return [name for name, (_mark, since_s) in self._since.items() if now_s - since_s > self._limit_s]


class LoopWatchdog:
    """Ends the process (status 1, with the stack of every thread on standard error) unless wound up in time."""

    def wind(self, limit_s: float) -> None:
        """The process ends in `limit_s` seconds unless this is called again."""
        # One timer a process; the file must be a real one, which a test's captured output is not.
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Stops the timer at the end of the block."""
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
