"""Worker processes of a fault test, each of which is known by its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class Workers:
    """Processes that run `ledger_worker`.

    Args:
        environment: leads them to the deployment.
        ledger: where they write their executions.
        log: where their output goes.
    """

    def __init__(self, environment: Mapping[str, str], ledger: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", "tests.chaos.ledger_worker", str(ledger)]
        self._environment = {**os.environ, **environment}
        self._log = log.open("ab")
        self._leaving: list[subprocess.Popen[bytes]] = []
        self.running: list[subprocess.Popen[bytes]] = []

    def start(
        self, *, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts one more; `prefix` is a command that becomes it (`env`, `ip netns exec`), under the same id."""
        started = subprocess.Popen(
            [*prefix, *self._command],
            env={**self._environment, **(environment or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.running.append(started)
        return started

    def kill(self, victim: subprocess.Popen[bytes]) -> None:
        """Ends one without a word."""
        self.running.remove(victim)
        victim.kill()
        victim.wait()

    def leave(self, leaver: subprocess.Popen[bytes]) -> None:
        """Asks one to end, without waiting for it; one that is still starting is killed, since it cannot hear yet."""
        if not _hears(leaver):
            self.kill(leaver)
            return
        self.running.remove(leaver)
        leaver.terminate()
        self._leaving.append(leaver)

    def stop(self) -> list[int]:
        """Stops all politely; returns the exit statuses of all that were asked to end."""
        for worker in list(self.running):
            # One that a failed test left standing still would never hear it.
            worker.send_signal(signal.SIGCONT)
            self.leave(worker)
        try:
            return [_ended(worker) for worker in self._leaving]
        finally:
            self._log.close()


def _hears(worker: subprocess.Popen[bytes]) -> bool:
    """Whether it has a handler for SIGTERM by now: the mask of signals it catches, proc_pid_status(5)."""
    if worker.poll() is not None:
        return True  # Its status shall be seen.
    status = Path(f"/proc/{worker.pid}/status").read_text(encoding="ascii")
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _ended(worker: subprocess.Popen[bytes]) -> int:
    try:
        # Longer than the worker gives its own drain.
        return worker.wait(timeout=60)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()
