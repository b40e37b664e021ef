"""Stops what a deployment started when the deployment itself has been killed.

A process of its own, run by path with nothing but the standard library, in its own session so that neither Ctrl-C nor
a closed terminal reaches it. It reads what to stop from its standard input, whose other end only the deployment
holds. However the deployment ends, SIGKILL included, the kernel closes that end; whatever is still registered
then is stopped in order, each with its own signal and grace, so that even the database shuts down cleanly.

A pipe rather than PR_SET_PDEATHSIG: that exists on Linux only, fires when the *thread* that started the child ends,
is dropped when a child changes its user (as PostgreSQL does under root), and would stop everything at once.

Protocol, one line each: `add PID ORDER SIGNAL GRACE_S`, `remove PID`. End of file: stop what is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


class Reaper:
    """The deployment's side: a reaper process and what it has been told."""

    def __init__(self) -> None:
        self._told: dict[int, str] = {}
        # Told from several threads: lines must not mix.
        self._lock = threading.Lock()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 (this very file)
            [sys.executable, "-I", "-S", str(Path(__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
            # Unbuffered: nothing is left to write when the pipe breaks.
            bufsize=0,
        )

    def add(self, pid: int, *, order: int, stop_signal: int, grace_s: float) -> None:
        """Registers process group `pid`; the lowest `order` is stopped first."""
        with self._lock:
            self._told[pid] = f"add {pid} {order} {int(stop_signal)} {grace_s}\n"
            self._tell(self._told[pid])

    def remove(self, pid: int) -> None:
        """Forgets process group `pid`, which has ended: its number may be given to another."""
        with self._lock:
            if self._told.pop(pid, None):
                self._tell(f"remove {pid}\n")

    def close(self) -> None:
        """Ends the reaper; what is still registered is stopped by it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        try:
            self._write(line)
        except BrokenPipeError:
            # Somebody killed the reaper: another takes its place and hears everything again.
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = self._start()
            self._write("".join(self._told.values()))

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())


def main() -> None:
    """The reaper's side."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only the end of the deployment ends the reaper.
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
    # Not our children, so they cannot be waited for: looking whether they still run is all there is.
    for pid, (_, number, _) in registered.items():
        _signal_group(pid, number)
    deadline = time.monotonic() + max(grace for _, _, grace in registered.values())
    while any(_runs(pid) for pid in registered) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in registered:
        _signal_group(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        # A zombie runs no more, but in a container where nobody collects zombies its group exists for ever.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return False
    except OSError:
        # No such process, or no /proc on this system: the group tells.
        pass
    return _signal_group(pid, 0)


def _signal_group(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # macOS answers "not permitted" for a group of which only zombies are left.
        return False
    return True


if __name__ == "__main__":
    main()
