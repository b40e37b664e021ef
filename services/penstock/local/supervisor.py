"""Runs programs as processes, restarts them when they die, and stops them in order.

Each program has a thread that starts it, waits for its end, and decides by `core.restart` when to
restart it. With threads instead of asyncio the supervisor works under any event loop or none, and a
busy loop does not delay it. Every program leads its own session, so Ctrl-C in the terminal reaches
it only through the supervisor, in order. When the supervising process is killed, the `reaper` stops
all programs.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.restart import RestartPolicy, after_exit
from penstock.errors import NotFound
from penstock.local.reaper import Reaper

# Receives (program name, one line of its output without the line break), from any thread.
OnLine = Callable[[str, str], None]

# Names the file that a program creates once it serves; `penstock.process` does so.
READY_VARIABLE = "PENSTOCK_READY_FILE"
# Set for every program, so that a later run recognises the orphans of an earlier one.
OWNER_VARIABLE = "PENSTOCK_DEPLOYMENT"

_TAIL_LINES = 30


@dataclass(frozen=True, kw_only=True)
class Program:
    """How to run and stop a program.

    Attributes:
        name: unique name within the supervisor; the prefix of its log lines.
        argv: the program and its arguments.
        environment: variables that are added to this process's environment.
        directory: working directory; None is this process's own.
        user: the user to run as; None is this process's own.
        order: programs with the lowest order are stopped first, those of one order together.
        stop_signal: the signal that asks the program to end.
        grace_s: seconds from that signal until the program is killed.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    user: str | None = None
    order: int = 0
    stop_signal: int = signal.SIGTERM
    grace_s: float = 20.0


class Supervisor:
    """Keeps programs running.

    Args:
        on_line: receives all output, and the supervisor's messages about restarts.
        run_dir: folder for the programs' ready files; created when missing.
        policy: delays before a program is restarted.
    """

    def __init__(self, on_line: OnLine, *, run_dir: Path, policy: RestartPolicy | None = None) -> None:
        self._on_line = on_line
        self._run_dir = run_dir
        self._policy = policy or RestartPolicy()
        self._supervised: dict[str, _SupervisedProgram] = {}
        self._reaper = Reaper()
        run_dir.mkdir(parents=True, exist_ok=True)

    def start(self, program: Program) -> None:
        """Starts `program` and keeps it running until `stop`.

        Raises:
            ValueError: a program of that name is supervised already.
        """
        if program.name in self._supervised:
            raise ValueError(f"{program.name} is already supervised")
        supervised = _SupervisedProgram(program, self._policy, self._on_line, self._run_dir, self._reaper)
        self._supervised[program.name] = supervised
        supervised.start()

    def stop(self, *names: str) -> None:
        """Stops programs; kills those that exceed their grace period. Ignores unknown names."""
        programs = [self._supervised.pop(name) for name in names if name in self._supervised]
        for program in programs:
            program.ask_to_stop()
        for program in programs:
            program.wait_stopped()

    def stop_all(self) -> None:
        """Stops every program, in order."""
        for order in sorted({supervised.program.order for supervised in self._supervised.values()}):
            self.stop(
                *[name for name, supervised in self._supervised.items() if supervised.program.order == order]
            )

    def kill_all(self) -> None:
        """Kills every program, without a grace period and without a restart."""
        for supervised in list(self._supervised.values()):
            supervised.kill()

    def close(self) -> None:
        """Stops every program and the reaper."""
        try:
            self.stop_all()
        finally:
            self._reaper.close()

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> int:
        """Sends a signal to a program and returns its process id; a program that ends is restarted.

        Raises:
            NotFound: no program of that name runs now.
        """
        return self._find(name).signal(signal_number)

    def processes(self) -> dict[str, int]:
        """The process ids of the programs that run now, by name."""
        return {
            name: supervised.pid
            for name, supervised in self._supervised.items()
            if supervised.pid is not None
        }

    def exits(self, name: str) -> int:
        """The number of times that the program ended without being stopped."""
        return self._find(name).exits

    def last_status(self, name: str) -> int | None:
        """The last exit status; None before the first end, and negative after a signal."""
        return self._find(name).last_status

    def tail(self, name: str) -> str:
        """The last lines of the program's output."""
        return "\n".join(self._find(name).tail)

    def is_ready(self, name: str) -> bool:
        """Whether the program's current process has created its ready file."""
        supervised = self._find(name)
        return supervised.pid is not None and supervised.ready_file.exists()

    def _find(self, name: str) -> _SupervisedProgram:
        try:
            return self._supervised[name]
        except KeyError:
            raise NotFound(
                f"there is no program {name!r}; choose one of: {', '.join(sorted(self._supervised))}"
            ) from None


