"""Ready tasks that other transactions lock: when to leave them out of releases. Pure.

A release does not wait for a row lock. It leaves out the tasks that it found locked, so that the
tasks behind them are released, and tries them again soon. Nothing notifies the end of a lock.
"""

from __future__ import annotations

from collections.abc import Collection

# Seconds until locked tasks are tried again: at first, and after several attempts in a row.
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 0.5
# Most tasks of a type that are left out. Beyond, the type waits for the next attempt: each
# statement passes over all of them.
MAX_TASKS = 20_000


class LockedTasks:
    """The tasks of one type that its last releases found locked."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._retry_s = 0.0
        self._retry_at_s = float("inf")

    def excluded(self, now_s: float) -> Collection[int]:
        """The tasks to leave out of the next release; none when another attempt is due."""
        if now_s >= self._retry_at_s:
            self._ids, self._retry_at_s = set(), float("inf")
        return self._ids

    def add(self, ids: Collection[int], now_s: float) -> None:
        """Adds the tasks that a release, which left out `excluded`, found locked."""
        if ids and not self._ids:
            self._retry_s = min(max(2 * self._retry_s, FIRST_RETRY_S), MAX_RETRY_S)
            self._retry_at_s = now_s + self._retry_s
        elif not self._ids:
            self._retry_s = 0.0
        self._ids.update(ids)

    @property
    def full(self) -> bool:
        """Whether no further task can be left out."""
        return len(self._ids) >= MAX_TASKS

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next attempt; None without locked tasks."""
        return max(0.0, self._retry_at_s - now_s) if self._ids else None
