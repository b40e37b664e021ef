"""Removes the containers of killed runs: an engine would start them again each time it starts.

Imports the standard library only, because .ci/run runs it before anything is installed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_PREFIX = "penstock-test-"
_LABEL = "com.docker.compose.project"


def name_of_run(token: str) -> str:
    """The name of a run of this process, by which others see whether it is alive."""
    return f"{_PREFIX}{os.getpid()}-{token}"


def remove() -> None:
    """Removes the containers of runs whose processes have ended."""
    listed = subprocess.run(
        ["docker", "ps", "--all", "--format", f'{{{{.ID}}}} {{{{.Label "{_LABEL}"}}}}'],
        capture_output=True,
        text=True,
        check=True,
    )
    dead = []
    for line in listed.stdout.splitlines():
        container, _, project = line.partition(" ")
        pid = project.removeprefix(_PREFIX).partition("-")[0]
        if project.startswith(_PREFIX) and not Path("/proc", pid).exists():
            dead.append(container)
    if dead:
        subprocess.run(["docker", "rm", "--force", "--volumes", *dead], check=True)


if __name__ == "__main__":
    remove()
