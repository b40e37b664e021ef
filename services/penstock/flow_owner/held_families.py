"""Families of flows that are left out of transactions for now, so that all others go on.

A family waits until its objects are fetched or stored, until another transaction has ended, or a
minute after a fault.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.context import Context
from penstock.flow_owner.contents import Contents
from penstock.flow_owner.result_lists import Fetch, ItemResults

log = logging.getLogger(__name__)

# Seconds until a family is tried again that cannot be advanced.
_FAULTY_S = 60.0
# Seconds until a family is tried again whose rows another transaction locks.
_LOCKED_S = 0.5


class HeldFamilies:
    """The families that wait, by root flow.

    Args:
        contents: fetches and stores objects, and collects lists of results.
        fetch: runs a named statement outside the owner's transactions.
        wake: called when a family waits no longer.

    Attributes:
        reasons: why each of them waits.
    """

    def __init__(self, contents: Contents, fetch: Fetch, wake: Callable[[], None]) -> None:
        self._contents = contents
        self._fetch = fetch
        self._wake = wake
        self._waits: set[asyncio.Task[None]] = set()
        self._resumed: list[int] = []
        # Families whose rows are applied one at a time, because they need too many objects.
        self._narrow: set[int] = set()
        self.reasons: dict[int, str] = {}

    @property
    def narrow(self) -> bool:
        """Whether a family that waits no longer needs its rows applied one at a time."""
        return bool(self._narrow - self.reasons.keys())

    def take_resumed(self) -> list[int]:
        """The root flows of the families that have stopped waiting since the last call."""
        taken, self._resumed = self._resumed, []
        return taken

    def advanced(self, roots: set[int]) -> None:
        """Rows of these families were applied, so the objects that they needed may be evicted."""
        self._contents.unpin(roots)
        self._contents.lists.release(roots)
        self._narrow -= roots

    def hold_postponed(
        self,
        missing: dict[int, list[Context]],
        unstored: dict[int, dict[str, tuple[Context, str]]],
        uncollected: dict[int, list[ItemResults]],
    ) -> None:
        """Holds families until their objects are fetched and stored, and their lists collected.

        Args:
            missing: references of objects that are not in memory, by root flow.
            unstored: contexts to be stored, each with its namespace, by root flow and key.
            uncollected: lists of results, by root flow.
        """
        for root in {*missing, *unstored}:
            contexts = missing.get(root, [])
            if not self._contents.pin(root, contexts):
                if root in self._narrow:
                    # One row, and its decision needs more than this process keeps.
                    self._contents.refuse(root, contexts)
                else:
                    # Its rows may need little each.
                    self._contents.unpin([root])
                    self._narrow.add(root)
            stored = list(unstored.get(root, {}).values())
            lists = uncollected.get(root, [])
            self._hold(root, "waits for the object store", partial(self._exchange, contexts, stored, lists))

    def hold_locked(self, roots: Iterable[int]) -> None:
        """Holds families for a moment whose rows another transaction locks."""
        for root in roots:
            reason = "waits for a transaction that locks its rows"
            self._hold(root, reason, partial(asyncio.sleep, _LOCKED_S))

    def hold_faulty(self, roots: Iterable[int], error: Exception) -> None:
        """Holds families for a minute that cannot be advanced."""
        for root in roots:
            log.error(
                "A flow cannot be advanced, and is tried again in a minute",
                exc_info=error,
                extra={"event": "flow_held", "flow": root},
            )
            self._hold(root, str(error), partial(asyncio.sleep, _FAULTY_S))

    async def stop(self) -> None:
        """Ends all waits."""
        for wait in self._waits:
            wait.cancel()
        await asyncio.gather(*self._waits, return_exceptions=True)

    async def _exchange(
        self, contexts: list[Context], unstored: list[tuple[Context, str]], lists: list[ItemResults]
    ) -> None:
        await retry_until_available(lambda: self._contents.fetch(contexts), waiting_for="contents of flows")
        await retry_until_available(
            lambda: self._contents.store(unstored), waiting_for="storing the contents of flows"
        )
        for each in lists:
            collect = partial(self._contents.lists.collect, each, self._fetch)
            await retry_until_available(collect, waiting_for="lists of results of flows")

    def _hold(self, root: int, reason: str, until: Callable[[], Awaitable[None]]) -> None:
        if root in self.reasons:
            return
        self.reasons[root] = reason

        async def hold() -> None:
            try:
                await until()
            finally:
                del self.reasons[root]
                self._resumed.append(root)
                self._wake()

        task = asyncio.create_task(hold())
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)
