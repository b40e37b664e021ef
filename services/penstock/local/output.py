"""The merged log of all programs, with the program's name in colour before each line."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from penstock.local.supervisor import OnLine

# ANSI colours that are legible on dark and light terminals; red is reserved for errors.
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_NAME_WIDTH = 12


class MergedLog:
    """Writes lines to a stream, from any thread.

    Args:
        stream: the output.
        colour: whether names are coloured; see `wants_colour`.
        on_lost: called once, on any thread, when the stream takes no more lines: `| head` has read
            enough, or a disk is full. Further lines are dropped.

    Attributes:
        lost: whether the stream takes no more lines.
    """

    def __init__(
        self, stream: IO[str], *, colour: bool, on_lost: Callable[[], object] = lambda: None
    ) -> None:
        self.lost = False
        self._stream = stream
        self._colour = colour
        self._on_lost = on_lost
        self._colours: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        """Writes one line of program `name`."""
        if is_routine(name, line):
            return
        padded = f"{name:<{_NAME_WIDTH}}"
        with self._lock:
            if self.lost:
                return
            if self._colour:
                colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
                padded = f"\x1b[{colour}m{padded}\x1b[0m"
            try:
                self._stream.write(f"{padded} {line}\n")
                self._stream.flush()
            except OSError:
                self.lost = True
        if self.lost:
            self._on_lost()


class FileLog:
    """Appends every line to a file; keeps the file of the previous run as `.1`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_name(path.name + ".1"))
        # In any locale: a line of a service may have any character.
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")
        self._lock = threading.Lock()

    def __call__(self, name: str, line: str) -> None:
        """Appends one line of program `name`; after `close` it is dropped."""
        with self._lock:
            if not self._file.closed:
                self._file.write(f"{name:<{_NAME_WIDTH}} {line}\n")
                self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()


def both(first: OnLine, second: OnLine) -> OnLine:
    """Combines two receivers: each gets every line."""

    def on_line(name: str, line: str) -> None:
        first(name, line)
        second(name, line)

    return on_line


def is_routine(name: str, line: str) -> bool:
    """Whether a line only reports normal operation, as PostgreSQL does at level LOG."""
    return name == "postgres" and line.startswith("LOG:")


def wants_colour(stream: IO[str]) -> bool:
    """Whether to colour: only on a terminal, and only while NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
