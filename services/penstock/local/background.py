"""A deployment without a terminal: starts in the background, stops, and shows what serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from penstock.discovery import DATA_DIR_VARIABLE, owner_of

_POLL_S = 0.1


def start_in_background(data_dir: Path) -> int:
    """Runs this command again in a session of its own; returns once it serves or has ended.

    Its output goes to this terminal until all services serve. From then on only the log file of the
    deployment has it.

    Returns:
        0 when the deployment serves; otherwise the exit status of its process.
    """
    arguments = [argument for argument in sys.argv[1:] if argument not in {"--detach", "-d"}]
    process = subprocess.Popen(  # noqa: S603 (this very command)
        [sys.executable, "-m", "penstock", *arguments, "--in-background", "--yes"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, DATA_DIR_VARIABLE: str(data_dir)},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        # Ends when the deployment serves and leaves the terminal, or when it fails.
        for line in process.stdout:
            # `up --detach | head` must not break the pipe of the deployment.
            with suppress(OSError):
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if owner_of(data_dir) == process.pid and process.poll() is None:
        return 0
    return process.wait()


def leave_terminal() -> None:
    """Ends the output to the terminal; what was reading it sees its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def stop(data_dir: Path) -> bool:
    """Stops the deployment of a directory, and waits for its end; False when none runs.

    Ctrl-C ends the wait, and the deployment goes on stopping.
    """
    pid = owner_of(data_dir)
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    while owner_of(data_dir) == pid:
        time.sleep(_POLL_S)
    return True


def programs(data_dir: Path) -> dict[str, bool]:
    """Whether each program of a running deployment serves, by name.

    Only services and their replicas report that they serve; servers are left out.
    """
    folder = data_dir / "run"
    return {name: (folder / f"{name}.ready").exists() for name in _names(folder)}


def _names(folder: Path) -> list[str]:
    try:
        return (folder / "services").read_text().split()
    except OSError:
        return []
