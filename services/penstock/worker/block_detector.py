"""Warns about handlers that block the event loop, by name: all async handlers wait meanwhile.

It runs on the platform client's loop, which a blocked loop of handlers does not stop. Each check is
a call to the other loop, and only while an attempt runs. A handler is at fault when one step of it
lasts too long. Many short steps in one turn of the loop, as of a worker that begins with many
attempts, are nobody's fault.
"""

from __future__ import annotations

import asyncio
import linecache
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from penstock.core.log_chunk import PLATFORM_SOURCE
from penstock.worker.current import current_attempt, ids_of
from penstock.worker.outcomes import Task

log = logging.getLogger(__name__)

BLOCKED_S = 1.0
CHECK_S = 0.25
# Seconds between two warnings about one stage.
QUIET_S = 60.0
# Most frames of the code that blocks.
FRAMES = 12
# Code in these folders is a library's.
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class BlockDetector:
    """Watches the loop of handlers; made in its thread.

    Args:
        loop: of the handlers.
        busy: whether an attempt runs.
        blocked_s: seconds of one step of a handler.
        check_s: seconds between two checks.

    Attributes:
        blocked: how often a handler has blocked the loop, by (type, stage).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        busy: Callable[[], bool],
        blocked_s: float = BLOCKED_S,
        check_s: float = CHECK_S,
    ) -> None:
        self._blocked_s = blocked_s
        self._check_s = check_s
        self.blocked: Counter[tuple[str, str]] = Counter()
        self._loop = loop
        self._busy = busy
        self._thread_id = threading.get_ident()
        # Whether the loop has answered the last question.
        self._answered = True
        # The task whose step the last check found, when a check found this step first, and whether
        # it was reported.
        self._current: asyncio.Task[Any] | None = None
        self._since_s = 0.0
        self._reported = False
        # When a warning about a stage was last logged.
        self._warned_s: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Watches until cancelled, or until the loop is closed."""
        while True:
            due_s = time.monotonic() + self._check_s
            await asyncio.sleep(self._check_s)
            now_s = time.monotonic()
            if now_s - due_s > self._blocked_s / 2:
                # The process did not run, or the interpreter was held.
                self._since_s = now_s
            try:
                self._check(now_s)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                return

    def _check(self, now_s: float) -> None:
        current = asyncio.current_task(self._loop)
        if self._answered or current is not self._current:
            self._current, self._since_s, self._reported = current, now_s, False
        if not self._answered:
            if now_s - self._since_s >= self._blocked_s and not self._reported:
                self._reported = True
                self._report(now_s)
        elif self._busy():
            self._answered = False
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._answered = True

    def _report(self, now_s: float) -> None:
        frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 (documented, for debuggers)
        if frame is None:
            return
        current = self._current
        task = _task_in(current, frame) if current is not None else None
        # The step has ended meanwhile, and another one may run.
        if self._answered or asyncio.current_task(self._loop) is not current:
            return
        ids = {} if task is None else ids_of(task)
        stage = (str(ids.get("task_type", "")), str(ids.get("stage", "")))
        if ids:
            self.blocked[stage] += 1
        if now_s - self._warned_s.get(stage, -QUIET_S) < QUIET_S:
            return
        self._warned_s[stage] = now_s
        where = _where(frame)
        if task is not None and task.run_log is not None:
            text = f"the handler has blocked the event loop for {self._blocked_s:g} s at {where}"
            task.run_log.add(logging.WARNING, PLATFORM_SOURCE, text)
        stack = "".join(traceback.format_list(traceback.extract_stack(frame, limit=FRAMES)))
        log.warning(
            "A handler blocks the event loop, and all async handlers wait; make it synchronous",
            extra={
                "event": "handler_blocks_loop",
                **ids,
                "where": where,
                "seconds": self._blocked_s,
                "traceback": stack,
            },
        )


def _task_in(current: asyncio.Task[Any], frame: FrameType) -> Task | None:
    """The attempt in the context of a task, also of one that the handler has created."""
    if (get_context := getattr(current, "get_context", None)) is not None:
        context = get_context()
        return context.get(current_attempt)  # type: ignore[no-any-return]  # of Python 3.12 and later
    # Before Python 3.12 a task does not tell its context; the loop's handle has it.
    caller: FrameType | None = frame
    while caller is not None:
        handle = caller.f_locals.get("self")
        if isinstance(handle, asyncio.Handle):
            found: Task | None = getattr(handle, "_context").get(current_attempt)  # noqa: B009 (type checkers do not know it)
            return found
        caller = caller.f_back
    return None


def _where(frame: FrameType) -> str:
    """The line of the handler that blocks: the innermost one outside of libraries."""
    place: FrameType | None = frame
    while place is not None and place.f_code.co_filename.startswith((*_LIBRARIES, "<frozen")):
        place = place.f_back
    place = place or frame
    code = place.f_code
    line = linecache.getline(code.co_filename, place.f_lineno).strip()
    return f"{code.co_filename}:{place.f_lineno} in {code.co_name}" + (f": {line}" if line else "")
