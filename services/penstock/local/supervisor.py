"""Runs programs as processes of their own, starts them again when they die, and stops them in order.

Each program has a thread that starts it, waits for its end and decides, by `core.restart`, when to start it again.
Threads rather than asyncio: the supervisor then works under any event loop or none (tests, benchmarks), and a busy loop
delays nothing. Every program leads a session of its own: Ctrl-C in the terminal reaches it only through us, in
the right order. Should this process itself be killed, the `reaper` stops them all.
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

from penstock.core.restart import RestartPolicy, RestartState, after_exit
from penstock.errors import NotFound
from penstock.local.reaper import Reaper

# Told (program's name, one line of its output without the line's end), from any thread.
OnLine = Callable[[str, str], None]

# Programs are told where to put a mark once they serve; `penstock.process` does so.
READY_VARIABLE = "PENSTOCK_READY_FILE"
# Set for every program, so that a later run can recognise what an earlier one left behind.
OWNER_VARIABLE = "PENSTOCK_DEPLOYMENT"

_TAIL_LINES = 30


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to run, and how to stop it.

    Attributes:
        name: unique among the supervisor's programs; the prefix of its lines in the log.
        argv: the program and its arguments.
        environment: added to this process's own.
        directory: working directory; None is this process's own.
        user: run as this user; None is this process's own.
        order: programs of the lowest order are stopped first, and those of one order together.
        stop_signal: asks it to end.
        grace_s: seconds it may take after that before it is killed.
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
        on_line: receives all output and the supervisor's own remarks.
        run_dir: for the programs' ready marks; created when missing.
        policy: how fast a program that dies is started again.
    """

    def __init__(self, on_line: OnLine, *, run_dir: Path, policy: RestartPolicy | None = None) -> None:
        self._on_line = on_line
        self._run_dir = run_dir
        self._policy = policy or RestartPolicy()
        self._keepers: dict[str, _Keeper] = {}
        self._reaper = Reaper()
        run_dir.mkdir(parents=True, exist_ok=True)

    def start(self, program: Program) -> None:
        """Starts `program` and keeps it running until `stop`; one of that name must not be running."""
        if program.name in self._keepers:
            raise ValueError(f"{program.name} is already supervised")
        keeper = _Keeper(program, self._policy, self._on_line, self._run_dir, self._reaper)
        self._keepers[program.name] = keeper
        keeper.start()

    def stop(self, *names: str) -> None:
        """Asks the programs to end, kills those whose grace is over, and waits; unknown names are left alone."""
        keepers = [self._keepers.pop(name) for name in names if name in self._keepers]
        for keeper in keepers:
            keeper.ask_to_stop()
        for keeper in keepers:
            keeper.wait_stopped()

    def stop_all(self) -> None:
        """Stops every program, in order."""
        for order in sorted({keeper.program.order for keeper in self._keepers.values()}):
            self.stop(*[name for name, keeper in self._keepers.items() if keeper.program.order == order])

    def hurry(self) -> None:
        """Kills whatever runs: the user has asked a second time."""
        for keeper in list(self._keepers.values()):
            keeper.hurry()

    def close(self) -> None:
        """Stops every program and the reaper."""
        try:
            self.stop_all()
        finally:
            self._reaper.close()

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to a program's process and returns the process's id; it is started again when it ends.

        Raises:
            NotFound: no program of that name is running now.
        """
        return self._keeper(name).signal(number)

    def processes(self) -> dict[str, int]:
        """The id of each program's process, of those that run now."""
        return {name: keeper.pid for name, keeper in self._keepers.items() if keeper.pid is not None}

    def exits(self, name: str) -> int:
        """How often the program has ended by itself since `start`."""
        return self._keeper(name).exits

    def last_status(self, name: str) -> int | None:
        """The status with which the program ended the last time; None when it has not, and negative the number of a signal."""
        return self._keeper(name).last_status

    def tail(self, name: str) -> str:
        """The last lines the program has written."""
        return "\n".join(self._keeper(name).tail)

    def is_ready(self, name: str) -> bool:
        """Whether the program's present process has put its ready mark."""
        keeper = self._keeper(name)
        return keeper.pid is not None and keeper.ready_file.exists()

    def _keeper(self, name: str) -> _Keeper:
        try:
            return self._keepers[name]
        except KeyError:
            raise NotFound(f"no program {name!r}; there are: {', '.join(sorted(self._keepers))}") from None


class _Keeper:
    """One program and the thread that keeps it running."""

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
        # Held while a process is started or signalled, so that a stop never misses a process just being started.
        self._lock = threading.Lock()
        self._asked_at = 0.0
        self._thread = threading.Thread(target=self._keep, name=f"keeper-{program.name}", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        self._thread.start()

    def signal(self, number: int) -> int:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                raise NotFound(f"{self.program.name} is not running now")
            self._process.send_signal(number)
            return self._process.pid

    def ask_to_stop(self) -> None:
        with self._lock:
            self._stopping.set()
            self._asked_at = time.monotonic()
            if self._process is not None:
                self._process.send_signal(self.program.stop_signal)

    def hurry(self) -> None:
        with self._lock:
            self._stopping.set()
            if self._process is not None and self._process.poll() is None:
                _kill_group(self._process.pid)

    def wait_stopped(self) -> None:
        self._thread.join(max(0.0, self._asked_at + self.program.grace_s - time.monotonic()))
        if self._thread.is_alive():
            self._say(f"did not stop within {self.program.grace_s:.0f} s: killing it")
            self.hurry()
            self._thread.join()
        self.ready_file.unlink(missing_ok=True)

    def _keep(self) -> None:
        state = RestartState()
        while not self._stopping.is_set():
            started_at = time.monotonic()
            outcome = self._run_once()
            if self._stopping.is_set():
                return
            self.exits += 1
            state, delay = after_exit(self._policy, state, started_at=started_at, now=time.monotonic())
            self._say(f"{outcome}; starting it again in {delay:.1f} s")
            self._stopping.wait(delay)

    def _run_once(self) -> str:
        """Runs the program to its end and returns how it ended, in words."""
        self.ready_file.unlink(missing_ok=True)
        with self._lock:
            if self._stopping.is_set():
                return "stopped"
            try:
                process = self._process = self._spawn()
            except OSError as error:
                self.tail.append(str(error))
                return f"cannot be started ({error})"
            # Within the lock: once ask_to_stop has returned, the reaper knows every process there is.
            self._reaper.add(
                process.pid,
                order=self.program.order,
                stop_signal=self.program.stop_signal,
                grace_s=self.program.grace_s,
            )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        status = process.wait()
        # What it started and left behind must not outlive it, nor keep its ports from its successor.
        _kill_group(process.pid)
        self._reaper.remove(process.pid)
        # A descendant that left the group may hold the pipe open; its last words are not worth waiting for.
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

    def _say(self, remark: str) -> None:
        self._on_line(self.program.name, remark)


def identity(user: str | None) -> dict[str, Any]:
    """Arguments for `subprocess` to run as `user`: its groups too, or it would keep ours, root's among them."""
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": ()}


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # Nobody is left; macOS answers "not permitted" for a group of zombies.
        return
