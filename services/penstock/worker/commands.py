"""Commands that handlers run: their output is the task's log, and they end with the attempt.

Each command has a process group of its own, so that the processes which it started end with it:
when the attempt is cancelled, times out, is lost, or the worker drains, and also when the command
itself has ended. A group gets SIGTERM, and SIGKILL after `END_S`. Only a worker that is killed
itself leaves its commands.
"""

from __future__ import annotations

import asyncio
import atexit
import codecs
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import IO, Any, cast

from penstock.core.log_limits import shown, split_lines
from penstock.errors import CommandFailed
from penstock.worker.log_buffer import RunLog
from penstock.worker.threads import start_thread

# Seconds from SIGTERM to SIGKILL; less than a cancelled handler has before it is abandoned.
END_S = 3.0
# Seconds in which what a command has left in its pipes is read.
REST_S = 0.2
# Lines that an error and a result have.
LAST_LINES = 20
_READ_BYTES = 64 * 1024
_ERROR_CHARS = 1_500


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended.

    Attributes:
        exit_code: its status; negative is the number of the signal that ended it.
        last_lines: the last lines of its output, at most 20.
        stdout: what it wrote to standard output, with `capture`.
    """

    exit_code: int
    last_lines: tuple[str, ...] = ()
    stdout: bytes = b""

    def __await__(self) -> Generator[Any, None, Finished]:
        """Lets a type checker accept both `await task.run(…)` and `task.run(…)` on a thread."""
        yield from ()
        return self


class LineSplitter:
    """Makes lines of the bytes of a stream; a carriage return begins the line again."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """The lines that are complete, and the last one at the end of the stream."""
        lines, self._rest = split_lines(self._rest + self._decoder.decode(data, final))
        if final and self._rest:
            lines.append(shown(self._rest))
        return lines


def _end_of(lines: Sequence[str]) -> str:
    """The end of a command's output: whole lines, because without a log they are redacted later."""
    text = "\n".join(lines)
    if len(text) <= _ERROR_CHARS:
        return text
    whole = text[-_ERROR_CHARS:].partition("\n")[2] or lines[-1]
    return f"… {whole}"


