"""The lines that handlers have logged, until they are shipped. Bounded, and safe for all threads.

Adding a line never waits for a server and never raises. When the buffer is full, the oldest lines
of the noisiest run are dropped, and a mark counts them. One module, because runs and buffer share
one lock and one bound.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import count
from types import SimpleNamespace
from typing import Any, ParamSpec

from penstock.contracts.progress import Progress, progress_line
from penstock.contracts.result import StageResult
from penstock.contracts.task_log import encode_json
from penstock.core.attempt import AttemptId
from penstock.core.completion import Outcome
from penstock.core.log_chunk import PLATFORM_SOURCE, Chunk, RawLine, RunId
from penstock.core.log_limits import LATEST_MS, LINE_BYTES, RunBuffer, cut, dropped_by, shown, split_lines
from penstock.core.redaction import Redactor
from penstock.logs import STANDARD

# Bytes of all runs that wait.
BUFFER_BYTES = 16 * 1024 * 1024
# Bytes that are dropped at once when it is full.
DROP_BYTES = 256 * 1024
# Waiting bytes at which they are shipped at once.
FLUSH_BYTES = 64 * 1024
# Bytes of one run in one flush: others must not wait behind a noisy one.
RUN_BYTES = 128 * 1024
# Bytes of the fields of a line.
FIELDS_BYTES = 8 * 1024
# Characters of one text that are looked at; the rest is dropped.
TEXT_CHARS = 1024 * 1024
# Source of the lines of `Task.progress`, and seconds between two of them in one run.
PROGRESS_SOURCE = "progress"
PROGRESS_S = 1.0
MAX_LEVEL = 1000

P = ParamSpec("P")

_FORMATTER = logging.Formatter()
# Attributes of a record without fields; comparing their names takes as long as all else.
_PLAIN = len(vars(logging.makeLogRecord({})))
_SOURCE_CHARS = 200
# Sources that are kept: there are as many as loggers.
_SOURCES = 1_000


class _Adding(threading.local):
    active = False


_adding: Any = _Adding()


def _drop_lines() -> None:
    # A forked child has no thread that ships, and one of the parent may hold the buffer's lock.
    global _adding  # noqa: PLW0603 (of the process)
    _adding = SimpleNamespace(active=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_lines)


def _never_raises(method: Callable[P, None]) -> Callable[P, None]:
    """The method, which fails silently: logging must not fail the handler.

    It does nothing within another one on the same thread. A value may log while its text is made,
    and so may an object that is collected meanwhile.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if _adding.active:
            return
        _adding.active = True
        try:
            method(*args, **kwargs)
        except Exception:  # noqa: BLE001, S110 (fails open: the line is lost, and the handler goes on)
            pass
        finally:
            _adding.active = False

    return call


