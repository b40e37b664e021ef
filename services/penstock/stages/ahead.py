"""Results of tasks with which a worker went on before their earlier results are committed.

In doubt a result waits, for `TRIES` at most: then it is stale like any other whose attempt is not
the current one. Tries, not seconds: an outage of PostgreSQL is no reason to drop it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import asyncpg

from penstock.core.completion import Fence
from penstock.postgres.advance import ahead

# How often a result is tried, five times a second, until the one that its attempt follows is
# committed.
TRIES = 25
# Results that wait at a time; further ones are stale.
MOST = 10_000
# Seconds after which one that was not tried again is forgotten: it was applied meanwhile.
FORGET_S = 60.0

R = TypeVar("R")


class Retry(Protocol):
    """Repeats work while PostgreSQL is away."""

    async def __call__(self, work: Callable[[], Awaitable[R]]) -> R:
        """The outcome of the work."""


class ResultsAhead:
    """Finds results that came before the one that their attempt follows.

    That one may be delivered again after them, or wait for a transaction that locks its task.

    Args:
        pool: of the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool: Any = pool
        # How often each of them was tried, and when it was last.
        self._tried: dict[Fence, tuple[int, float]] = {}

    async def leave_out(self, stale: Sequence[Fence], locked: set[int], retry: Retry) -> list[Fence]:
        """Those of stale results that do not wait; adds the tasks of the others to `locked`.

        Args:
            stale: whose attempts were not the current ones.
            locked: ids of tasks whose results are tried again.
            retry: repeats a query while PostgreSQL is away.
        """
        later = [fence for fence in stale if fence.step]
        found = await retry(lambda: ahead(self._pool, later)) if later else set()
        now_s, waiting = time.monotonic(), set[Fence]()
        for fence in [one for one, (_, last_s) in self._tried.items() if now_s - last_s > FORGET_S]:
            del self._tried[fence]
        for fence in later:
            tries, _ = self._tried.pop(fence, (0, 0.0))
            if fence.attempt_id in found and tries < TRIES and len(self._tried) < MOST:
                self._tried[fence] = (tries + 1, now_s)
                waiting.add(fence)
        locked |= {fence.id for fence in waiting}
        return [fence for fence in stale if fence not in waiting]
