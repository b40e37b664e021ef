"""Makes due tasks ready, in batches, and decides when the next ones are due."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from penstock.postgres import release
from penstock.postgres.session import Session

# Upper bound of the sleep until the next task is due: the database's clock may be corrected
# meanwhile, and no notification announces that.
MAX_DUE_SLEEP_S = 1.0
# When due tasks that another transaction locked are promoted again.
LOCKED_RETRY_S = 0.05


class Promotion:
    """The tasks that become due.

    Args:
        session: of the service.
        limit: most tasks of one batch.

    Attributes:
        changed: set when a task was scheduled, perhaps for an earlier moment than all others.
    """

    def __init__(self, session: Session, limit: int) -> None:
        self._session = session
        self._limit = limit
        self.changed = True
        # Whether the next task is due after the bound of the sleep.
        self._due_later = False

    async def step(self) -> tuple[Collection[str], float]:
        """Makes due tasks ready; returns their types, and when (loop time) the next is due."""
        loop = asyncio.get_running_loop()
        if self._due_later and not self.changed:
            # The bound of the sleep has passed: a task is due only after a step of the clock.
            wait_s = await release.next_due_s(self._session)
            if wait_s is None or wait_s > 0:
                return (), self._next_s(wait_s, LOCKED_RETRY_S)
        self.changed = False
        promoted = await release.promote(self._session, self._limit)
        if sum(promoted.values()) >= self._limit:
            # More tasks may be due; other types must not wait until all of them are ready.
            self._due_later = False
            return promoted, loop.time()
        # Without this minimum, due tasks that other transactions lock would make the loop spin.
        min_wait_s = 0.001 if promoted else LOCKED_RETRY_S
        return promoted, self._next_s(await release.next_due_s(self._session), min_wait_s)

    def _next_s(self, wait_s: float | None, min_wait_s: float) -> float:
        """When to promote again, if the next task is due in `wait_s` by the database's clock."""
        self._due_later = wait_s is not None and wait_s > MAX_DUE_SLEEP_S
        if wait_s is None:
            return float("inf")
        return asyncio.get_running_loop().time() + min(max(wait_s, min_wait_s), MAX_DUE_SLEEP_S)
