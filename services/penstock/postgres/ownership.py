"""Plans what a replica should own (S7), by `core.assignment`: types, or shards of flows.

The owner of a thing is the session that holds its lock. A replica that joins, leaves in good order
or transfers something notifies the other replicas. A replica that dies cannot, so while there are
several, each polls every `retry_s`. A single replica that owns everything does not poll.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from penstock.core import assignment
from penstock.core.assignment import Plan
from penstock.postgres.session import Session

log = logging.getLogger(__name__)

# A thing without an owner for this many seconds is acquired by any replica, because the replica to
# which it is assigned may be stalled.
ORPHANED_S = 10.0
# Seconds that a replica keeps what it acquired in that way.
KEEP_S = 60.0


class Group(NamedTuple):
    """The replicas of a service, and what they divide among themselves.

    Attributes:
        name: of the locks.
        channel: notified when a replica joins, leaves or transfers something.
        service: name for people.
    """

    name: str
    channel: str
    service: str


async def lock(session: Session, group: Group, name: str) -> bool:
    """Makes this session the owner of a thing; False when another session owns it."""
    return bool(await session.fetchval("ownership.lock", group.name, name))


async def unlock(session: Session, group: Group, name: str) -> None:
    """Ends the ownership of a thing, so that another session can lock it."""
    await session.fetchval("ownership.unlock", group.name, name)


class Ownership:
    """Plans of one replica.

    Args:
        session: holds the locks of what it owns.
        group: its service.
        retry_s: seconds between two plans while there are several replicas.

    Attributes:
        alone: there was no other replica at the last plan.
    """

    def __init__(self, session: Session, group: Group, retry_s: float) -> None:
        self._session = session
        self._group = group
        self._retry_s = retry_s
        self._members: list[int] = []
        # Things without an owner, and since when, on the loop's clock.
        self._free_since_s: dict[str, float] = {}
        self._keep_until_s = float("-inf")
        self.alone = False
        self._settled = False

    @property
    def next_plan_s(self) -> float:
        """When to plan again without a notification, on the loop's clock."""
        if self.alone and self._settled:
            return float("inf")
        return asyncio.get_running_loop().time() + self._retry_s

    async def join(self) -> None:
        """Registers this replica with the others."""
        await self._session.fetch("ownership.join", self._group.name, self._group.channel)

    async def leave(self) -> None:
        """Unlocks everything, unregisters this replica and notifies the others."""
        await self._session.fetch("ownership.leave", self._group.channel)

    async def notify_replicas(self) -> None:
        """Notifies all replicas that owners have changed."""
        await self._session.fetch("ownership.notify_replicas", self._group.channel)

    async def plan(self, names: Sequence[str]) -> Plan:
        """Plans which of these things to acquire and to transfer."""
        now_s = asyncio.get_running_loop().time()
        me = self._session.pid
        [row] = await self._session.fetch("ownership.owners", self._group.name, list(names))
        members: list[int] = row["members"]
        owners: dict[str, int | None] = dict(zip(names, row["owners"] or [], strict=True))
        self.alone = members == [me]
        if members != self._members:
            self._members = members
            log.info(
                "The replicas of a service changed",
                extra={
                    "event": "replicas_changed",
                    "replicas_of": self._group.service,
                    "replicas": len(members),
                    "divided": len(names),
                },
            )
        plan = assignment.plan(me, members, owners)
        self._free_since_s = {name: self._free_since_s.get(name, now_s) for name in plan.acquire}
        orphaned = [name for name, since_s in self._free_since_s.items() if now_s - since_s >= ORPHANED_S]
        if orphaned:
            self._keep_until_s = now_s + KEEP_S
            return Plan(orphaned, len(orphaned), [])
        if now_s < self._keep_until_s:
            plan = plan._replace(transfer=[])
        # The next plan shows whether what is to be acquired now has an owner.
        self._settled = not plan.acquire and all(owner in members for owner in owners.values())
        return plan
