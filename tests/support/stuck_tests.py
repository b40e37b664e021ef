"""Shows where a test is stuck, and then ends its process: xdist fails that test and goes on in
another one.

Conditions have deadlines (`wait_until`); a service that does not stop has none, and its run would
hang without a word.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest

# No test takes nearly as long, also on a machine that does much else.
REPORT_S = 300.0
END_S = 900.0
# The tests of these folders take long by design: their full forms run for many minutes.
_UNLIMITED = ("chaos", "load", "helm", "containers")


class StuckTests:
    """The plugin."""

    def pytest_configure(self) -> None:
        """Keeps the real standard error: pytest captures it during tests."""
        self._stderr = os.fdopen(os.dup(2), "w")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Starts the timers of one test."""
        timers = [threading.Timer(REPORT_S, self.report, (item.nodeid,))]
        if item.path.relative_to(item.config.rootpath).parts[1] not in _UNLIMITED:
            timers.append(threading.Timer(END_S, os._exit, (1,)))
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            return (yield)
        finally:
            for timer in timers:
                timer.cancel()

    def report(self, nodeid: str) -> None:
        """Writes the stacks of all threads and asyncio tasks to standard error."""
        lines = [f"\n{nodeid} is stuck. Its asyncio tasks wait here:"]
        for task in list(_tasks()):
            lines += [f"task {task.get_name()}", *_waits_in(task.get_coro())]
        print(*lines, sep="\n", file=self._stderr, flush=True)
        faulthandler.dump_traceback(self._stderr)


def _tasks() -> Iterator[asyncio.Task[Any]]:
    """The unfinished tasks of all event loops; asyncio names only those of one."""
    # Named `_all_tasks` before Python 3.12.
    known = getattr(asyncio.tasks, "_scheduled_tasks", None) or getattr(asyncio.tasks, "_all_tasks", ())
    return (task for task in list(known) if not task.done())


def _waits_in(coroutine: Any) -> Iterator[str]:
    """The chain of awaits, from the task's coroutine down; `Task.get_stack` has only the first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            yield f"    {coroutine!r}"
            return
        yield f"    {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
