"""Removes the containers of killed runs: an engine would start them again each time it starts.

Imports the standard library only, because .ci/run runs it before anything is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

# The process of a run. Other names are those of other commits, which may be alive.
_RUN = re.compile(r"penstock-test-(\d+)-[0-9a-f]{8}")
_LABEL = "com.docker.compose.project"


def name_of_run(token: str) -> str:
    """The name of a run of this process, with a token of eight hexadecimal digits."""
    return f"penstock-test-{os.getpid()}-{token}"


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
        if (run := _RUN.fullmatch(project)) and not Path("/proc", run[1]).exists():
            dead.append(container)
    if dead:
        # Another run may be removing them, too.
        subprocess.run(["docker", "rm", "--force", "--volumes", *dead], check=False)


if __name__ == "__main__":
    remove()
