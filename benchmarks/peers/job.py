"""The job that every peer runs: three stages that pass a context of 200 bytes on.

A worker calls `started` in the first stage and `ended` in the last. Each call appends a line to the
file in `PEERS_LEDGER`: the kind, the task's number, its submission in seconds since 1970, and the
seconds since then. Stages do nothing else, unless `PEERS_STAGE_S` gives them a duration in seconds.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

STAGES = ("one", "two", "three")
# Flows: items of the fan-out, and levels of the nesting.
JOIN, DEPTH = 1_000, 10
PADDING = "x" * 150
LEDGER, STAGE_S = "PEERS_LEDGER", "PEERS_STAGE_S"
REDIS, KAFKA, POSTGRES = "PEERS_REDIS", "PEERS_KAFKA", "PEERS_POSTGRES"

_pause_s = float(os.environ.get(STAGE_S, "0"))
_file: TextIO | None = None


def context(number: int) -> dict[str, Any]:
    """Returns the context of a task: 200 bytes as JSON, with the moment of its submission."""
    return {"n": number, "at": time.time(), "pad": PADDING}


def started(given: dict[str, Any]) -> None:
    """Records the start of a task's first stage."""
    _record("s", given)


def ended(given: dict[str, Any]) -> None:
    """Records the end of a task's last stage."""
    _record("e", given)


def record(stage: str, given: dict[str, Any]) -> None:
    """Records what `stage` has to record."""
    if stage == STAGES[0]:
        started(given)
    elif stage == STAGES[-1]:
        ended(given)


def work() -> None:
    """The work of a stage in a synchronous handler."""
    if _pause_s:
        time.sleep(_pause_s)


async def work_async() -> None:
    """The work of a stage in an asynchronous handler."""
    if _pause_s:
        await asyncio.sleep(_pause_s)


def _record(kind: str, given: dict[str, Any]) -> None:
    global _file  # noqa: PLW0603 (opened on first use, because a prefork pool forks before)
    if _file is None:
        _file = open(os.environ[LEDGER], "a", buffering=1)  # noqa: SIM115 (as long as the process)
    _file.write(f"{kind} {given['n']} {given['at']:.6f} {time.time() - given['at']:.6f}\n")


@dataclass
class Ledger:
    """Reads what the workers recorded, from where it stopped reading.

    Attributes:
        file: the file of `PEERS_LEDGER`.
        submitted: submission in seconds since 1970, by number.
        starts: seconds from submission to the start of the first stage, by number.
        ends: seconds from submission to the end of the last stage, by number.
        repeated: numbers whose first or last stage ran more than once.
    """

    file: Path
    submitted: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    _offset: int = 0

    def read(self) -> None:
        """Reads the whole lines that were appended since the last call."""
        if not self.file.exists():
            return
        with self.file.open("rb") as lines:
            lines.seek(self._offset)
            data = lines.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for line in data.splitlines():
            kind, number, submitted, seconds = line.split()
            self.submitted[int(number)] = float(submitted)
            into = self.starts if kind == b"s" else self.ends
            if int(number) in into:
                self.repeated.add(int(number))
            into.setdefault(int(number), float(seconds))
