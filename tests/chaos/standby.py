"""A primary and its synchronous standby, which is promoted when it lags; then they change
places."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.postgres_servers import QUOTED, PostgresServer
from tests.support.waiting import wait_until


class Pair:
    """Two servers; each commit waits for the standby unless it is detached.

    Args:
        primary: runs.
        standby: follows it.
    """

    def __init__(self, primary: PostgresServer, standby: PostgresServer) -> None:
        self.primary = primary
        self.standby = standby
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        self.url = f"postgresql://postgres:{QUOTED}@{hosts}/postgres?target_session_attrs=read-write"

    async def stop(self) -> None:
        """Ends the primary and its connections."""
        await asyncio.to_thread(self.primary.stop)

    async def start(self) -> None:
        """Starts the primary again."""
        await self.primary.start()

    async def attach(self) -> None:
        """Makes each commit wait for the standby, which follows now."""
        await _configure(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        synchronous = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        await wait_until(lambda: self.primary.ask(synchronous), what="the standby is synchronous")

    async def detach(self) -> None:
        """Returns when the standby receives nothing more and no commit waits for it."""
        await _configure(self.primary, "ALTER SYSTEM RESET synchronous_standby_names")
        await _configure(self.standby, "ALTER SYSTEM SET primary_conninfo = ''")

        async def detached() -> bool:
            return await self.primary.ask("SELECT count(*) FROM pg_stat_replication") == 0

        await wait_until(detached, what="the standby receives nothing more")

    async def promote(self) -> None:
        """Kills the primary and promotes the standby."""
        self.primary.kill()
        await self.standby.ask("SELECT pg_promote()")
        self.primary, self.standby = self.standby, self.primary

    async def follow(self) -> None:
        """Makes the server that was killed the standby of the other one."""
        shutil.rmtree(self.standby.data)
        # A backup waits for its last segment on a primary that waits for a standby.
        await _configure(self.primary, "ALTER SYSTEM RESET synchronous_standby_names")
        self.standby.follow(self.primary)
        await self.standby.start()
        await self.attach()


async def _configure(server: PostgresServer, statement: str) -> None:
    await server.ask(statement)
    await server.ask("SELECT pg_reload_conf()")


@asynccontextmanager
async def standby_pair(folder: Path) -> AsyncIterator[Pair]:
    """A pair that serves; both servers are killed at the end."""
    primary, standby = PostgresServer(folder / "one"), PostgresServer(folder / "two")
    try:
        primary.make()
        await primary.start()
        standby.follow(primary)
        await standby.start()
        pair = Pair(primary, standby)
        await pair.attach()
        yield pair
    finally:
        standby.kill()
        primary.kill()