class _SupervisedProgram:
    """One program and the thread that runs it."""

    def __init__(
        self, program: Program, policy: RestartPolicy, on_line: OnLine, run_dir: Path, reaper: Reaper
    ) -> None:
        self.program = program
        self.exits = 0
        self.last_status: int | None = None
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.ready_file = run_dir / f"{program.name}.ready"
        self._policy = policy
        self._on_line = on_line
        self._owner = str(run_dir)
        self._reaper = reaper
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        # Held while a process is started or signalled, so that a stop cannot miss a process that is
        # just starting.
        self._lock = threading.Lock()
        self._stop_requested_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"supervise-{program.name}", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        self._thread.start()

    def signal(self, signal_number: int) -> int:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                raise NotFound(f"{self.program.name} does not run now")
            self._process.send_signal(signal_number)
            return self._process.pid

    def ask_to_stop(self) -> None:
        with self._lock:
            self._stopping.set()
            self._stop_requested_at = time.monotonic()
            if self._process is not None:
                self._process.send_signal(self.program.stop_signal)

    def kill(self) -> None:
        with self._lock:
            self._stopping.set()
            if self._process is not None and self._process.poll() is None:
                _kill_group(self._process.pid)

    def wait_stopped(self) -> None:
        self._thread.join(max(0.0, self._stop_requested_at + self.program.grace_s - time.monotonic()))
        if self._thread.is_alive():
            self._report(f"did not stop within {self.program.grace_s:.0f} s: killing it")
            self.kill()
            self._thread.join()
        self.ready_file.unlink(missing_ok=True)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            started_at = time.monotonic()
            outcome = self._run_once()
            if self._stopping.is_set():
                return
            self.exits += 1
            failures, delay = after_exit(self._policy, failures, started_at=started_at, now=time.monotonic())
            self._report(f"{outcome}; restarting it in {delay:.1f} s")
            self._stopping.wait(delay)

    def _run_once(self) -> str:
        """Runs the program once and returns a description of its end."""
        self.ready_file.unlink(missing_ok=True)
        with self._lock:
            if self._stopping.is_set():
                return "stopped"
            try:
                process = self._process = self._spawn()
            except OSError as error:
                self.tail.append(str(error))
                return f"cannot be started ({error})"
            # Within the lock, so that after ask_to_stop the reaper knows every process.
            self._reaper.add(
                process.pid,
                order=self.program.order,
                stop_signal=self.program.stop_signal,
                grace_s=self.program.grace_s,
            )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        status = process.wait()
        # Its children must not outlive it, or they would keep the ports that the next start needs.
        _kill_group(process.pid)
        self._reaper.remove(process.pid)
        # With a timeout, because a descendant that left the group may hold the pipe open.
        reader.join(1.0)
        self.last_status = status
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def _spawn(self) -> subprocess.Popen[bytes]:
        program = self.program
        return subprocess.Popen(  # noqa: S603 (running given programs is its purpose)
            program.argv,
            cwd=program.directory,
            **identity(program.user),
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                READY_VARIABLE: str(self.ready_file),
                OWNER_VARIABLE: self._owner,
                **program.environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                self.tail.append(line)
                self._on_line(self.program.name, line)

    def _report(self, message: str) -> None:
        self._on_line(self.program.name, message)


def identity(user: str | None) -> dict[str, Any]:
    """Arguments for `subprocess` to run as `user`, with its groups instead of root's."""
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": ()}


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # The group has ended; macOS answers "not permitted" for a group of zombies.
        return
