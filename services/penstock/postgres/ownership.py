"""Divides things among the replicas of a service (S7): types, or shards of flows.

The owner of a thing is the session that holds its lock. `core.assignment` plans which things a
replica acquires, and which it transfers. A replica that joins, leaves in good order or transfers
something notifies the other replicas. A replica that dies cannot, so while there are several, each
polls every `retry_s`. A single replica that owns everything does not poll.

A service that owns things has a `Group` and a loop. The loop calls `step` whenever it is `due`,
acts on the changes, and sleeps until `next_s` at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
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


class Changes(NamedTuple):
    """The result of one step.

    Attributes:
        acquired: things that this replica owns from now on.
        surplus: things that another replica should own; `Ownership.transfer` ends their ownership.
    """

    acquired: list[str]
    surplus: list[str]


async def lock(session: Session, group: Group, name: str) -> bool:
    """Makes this session the owner of a thing; False when another session owns it."""
    return bool(await session.fetchval("ownership.lock", group.name, name))


async def unlock(session: Session, group: Group, name: str) -> None:
    """Ends the ownership of a thing, so that another session can lock it."""
    await session.fetchval("ownership.unlock", group.name, name)


class Ownership:
    """The things that one replica owns.

    Args:
        session: holds the locks of what it owns.
        group: its service.
        retry_s: seconds between two steps while there are several replicas.
        wake: called when a step is due before `next_s`, and when the loop has to end.

    Attributes:
        next_s: when the next step is due without a notification, on the loop's clock.
        statements: locks that were asked for or returned. A step of many things shows by them that
            it advances.
    """

    def __init__(self, session: Session, group: Group, retry_s: float, wake: Callable[[], None]) -> None:
        self._session = session
        self._group = group
        self._retry_s = retry_s
        self._wake = wake
        self._members: list[int] = []
        # Things without an owner, and since when, on the loop's clock.
        self._free_since_s: dict[str, float] = {}
        self._keep_until_s = self.next_s = float("-inf")
        self.statements = 0
        self._owners_changed = False
        # There was no other replica at the last step.
        self._alone = False

    @property
    def due(self) -> bool:
        """Whether `step` is to be called now."""
        return self._owners_changed or asyncio.get_running_loop().time() >= self.next_s

    def retry_surplus(self) -> None:
        """Makes a step due: a surplus of the last one may be transferable only now."""
        self._owners_changed = self._owners_changed or not self._alone
        self._wake()

    @asynccontextmanager
    async def membership(self, stopping: asyncio.Event) -> AsyncIterator[None]:
        """Registers this replica with the others; unlocks everything after a block without error.

        `wake` is called when `stopping` is set or the session is lost meanwhile.

        Raises:
            SessionLost: the locks are lost.
            PostgresUnavailable: the locks last until the session ends.
        """
        await self._session.listen(self._group.channel, self._on_notified)
        await self._session.fetch("ownership.join", self._group.name, self._group.channel)
        wakers = [asyncio.create_task(self._wake_on(event)) for event in (stopping, self._session.lost)]
        try:
            yield
        finally:
            for waker in wakers:
                waker.cancel()
            await asyncio.gather(*wakers, return_exceptions=True)
        # Notifies the other replicas, which would otherwise notice at their next poll.
        await self._session.fetch("ownership.leave", self._group.channel)

    async def step(self, names: Sequence[str]) -> Changes:
        """Acquires the share of this replica.

        Args:
            names: all things of the group.
        """
        self._owners_changed = False
        plan, settled = await self._plan(names)
        acquired: list[str] = []
        for name in plan.acquire:
            if len(acquired) == plan.max_acquired:
                break
            self.statements += 1
            if await lock(self._session, self._group, name):
                acquired.append(name)
        if acquired and not self._alone:
            # The replica that transferred these things may have further ones to transfer.
            await self._notify_replicas()
        now_s = asyncio.get_running_loop().time()
        self.next_s = float("inf") if self._alone and settled else now_s + self._retry_s
        return Changes(acquired, plan.transfer)

    async def transfer(self, names: Sequence[str]) -> None:
        """Ends the ownership of things that this replica no longer uses, for other replicas."""
        for name in names:
            self.statements += 1
            await unlock(self._session, self._group, name)
        if names:
            await self._notify_replicas()

    def _on_notified(self, _payload: str) -> None:
        self._owners_changed = True
        self._wake()

    async def _notify_replicas(self) -> None:
        await self._session.fetch("ownership.notify_replicas", self._group.channel)

    async def _wake_on(self, event: asyncio.Event) -> None:
        await event.wait()
        self._wake()

    async def _plan(self, names: Sequence[str]) -> tuple[Plan, bool]:
        """The plan, and whether each thing has an owner that is a replica."""
        now_s = asyncio.get_running_loop().time()
        me = self._session.pid
        [row] = await self._session.fetch("ownership.owners", self._group.name, list(names))
        members: list[int] = row["members"]
        owners: dict[str, int | None] = dict(zip(names, row["owners"] or [], strict=True))
        self._alone = members == [me]
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
            return Plan(orphaned, len(orphaned), []), False
        if now_s < self._keep_until_s:
            plan = plan._replace(transfer=[])
        # The next plan shows whether what is to be acquired now has an owner.
        return plan, not plan.acquire and all(owner in members for owner in owners.values())