class LogBuffer:
    """The lines of all runs of a worker.

    Args:
        worker_id: of the worker.
        redactor: removes secrets.
        wake: called when lines wait, and with True when they must be shipped at once; from any
            thread.
    """

    def __init__(self, worker_id: str, redactor: Redactor, wake: Callable[[bool], object]) -> None:
        self.redactor = redactor
        self._worker_id = worker_id
        self._wake = wake
        self._prefix = os.urandom(4).hex()
        # Its next number is taken by one call into C, so threads of one interpreter need no lock.
        self._numbers = count(1)
        self._lock = threading.Lock()
        # Runs that have something to ship, in the order in which that began.
        self._waiting: dict[RunLog, None] = {}
        # Runs with lines that are kept for their end.
        self._keeping: set[RunLog] = set()
        self._sources: dict[str, str] = {}
        self._bytes = 0
        self._ready = 0
        self._woken = self._urgent = False
        # Lines for which marks stand that were taken, by reason.
        self.dropped: Counter[str] = Counter()

    def begin(self, attempt_id: AttemptId, token: str | None = None) -> RunLog:
        """The log of a run that begins, and the token of its attempt."""
        return RunLog(self, RunId(*attempt_id, f"{self._prefix}-{next(self._numbers):x}"), token)

    def take(self, most_bytes: int) -> list[Chunk]:
        """Removes lines for one flush, without secrets: at most `RUN_BYTES` of each run."""
        now_ms = _now_ms()
        taken: list[Chunk] = []
        with self._lock:
            self._woken = self._urgent = False
            for run in list(self._waiting):
                if most_bytes <= 0:
                    break
                ready_bytes = run.lines.ready_bytes
                run.flush_partials(now_ms)
                first, lines = run.lines.take(min(RUN_BYTES, most_bytes), now_ms)
                self._account(run)
                most_bytes -= ready_bytes - run.lines.ready_bytes
                end = None
                if not run.lines:
                    end = run.how_ended
                    if not run.partials and run.progress is None:
                        del self._waiting[run]
                else:
                    # Behind the others, in the next flush.
                    del self._waiting[run]
                    self._waiting[run] = None
                if lines or end is not None:
                    taken.append(Chunk(run.id, self._worker_id, first, lines, end, run.token))
            if self._waiting:
                self._signal(urgent=self._ready >= FLUSH_BYTES)
        return [self._redacted(chunk) for chunk in taken]

    def source_of(self, name: str) -> str:
        """The source of a line, bounded and without secrets."""
        known = self._sources.get(name)
        if known is None:
            known = self.redactor.text(str(name))[:_SOURCE_CHARS]
            if len(self._sources) < _SOURCES:
                self._sources[name] = known
        return known

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the lines that wait."""
        return self._bytes

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def _redacted(self, chunk: Chunk) -> Chunk:
        texts = self.redactor.texts([line[3] for line in chunk.lines])
        lines = [
            line if text is line[3] else (*line[:3], cut(text), *line[4:])
            for line, text in zip(chunk.lines, texts, strict=True)
        ]
        for line in lines:
            if line[2] == PLATFORM_SOURCE and (dropped := dropped_by(line)) is not None:
                self.dropped[line[4]["reason"]] += dropped.lines
        return Chunk(chunk.run, chunk.worker, chunk.first, lines, chunk.end, chunk.token)

    def add(self, run: RunLog, now_s: float, lines: Sequence[RawLine], urgent: bool) -> None:
        """Adds lines of a run that has not ended."""
        with self._lock:
            if run.how_ended is not None:
                return
            if (run.partials or run.progress is not None) and lines[0][2] == PLATFORM_SOURCE:
                # A failure is the last line.
                run.flush_partials(_now_ms(), every=True)
            for line in lines:
                run.lines.add(now_s, line)
            self._account(run)
            run.logged = True
            self._waiting[run] = None
            if urgent or not self._woken or (self._ready >= FLUSH_BYTES and not self._urgent):
                self._signal(urgent=urgent or self._ready >= FLUSH_BYTES)
            if self._bytes > BUFFER_BYTES:
                self._shrink()

    def write(self, run: RunLog, source: str, text: str) -> list[str]:
        """Adds to the partial line of a stream; returns the lines that are complete."""
        with self._lock:
            if run.how_ended is not None:
                return []
            complete, rest = split_lines(run.partials.pop(source, "") + text)
            if rest:
                run.partials[source] = rest
                self._await(run, urgent=False)
            return complete

    def add_progress(self, run: RunLog, progress: Progress) -> None:
        """Sets the last report of a run, and makes a line of it if one is due."""
        with self._lock:
            if run.how_ended is not None:
                return
            now_s = time.monotonic()
            run.progress = _now_ms(), progress
            run.flush_progress(now_s)
            self._account(run)
            self._await(run, urgent=False)

    def end(self, run: RunLog, how: str) -> None:
        """Ends a run; ships what is left of it."""
        with self._lock:
            if run.how_ended is not None:
                return
            if not run.logged:
                # Nothing was shipped, so nothing is to end.
                run.how_ended = how
                return
            now_ms = _now_ms()
            run.flush_partials(now_ms, every=True)
            run.lines.end(now_ms)
            self._account(run)
            run.how_ended = how
            self._await(run, urgent=True)

    def _account(self, run: RunLog) -> None:
        size, ready = run.lines.size_bytes, run.lines.ready_bytes
        counted_size, counted_ready = run.counted
        self._bytes += size - counted_size
        self._ready += ready - counted_ready
        run.counted = size, ready
        if size > ready:
            self._keeping.add(run)
        elif counted_size > counted_ready:
            self._keeping.discard(run)

    def _await(self, run: RunLog, *, urgent: bool) -> None:
        run.logged = True
        self._waiting[run] = None
        self._signal(urgent=urgent or self._ready >= FLUSH_BYTES)

    def _signal(self, *, urgent: bool) -> None:
        if not self._woken or (urgent and not self._urgent):
            self._woken = True
            self._urgent = self._urgent or urgent
            self._wake(urgent)

    def _shrink(self) -> None:
        noisiest = max({*self._waiting, *self._keeping}, key=lambda run: run.lines.size_bytes)
        noisiest.lines.drop_oldest(max(DROP_BYTES, self._bytes - BUFFER_BYTES), _now_ms())
        self._account(noisiest)


class RunLog:
    """The log of one run. Its methods may be called from any thread, and never raise.

    Args:
        buffer: of the worker.
        id_: of the run.
        token: of its attempt, if it has one.
    """

    __slots__ = (
        "_buffer",
        "_lines_kept",
        "_progress_due_s",
        "counted",
        "how_ended",
        "id",
        "logged",
        "partials",
        "progress",
        "token",
    )

    def __init__(self, buffer: LogBuffer, id_: RunId, token: str | None) -> None:
        self.id = id_
        self.token = token
        # None before the first line: most runs of quick stages have none.
        self._lines_kept: RunBuffer | None = None
        # The last line of each stream, while it has no line feed.
        self.partials: dict[str, str] = {}
        # The last report of progress that is not a line yet, and its time in milliseconds.
        self.progress: tuple[int, Progress] | None = None
        self._progress_due_s = 0.0
        self.how_ended: str | None = None
        # Bytes of the run that the buffer has counted: all, and those that can be taken.
        self.counted = 0, 0
        self.logged = False
        self._buffer = buffer

    @property
    def lines(self) -> RunBuffer:
        """The lines that are not in a chunk yet."""
        if self._lines_kept is None:
            self._lines_kept = RunBuffer(time.monotonic())
        return self._lines_kept

    @_never_raises
    def add(
        self, level: int, source: str, text: str, fields: Mapping[str, Any] | None = None, at_ms: int = 0
    ) -> None:
        """Adds one entry, which may have several lines.

        Args:
            level: as in `logging`.
            source: `stdout`, `stderr`, or the name of a logger.
            text: what was logged.
            fields: its structured values.
            at_ms: milliseconds since 1970; 0 is now.
        """
        self._add(level, source, text, fields, at_ms or _now_ms())

    @_never_raises
    def add_record(self, record: logging.LogRecord) -> None:
        """Adds an entry of the standard library's logging."""
        at_ms, fields = int(record.created * 1000), None
        try:
            text = record.getMessage()
            values = record.__dict__
            if record.exc_info and record.exc_info[0] is not None:
                text += "\n" + (record.exc_text or _FORMATTER.formatException(record.exc_info))
            if record.stack_info:
                text += "\n" + record.stack_info
            if len(values) > _PLAIN and (extra := values.keys() - STANDARD):
                fields = {name: values[name] for name in sorted(extra)}
        except Exception as error:  # noqa: BLE001 (the arguments do not fit, or cannot be printed)
            text = f"{record.msg!r} cannot be formatted: {error!r}"
        self._add(record.levelno, record.name, text, fields, at_ms)

    @_never_raises
    def write(self, source: str, text: str) -> None:
        """Adds the text of a stream, `stdout` or `stderr`; its lines end with line feeds."""
        if "\n" in text and source not in self.partials:
            # The usual case: complete lines, redacted together.
            whole, _, text = text.rpartition("\n")
            self._add(logging.INFO, source, whole, None, _now_ms())
        if text:
            for line in self._buffer.write(self, source, text):
                self._add(logging.INFO, source, line, None, _now_ms())

    @_never_raises
    def add_progress(self, progress: Progress) -> None:
        """Adds a line with a report of progress; of several within a second, the last one."""
        self._buffer.add_progress(self, progress)

    @_never_raises
    def end(self, how: str) -> None:
        """Ends the log; later lines are not part of it.

        Args:
            how: how the run ended, such as `done`.
        """
        self._buffer.end(self, how)

    def _add(self, level: int, source: str, text: str, fields: Mapping[str, Any] | None, at_ms: int) -> None:
        lines = self._lines(level, source, text, fields, at_ms)
        self._buffer.add(self, time.monotonic(), lines, level >= logging.ERROR)

    def redacted(self, text: str) -> str:
        """The text without secrets."""
        return self._buffer.redactor.text(text)

    def flush_progress(self, now_s: float, *, every: bool = False) -> None:
        """Makes a line of the last report of progress, if one is due. The buffer is locked."""
        if self.progress is not None and (every or now_s >= self._progress_due_s):
            (at_ms, report), self.progress = self.progress, None
            self._progress_due_s = now_s + PROGRESS_S
            text = progress_line(report.fraction, report.message)
            fields = [] if report.fraction is None else [{"fraction": round(report.fraction, 4)}]
            self.lines.add(now_s, (at_ms, logging.INFO, PROGRESS_SOURCE, text, *fields))

    def flush_partials(self, now_ms: int, *, every: bool = False) -> None:
        """Makes lines of text without a line feed, and of progress. The buffer is locked."""
        self.flush_progress(time.monotonic(), every=every)
        for source, text in list(self.partials.items()):
            # A progress bar that overwrites itself is kept until it ends.
            if every or "\r" not in text:
                del self.partials[source]
                redacted = self._buffer.redactor.text(shown(text))
                self.lines.add(time.monotonic(), (now_ms, logging.INFO, source, cut(redacted)))

    def _lines(
        self, level: int, source: str, text: str, fields: Mapping[str, Any] | None, at_ms: int
    ) -> Sequence[RawLine]:
        # The bounds of the schema: one line outside of them would spoil the lines of other runs.
        if type(level) is not int or not 0 <= level <= MAX_LEVEL:
            level = max(0, min(int(level), MAX_LEVEL))
        if not 0 <= at_ms <= LATEST_MS:
            at_ms = max(0, min(at_ms, LATEST_MS))
        source = self._buffer.source_of(source)
        whole = len(text) * 6 <= LINE_BYTES or (len(text) <= LINE_BYTES and text.isascii())
        if whole and not fields and "\n" not in text and "\r" not in text:
            # The usual case: nothing is cut, and `take` redacts many lines at once, without those
            # that are dropped before.
            return ((at_ms, level, source, text),)
        redactor = self._buffer.redactor
        if len(text) > TEXT_CHARS:
            # At a line feed, so that no secret is divided.
            kept = text[: max(text.rfind("\n", 0, TEXT_CHARS), 0)] or text[:TEXT_CHARS]
            text = f"{redactor.text(kept)}\n… [{len(text) - len(kept):,} more characters are not kept]"
        elif not whole or "\n" in text:
            # Before it is divided or cut.
            text = redactor.text(text)
        lines: list[RawLine] = [(at_ms, level, source, cut(part.rstrip("\r"))) for part in text.split("\n")]
        if fields:
            lines[0] = (*lines[0], self._fields(fields))
        return lines

    def _fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields without secrets, within their bound; a mark if they cannot be kept."""
        try:
            kept = self._buffer.redactor.fields(fields)
            size = len(encode_json(kept))
        except Exception as error:  # noqa: BLE001 (a value has a broken `__str__`, or changes meanwhile; the line is kept)
            return {"dropped_fields_error": type(error).__name__}
        return kept if size <= FIELDS_BYTES else {"dropped_fields_bytes": size}

    def conclude(self, result: StageResult | None) -> None:
        """Ends the log with the result of its run; a failure is its last line.

        Args:
            result: None for a run that was cancelled.
        """
        if result is None:
            self.end("cancelled")
            return
        if result.outcome is Outcome.FAIL and result.error is not None:
            failure = f"{result.error.kind}: {result.error.message}"
            self.add(logging.ERROR, PLATFORM_SOURCE, (result.error.traceback or failure).rstrip())
        self.end(result.outcome.value)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
