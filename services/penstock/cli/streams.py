"""The standard streams of the command line: closed ones, encodings, and outputs that fail.

A parent process may close a stream, or choose an encoding that lacks a character of the output.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from contextlib import suppress


def prepare(*, json_: bool) -> None:
    """Makes the standard streams usable.

    Args:
        json_: write UTF-8 in any locale, because the output is JSON.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is that of the closed stream. A socket would get it
            # otherwise, and the output of a child process would go to the socket.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 (open to the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            ascii_ = codecs.lookup(stream.encoding).name == "ascii"
            # Also UTF-8 lacks characters: those of a path that is not UTF-8.
            stream.reconfigure(encoding="utf-8" if json_ or ascii_ else None, errors="backslashreplace")


def discard() -> None:
    """Sends further output nowhere: Python would try to write it again when it ends."""
    for stream in (sys.stdout, sys.stderr):
        # A stream of a test has no descriptor.
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123 (no path)
            os.dup2(nowhere.fileno(), stream.fileno())
