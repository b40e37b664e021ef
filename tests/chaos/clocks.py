"""Steps the wall clocks of single processes while they run.

`unshare --time` moves only monotonic clocks, and tests must not set the clock of the machine. So
`clock.c` is compiled with the machine's C compiler and preloaded. Python, Java and PostgreSQL then
see the machine's time of day plus an offset from a file.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.local.deployment import SERVICES, Service
from tests.chaos.run_report import RUN

SOURCE = Path(__file__).with_name("clock.c")


def missing() -> str | None:
    """Why this machine cannot step clocks; None when it can."""
    if compiler() is None:
        return "there is no C compiler (cc or gcc) for the preloaded clock"
    return None


def compiler() -> str | None:
    """The path of the C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc")


def deployment_clocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Clocks | None, Mapping[str, Service]]:
    """The clocks of a deployment with servers and workers, and its services with their clocks; None
    when this machine cannot step clocks, and the report then says why."""
    if reason := missing():
        RUN.add_sentence(f"without clocks that jump, since {reason}")
        return None, SERVICES
    clock = Clocks(folder, [*SERVICES, "worker", "postgres", "java"])
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    services = {
        name: replace(each, argv=(*clock.prefix(name), *each.argv)) for name, each in SERVICES.items()
    }
    return clock, services


class Clocks:
    """The clocks of one scenario.

    Args: folder: folder of the clocks, which is created. names: names of the clocks; a program such
        as `postgres` or `java` uses the clock with its name.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        folder.mkdir()
        self._folder = folder
        self._library = folder / "clock.so"
        command = [
            compiler() or "cc",
            "-shared",
            "-fPIC",
            "-O1",
            "-o",
            str(self._library),
            str(SOURCE),
            "-ldl",
        ]
        subprocess.run(command, check=True)
        for name in names:
            self.step(name, 0)

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which a program uses the clock with its name."""
        return {"LD_PRELOAD": str(self._library), "PENSTOCK_CHAOS_CLOCKS": str(self._folder)}

    def prefix(self, name: str) -> tuple[str, ...]:
        """The beginning of a command line that gives its program this clock."""
        variables = {**self.environment, "PENSTOCK_CHAOS_CLOCK": name}
        return ("env", *(f"{key}={value}" for key, value in variables.items()))

    def step(self, name: str, seconds: int) -> None:
        """Sets the offset of a clock from the machine's clock, in seconds."""
        file = self._folder / name
        # Written in place, since the processes with this clock have mapped the file.
        with file.open("r+b" if file.exists() else "wb") as clock:
            clock.write(seconds.to_bytes(8, "little", signed=True))
