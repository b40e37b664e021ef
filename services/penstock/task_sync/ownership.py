"""Plans which types this replica should own (S7), by `core.assignment`.

A replica that joins, leaves in good order or transfers types notifies the other replicas. A replica
that dies cannot, so while there are several, each polls every `own_retry_s`. A single replica that
owns all types does not poll.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from penstock.core import assignment
from penstock.core.assignment import Plan
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# A type without an owner for this many seconds is acquired by any replica, because the replica to
# which it is assigned may be stalled.
ORPHANED_S = 10.0
# Seconds that a replica keeps a type that it acquired in that way.
KEEP_S = 60.0


class Ownership:
    """Plans of one replica.

    Args:
        settings: of the service.
        session: holds the locks of the owned types.

    Attributes:
        alone: there was no other replica at the last plan.
    """

    def __init__(self, settings: TaskSyncSettings, session: Session) -> None:
        self._settings = settings
        self._session = session
        self._members: list[int] = []
        # Types without an owner, and since when, on the loop's clock.
        self._free_since_s: dict[str, float] = {}
        self._keep_until_s = float("-inf")
        self.alone = False
        self._settled = False

    @property
    def next_plan_s(self) -> float:
        """When to plan again without a notification, on the loop's clock."""
        if self.alone and self._settled:
            return float("inf")
        return asyncio.get_running_loop().time() + self._settings.own_retry_s

    async def join(self) -> None:
        """Registers this replica with the others."""
        await release.join(self._session)

    async def plan(self, names: Sequence[str]) -> Plan:
        """Plans which of these types to acquire and to transfer."""
        now_s = asyncio.get_running_loop().time()
        me = self._session.pid
        members, owners = await release.owners(self._session, names)
        self.alone = members == [me]
        if members != self._members:
            self._members = members
            log.info(
                "The replicas of task-sync changed",
                extra={"event": "replicas_changed", "replicas": len(members), "task_types": len(names)},
            )
        plan = assignment.plan(me, members, owners)
        self._free_since_s = {name: self._free_since_s.get(name, now_s) for name in plan.acquire}
        orphaned = [name for name, since_s in self._free_since_s.items() if now_s - since_s >= ORPHANED_S]
        if orphaned:
            self._keep_until_s = now_s + KEEP_S
            return Plan(orphaned, len(orphaned), [])
        if now_s < self._keep_until_s:
            plan = plan._replace(transfer=[])
        # The next plan shows whether the types to acquire now have an owner.
        self._settled = not plan.acquire and all(owner in members for owner in owners.values())
        return plan
