"""Which types this replica should own (S7): one round of `core.spread` whenever something may have changed.

A replica that comes, or goes in good order, or gives types up notifies the others. One that dies cannot, so while there are
others, all of them look every `own_retry_s`; a replica that is alone and owns everything asks nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from penstock.core import spread
from penstock.core.spread import Plan
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# What nobody takes for so many seconds is taken by whoever sees it, whatever its share: whose turn it is may stand still.
PATIENCE_S = 10.0
# What was taken so is kept for a while.
KEEP_S = 60.0


class Owning:
    """Plans of one replica.

    Args:
        settings: of the service.
        session: whose locks are the ownership.

    Attributes:
        alone: there was no other replica when it was last planned.
    """

    def __init__(self, settings: TaskSyncSettings, session: Session) -> None:
        self._settings = settings
        self._session = session
        self._members: list[int] = []
        self._free: dict[str, float] = {}
        self._keep_until_s = float("-inf")
        self.alone = False
        self._settled = False

    @property
    def again_s(self) -> float:
        """When to plan again though nobody has told anything, on the loop's clock."""
        if self.alone and self._settled:
            return float("inf")
        return asyncio.get_running_loop().time() + self._settings.own_retry_s

    async def join(self) -> None:
        """From now on other replicas know of this one."""
        await release.join(self._session)

    async def plan(self, names: Sequence[str]) -> Plan:
        """What to take and to give up of the types of these names."""
        now_s = asyncio.get_running_loop().time()
        me = self._session.pid
        members, owners = await release.owners(self._session, names)
        self.alone = members == [me]
        if members != self._members:
            self._members = members
            log.info("replicas of task-sync: %d, types: %d", len(members), len(names))
        found = spread.plan(me, members, owners)
        self._free = {name: self._free.get(name, now_s) for name in found.take}
        left = [name for name, since_s in self._free.items() if now_s - since_s >= PATIENCE_S]
        if left:
            self._keep_until_s = now_s + KEEP_S
            return Plan(left, len(left), [])
        if now_s < self._keep_until_s:
            found = found._replace(give=[])
        # What is taken now is found owned, or not, in the next round.
        self._settled = not found.take and all(owner in members for owner in owners.values())
        return found
