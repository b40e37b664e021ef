"""The worker processes of a fault test."""

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
        environment: settings of the deployment.
        ledger: file of their executions.
        log: file of their output.

    Attributes:
        running: workers that should run.
        leaving: workers that were stopped.
    """

    def __init__(self, environment: Mapping[str, str], ledger: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", "tests.chaos.ledger_worker", str(ledger)]
        self._environment = {**os.environ, **environment}
        self._log = log.open("ab")
        self.leaving: list[subprocess.Popen[bytes]] = []
        self.running: list[subprocess.Popen[bytes]] = []
        # How each was started, by process id.
        self._how: dict[int, tuple[Sequence[str], Mapping[str, str]]] = {}

    def start(
        self, *, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a worker; `prefix` is a command that replaces itself by it (`env`, `ip netns
        exec`)."""
        started = subprocess.Popen(
            [*prefix, *self._command],
            env={**self._environment, **(environment or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.running.append(started)
        self._how[started.pid] = prefix, environment or {}
        return started

    def start_again(self, ended: subprocess.Popen[bytes]) -> None:
        """Starts a worker like one that has ended."""
        prefix, environment = self._how[ended.pid]
        self.start(prefix=prefix, environment=environment)

    def environment_of(self, worker: subprocess.Popen[bytes]) -> Mapping[str, str]:
        """The settings of a worker beside those of the deployment."""
        return self._how[worker.pid][1]

    def type_of(self, worker: subprocess.Popen[bytes]) -> str:
        """The type that a worker serves."""
        return self._how[worker.pid][1].get("LEDGER_TYPE", "count")

    def kill(self, victim: subprocess.Popen[bytes]) -> None:
        """Kills a worker."""
        self.running.remove(victim)
        victim.kill()
        victim.wait()

    def leave(self, leaver: subprocess.Popen[bytes]) -> None:
        """Stops a worker without waiting for its end; kills one that does not handle SIGTERM
        yet."""
        if not _handles_sigterm(leaver):
            self.kill(leaver)
            return
        self.running.remove(leaver)
        leaver.terminate()
        self.leaving.append(leaver)

    def stop(self) -> list[int]:
        """Stops all workers; returns the exit statuses of all that were not killed."""
        for worker in list(self.running):
            # A failed test may have left the worker paused.
            worker.send_signal(signal.SIGCONT)
            self.leave(worker)
        try:
            return [_exit_status(worker) for worker in self.leaving]
        finally:
            self._log.close()


def _handles_sigterm(worker: subprocess.Popen[bytes]) -> bool:
    """Whether the worker handles SIGTERM, by its mask of caught signals; see proc_pid_status(5)."""
    if worker.poll() is not None:
        return True  # `stop` returns its exit status.
    status = Path(f"/proc/{worker.pid}/status").read_text(encoding="ascii")
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _exit_status(worker: subprocess.Popen[bytes]) -> int:
    try:
        # Longer than the drain timeout of the worker.
        return worker.wait(timeout=60)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()
