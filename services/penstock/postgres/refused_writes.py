"""The last write of this process that PostgreSQL refused because its disk is full or fails.

A server whose disk is full answers every query, and a probe that writes would cost an idle
deployment a transaction for each check. The services try again every few seconds while they have
something to write, so the errors that they meet are the probe.
"""

from __future__ import annotations

import time

import asyncpg

from penstock.errors import PostgresUnavailable

# The errors of a disk: it is full, or it cannot be read or written.
DISK_ERRORS = (asyncpg.DiskFullError, asyncpg.PostgresIOError)
# Seconds after which a refusal says nothing any more: longer than the pause between two attempts.
RECENT_S = 10.0

_last: tuple[float, str] | None = None


def note(error: BaseException) -> None:
    """Keeps an error of the driver if it is one of its disk."""
    global _last  # noqa: PLW0603 (of the process, like its readiness)
    if isinstance(error, DISK_ERRORS):
        _last = time.monotonic(), f"PostgreSQL: {type(error).__name__}: {error}"


def ensure_none() -> None:
    """Checks that no write was refused a moment ago.

    Raises:
        PostgresUnavailable: one was.
    """
    if _last is not None and time.monotonic() - _last[0] < RECENT_S:
        raise PostgresUnavailable(f"{_last[1]}: free some space for the server, or mend its disk")
