"""The reaper: a process that stops a deployment's programs after the deployment has been killed.

It runs by path, with the standard library only, in its own session, so that Ctrl-C and a closed
terminal do not reach it. It reads its registrations from standard input, and only the deployment
holds the other end of that pipe. When the deployment ends, by SIGKILL too, the kernel closes the
pipe. The reaper then stops the registered programs in order, each with its own signal and grace
period, so that the database shuts down cleanly.

It uses a pipe instead of PR_SET_PDEATHSIG. That exists on Linux only, fires when the *thread* that
started the child ends, and is cleared when a child changes its user, as PostgreSQL does under root.
It would also stop all programs at once.

Protocol, one line each: `add PID ORDER SIGNAL GRACE_S`, `remove PID`. At the end of file the reaper
stops all registered programs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


class Reaper:
    """The deployment's side: starts the reaper process and registers programs with it."""

    def __init__(self) -> None:
        # Several threads register programs, and their lines must not mix.
        self._lock = threading.Lock()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        from penstock.forking import keep_from_children  # noqa: PLC0415 (the reaper process has no penstock)

        process = subprocess.Popen(  # noqa: S603 (this very file)
            [sys.executable, "-I", "-S", str(Path(__file__))],
            stdin=subprocess.PIPE,
            # Otherwise it would keep open the output of a deployment that leaves its terminal.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # Unbuffered, so that a broken pipe leaves no data behind.
            bufsize=0,
        )
        assert process.stdin is not None
        # A forked child that outlives the deployment would keep the pipe, and the reaper waiting.
        keep_from_children(process.stdin.fileno())
        return process

    def add(self, pid: int, *, order: int, stop_signal: int, grace_s: float) -> None:
        """Registers process group `pid`; groups with the lowest `order` are stopped first."""
        self._send(f"add {pid} {order} {int(stop_signal)} {grace_s}\n")

    def remove(self, pid: int) -> None:
        """Removes process group `pid`, which has ended: its id may be reused."""
        self._send(f"remove {pid}\n")

    def close(self) -> None:
        """Ends the reaper, which first stops the programs that are still registered."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        # Without its reaper the deployment goes on; the next one ends what is left (`orphans`).
        with self._lock, suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())


def main() -> None:
    """The reaper process: reads registrations until the end of file, then stops programs."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only the end of the deployment may end the reaper.
        signal.signal(number, signal.SIG_IGN)
    registered: dict[int, tuple[int, int, float]] = {}
    for line in sys.stdin:
        verb, pid, *rest = line.split()
        if verb == "add":
            registered[int(pid)] = (int(rest[0]), int(rest[1]), float(rest[2]))
        else:
            registered.pop(int(pid), None)
    for order in sorted({entry[0] for entry in registered.values()}):
        _stop({pid: entry for pid, entry in registered.items() if entry[0] == order})


def _stop(registered: dict[int, tuple[int, int, float]]) -> None:
    # The programs are not children of the reaper, so it cannot wait for them and must poll.
    for pid, (_, number, _) in registered.items():
        _signal_group(pid, number)
    deadline = time.monotonic() + max(grace for _, _, grace in registered.values())
    while any(_runs(pid) for pid in registered) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in registered:
        _signal_group(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        # A zombie does not run, but in a container without an init process its group exists until
        # the container ends.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return False
    except OSError:
        # There is no such process, or this system has no /proc: ask for the group.
        pass
    return _signal_group(pid, 0)


def _signal_group(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # macOS answers "not permitted" for a group with only zombies left.
        return False
    return True


if __name__ == "__main__":
    main()