class Command:
    """One command; all methods may be called from any thread.

    Args:
        arguments: the program and its arguments.
        log: of the attempt; None writes to the worker's own output alone.
        cwd: directory in which it runs.
        env: variables beside those of the worker.
        stdin: what it reads.
        capture: keeps standard output for the result, in place of logging it.
    """

    def __init__(
        self,
        arguments: Sequence[str | PurePath],
        log: RunLog | None,
        *,
        cwd: str | PurePath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        capture: bool = False,
    ) -> None:
        if isinstance(arguments, str | bytes) or not arguments:
            raise TypeError("run() needs a list of a program and its arguments: run(['ffmpeg', '-i', path])")
        self._arguments = [os.fspath(each) for each in arguments]
        self.program = PurePath(self._arguments[0]).name
        self._log = log
        self._cwd = cwd
        self._env = env
        self._stdin = stdin.encode() if isinstance(stdin, str) else stdin
        self._capture = capture
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._captured: list[bytes] = []
        self._lock = threading.Lock()
        # Under the lock: a process that was waited for must not be signalled, because its id may
        # belong to another one.
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = False
        self._timer: threading.Timer | None = None

    def run(self) -> Finished:
        """Runs the command to its end.

        Raises:
            OSError: it cannot be started.
            CancelledError: `end` was called.
        """
        # Before the start: a worker that ends meanwhile kills all that it finds here.
        _running.add(self)
        try:
            return self._run()
        finally:
            _running.discard(self)

    def _run(self) -> Finished:
        with self._lock:
            if self._ending:
                raise asyncio.CancelledError
            process = self._process = self._start()
        try:
            readers = [
                threading.Thread(target=read, args=(stream,), name=f"output of {self.program}", daemon=True)
                for stream, read in self._streams(process)
            ]
            for reader in readers:
                reader.start()
            _wait_ended(process)
            if not _join(readers, REST_S):
                # A process that the command started still writes.
                self._signal(signal.SIGTERM)
                _join(readers, END_S)
        finally:
            self._reap(process)
        _join(readers, REST_S)
        if self._ending:
            raise asyncio.CancelledError
        return Finished(process.returncode, tuple(self._last), b"".join(self._captured))

    async def run_in_thread(self) -> Finished:
        """Like `run`, for an async handler; returns after a cancellation when the group has ended.

        A second cancellation, as at the end of the worker, kills the group.
        """
        ended = start_thread(self.run, f"run {self.program}")
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            self.end()
            try:
                await asyncio.wait({ended}, timeout=END_S + REST_S)
            except asyncio.CancelledError:
                self.kill()
                raise
            raise
        finished, error = ended.result()
        if error is not None:
            raise error
        return cast("Finished", finished)

    def end(self) -> None:
        """Ends the group: SIGTERM, and SIGKILL later. Does not wait."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        self._signal(signal.SIGTERM)
        self._timer = threading.Timer(END_S, self.kill)
        self._timer.daemon = True
        self._timer.start()

    def kill(self) -> None:
        """Kills the group at once."""
        self._signal(signal.SIGKILL)

    def checked(self, finished: Finished, *, check: bool) -> Finished:
        """The end of the command.

        Raises:
            CommandFailed: `check` is set and its status is not 0.
        """
        if check and finished.exit_code:
            raise self._failure(finished)
        return finished

    def _failure(self, finished: Finished) -> CommandFailed:
        code = finished.exit_code
        how = f"exited with status {code}"
        if code < 0:
            with suppress(ValueError):
                how = f"was ended by {signal.Signals(-code).name}"
        text = _end_of(finished.last_lines)
        return CommandFailed(
            f"{self.program} {how}" + (f":\n{text}" if text else ""),
            exit_code=code,
            last_lines=finished.last_lines,
        )

    def _start(self) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() if self._stdin else open(os.devnull, "rb") as stdin:  # noqa: PTH123 (no path of ours)
            if self._stdin:
                stdin.write(self._stdin)
                stdin.seek(0)
            return subprocess.Popen(  # noqa: S603 (the handler's command; there is no shell)
                self._arguments,
                stdin=stdin,
                stdout=subprocess.PIPE,
                # With standard output: only so do the lines of both stay in order.
                stderr=subprocess.PIPE if self._capture else subprocess.STDOUT,
                cwd=self._cwd,
                env=None if self._env is None else {**os.environ, **self._env},
                start_new_session=True,
            )

    def _streams(
        self, process: subprocess.Popen[bytes]
    ) -> list[tuple[IO[bytes], Callable[[IO[bytes]], None]]]:
        assert process.stdout is not None
        if not self._capture:
            return [(process.stdout, self._read_lines)]
        assert process.stderr is not None
        return [(process.stdout, self._read_all), (process.stderr, self._read_lines)]

    def _read_lines(self, stream: IO[bytes]) -> None:
        splitter = LineSplitter()
        with stream:
            while data := os.read(stream.fileno(), _READ_BYTES):
                self._add(splitter.feed(data))
        self._add(splitter.feed(b"", final=True))

    def _read_all(self, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), _READ_BYTES):
                self._captured.append(data)

    def _add(self, lines: list[str]) -> None:
        if self._log is not None:
            # Together: a private key has several lines. They also become the attempt's error.
            lines = self._log.redacted("\n".join(lines)).split("\n") if lines else []
        for line in lines:
            self._last.append(line)
            if self._log is not None:
                self._log.add(logging.INFO, self.program, line)
            # `print` of the handler would write there; the log has the line already.
            if (stream := getattr(sys.stdout, "uncaptured", sys.stdout)) is not None:
                with suppress(OSError, ValueError):
                    print(line, file=stream)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            process = self._process
            if process is None or process.returncode is not None:
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """Kills what is left of the group, and releases the id of the process."""
        self.kill()
        with self._lock:
            process.wait()
        if self._timer is not None:
            self._timer.cancel()


def _join(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Waits until all threads have ended; returns whether they have."""
    until_s = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _wait_ended(process: subprocess.Popen[bytes]) -> None:
    """Waits until a process has ended, and keeps its id, which is that of its group."""
    if hasattr(os, "waitid"):
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()


# Commands that run. A process that ends, with threads of handlers that do not, ends them too.
_running: set[Command] = set()


@atexit.register
def _kill_all() -> None:
    for command in tuple(_running):
        command.kill()


# They are the parent's: the end of a forked child must not end them.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)
