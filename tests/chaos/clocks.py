"""Wall clocks of single processes, stepped while they run.

`unshare --time` moves only monotonic clocks, and the machine's own clock is not ours to set. So `clock.c` is compiled
with the machine's C compiler and preloaded: what Python, Java and PostgreSQL take for the time of day is then the
machine's plus what a file says.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


def missing() -> str | None:
    """Why clocks cannot be stepped here; None when they can."""
    if compiler() is None:
        return "no C compiler (cc or gcc), with which to make the clock that is preloaded"
    return None


def compiler() -> str | None:
    """The C compiler."""
    return shutil.which("cc") or shutil.which("gcc")


class Clocks:
    """The clocks of one scenario.

    Args:
        folder: theirs.
        names: of the clocks; one that is named after a program (`postgres`, `java`) is that program's.
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
        """Under which a program has the clock of its own name."""
        return {"LD_PRELOAD": str(self._library), "PENSTOCK_CHAOS_CLOCKS": str(self._folder)}

    def prefix(self, name: str) -> tuple[str, ...]:
        """The command in front of a program's that gives it this clock."""
        given = {**self.environment, "PENSTOCK_CHAOS_CLOCK": name}
        return ("env", *(f"{key}={value}" for key, value in given.items()))

    def step(self, name: str, seconds: int) -> None:
        """From now on, the clock is this far from the machine's."""
        file = self._folder / name
        # In place and at once: it is mapped by whoever has this clock.
        with file.open("r+b" if file.exists() else "wb") as clock:
            clock.write(seconds.to_bytes(8, "little", signed=True))
