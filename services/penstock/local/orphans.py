"""Ends orphaned processes of an earlier run whose reaper was killed too."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.local.supervisor import OWNER_VARIABLE

_GRACE_S = 10.0


def end_process(pid: int, signal_number: int, is_ours: Callable[[str], bool]) -> bool:
    """Ends process `pid` if its command line is ours; returns whether there was such a process.

    Args:
        pid: a process id from a file; the id may belong to another process by now.
        signal_number: the signal that asks the process to end; ten seconds later it is killed.
        is_ours: decides by the command line, words joined by spaces.
    """
    import psutil  # noqa: PLC0415 (optional dependency)

    try:
        process = psutil.Process(pid)
        if not is_ours(" ".join(process.cmdline())):
            return False
        _end([process], signal_number)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return True


def end_orphans(run_dir: Path) -> list[str]:
    """Ends the processes of an earlier supervisor with this `run_dir`; returns their commands."""
    try:
        import psutil  # noqa: PLC0415 (optional dependency)
    except ImportError:
        # psutil comes with the embedded servers. Without them no orphan can hold a port or data.
        return []
    orphans = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(OWNER_VARIABLE) == str(run_dir):
                orphans[process] = " ".join(process.cmdline()[:4])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    _end([*orphans], signal.SIGTERM)
    return [*orphans.values()]


def _end(processes: list, signal_number: int) -> None:  # type: ignore[type-arg]  # psutil is imported where it is needed
    import psutil  # noqa: PLC0415 (optional dependency)

    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal_number)
    _, alive = psutil.wait_procs(processes, timeout=_GRACE_S)
    for process in alive:
        # Another process can have the id by now: psutil tells them apart and sends it no signal.
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
