"""Ends what an earlier run left behind, should even its reaper have been killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from penstock.local.supervisor import OWNER_VARIABLE

_GRACE_S = 10.0


def end_process(pid: int, number: int, is_ours: Callable[[str], bool]) -> bool:
    """Ends process `pid` if its command line is ours; returns whether there was such a process.

    Args:
        pid: a process id from a file, which may by now belong to anybody.
        number: the signal that asks it to end; after ten seconds it is killed.
        is_ours: told the command line, words joined by spaces.
    """
    import psutil  # noqa: PLC0415 (optional dependency)

    try:
        process = psutil.Process(pid)
        if not is_ours(" ".join(process.cmdline())):
            return False
        _end([process], number)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return True


def end_leftovers(run_dir: Path) -> list[str]:
    """Ends every process that a supervisor with this `run_dir` started earlier; returns their command lines."""
    try:
        import psutil  # noqa: PLC0415 (optional dependency)
    except ImportError:
        # It comes with the embedded servers; without those nothing holds a port or data that we would need.
        return []
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(OWNER_VARIABLE) == str(run_dir):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    names = [" ".join(process.cmdline()[:4]) for process in found if process.is_running()]
    _end(found, signal.SIGTERM)
    return names


def _end(processes: list, number: int) -> None:  # type: ignore[type-arg]  # psutil is imported where it is needed
    import psutil  # noqa: PLC0415 (optional dependency)

    for process in processes:
        if process.is_running():
            process.send_signal(number)
    _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
