"""Ownership: the part that divides things among the replicas of a service."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.support.waiting import wait_until

from penstock.errors import SessionLost
from penstock.postgres import ownership
from penstock.postgres.ownership import Group, Ownership
from penstock.postgres.session import open_session

GROUP = Group("test.things", "test_things_replicas", "test")
NAMES = [f"thing {number}" for number in range(6)]


class Replica:
    """A service that owns things, and does nothing with them."""

    def __init__(self, session) -> None:
        self.session = session
        self.owned = set()
        self.stopping = asyncio.Event()
        self._wake = asyncio.Event()
        # An hour between steps: only notifications make one due.
        self.ownership = Ownership(session, GROUP, 3600.0, self._wake.set)

    async def run(self) -> None:
        async with self.ownership.membership(self.stopping):
            while not self.stopping.is_set():
                self._wake.clear()
                self.session.ensure()
                if self.ownership.due:
                    changes = await self.ownership.step(NAMES)
                    self.owned = self.owned.union(changes.acquired).difference(changes.surplus)
                    await self.ownership.transfer(changes.surplus)
                    continue
                await self._wake.wait()


@asynccontextmanager
async def running(database):
    async with open_session(database, "test") as session:
        replica = Replica(session)
        task = asyncio.create_task(replica.run())
        yield replica, task
        replica.stopping.set()
        await asyncio.gather(task, return_exceptions=True)


async def test_things_are_divided_among_replicas(database):
    """S7: replicas that join and leave divide the things evenly, by notifications alone. No thing
    has two owners."""
    async with running(database) as (first, _):
        await wait_until(lambda: len(first.owned) == 6)
        async with AsyncExitStack() as stack:
            second, _ = await stack.enter_async_context(running(database))
            await wait_until(lambda: (len(first.owned), len(second.owned)) == (3, 3))
            assert not first.owned & second.owned
        await wait_until(lambda: len(first.owned) == 6)


async def test_a_replica_that_is_alone_does_not_poll(database):
    """S6: it has no further step once a step has found that it owns everything."""
    async with open_session(database, "test") as session:
        alone = Ownership(session, GROUP, 3600.0, lambda: None)
        async with alone.membership(asyncio.Event()):
            assert len((await alone.step(NAMES)).acquired) == 6
            assert alone.next_s < float("inf")
            assert await alone.step(NAMES) == ([], [])
            assert alone.next_s == float("inf")


async def test_a_lost_session_ends_the_ownership(database, pool):
    """S7: a replica that loses its session ends at once, and its things have no owner."""
    async with running(database) as (replica, task):
        await wait_until(lambda: len(replica.owned) == 6)
        await pool.execute("SELECT pg_terminate_backend($1)", replica.session.pid)
        with pytest.raises(SessionLost):
            await task
        async with open_session(database, "test") as session:
            assert all([await ownership.lock(session, GROUP, name) for name in NAMES])


async def test_a_thing_that_its_replica_does_not_acquire_gets_another_owner(database, monkeypatch):
    """S7: a replica joins and stalls before its first step. Another replica owns its share as soon
    as that has been without an owner for a while, and keeps it."""
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(open_session(database, "test")) for _ in range(2)]
        stalled, live = (Ownership(session, GROUP, 0.0, lambda: None) for session in sessions)
        await stack.enter_async_context(stalled.membership(asyncio.Event()))
        await stack.enter_async_context(live.membership(asyncio.Event()))
        assert len((await live.step(NAMES)).acquired) == 3
        assert (await live.step(NAMES)).acquired == []
        monkeypatch.setattr(ownership, "ORPHANED_S", 0.0)
        assert len((await live.step(NAMES)).acquired) == 3
        assert (await live.step(NAMES)).surplus == []
