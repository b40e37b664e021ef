"""Drains held callbacks: makes as many due as their target and the diverted path can take."""

from __future__ import annotations

import asyncpg

from penstock.callbacks.router import Router
from penstock.callbacks.target_cache import TargetCache
from penstock.core.target import TargetId
from penstock.postgres import callbacks


class Drainer:
    """Drains the targets of this process in turn.

    Args:
        pool: of the database.
        cache: decides how many callbacks each target may receive.
        router: decides how many callbacks the diverted path has room for.

    Attributes:
        drained: callbacks drained since the start.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], cache: TargetCache, router: Router) -> None:
        self._pool = pool
        self._cache = cache
        self._router = router
        self.drained = 0

    async def drain(self, now_s: float) -> bool:
        """Makes some held callbacks due; returns whether there were any.

        Args:
            now_s: seconds on the monotonic clock.

        Raises:
            PostgresUnavailable: perhaps nothing was drained; the targets are found again by a
                search.
        """
        cache, room = self._cache, self._router.drain_room
        wanted: dict[TargetId, int] = {}
        for target_id in cache.held:
            target = cache.peek(target_id)
            if target is None or target.disabled:
                continue
            if room <= 0:
                break
            waiting = self._router.diverted.waiting_for(target_id)
            allowed = min(target.drain.allow(now_s, hanging=target.hanging, waiting=waiting), room)
            if allowed:
                wanted[target_id] = allowed
                room -= allowed
        if not wanted:
            return False
        # Before the statement: a callback that is held while it runs marks its target again.
        for target_id in wanted:
            del cache.held[target_id]
        drained = await callbacks.drain_held(self._pool, wanted)
        self.drained += sum(drained.values())
        # A target that had as many as wanted may have more; it goes behind the other targets.
        cache.mark_held(target_id for target_id, most in wanted.items() if drained.get(target_id, 0) >= most)
        return bool(drained)
