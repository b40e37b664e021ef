"""Sessions of hosts and processes that vanish without a word: the server ends them in seconds."""

import asyncio
import socket

import asyncpg
import pytest
from tests.support.postgres_servers import PostgresServer
from tests.support.waiting import wait_until

from penstock.errors import PostgresUnavailable, SessionLost
from penstock.postgres import session as sessions
from penstock.postgres.connection import connect, open_pool, translated
from penstock.postgres.session import open_session
from penstock.sockets import VANISHED_S

LOCK = "outbox.sweep"


@pytest.fixture(autouse=True)
def _patient_sessions():
    """Sessions end as soon as in production."""


@pytest.fixture
async def server(tmp_path):
    """A server that listens on TCP, as in production."""
    server = PostgresServer(tmp_path / "postgres")
    try:
        server.make()
        await server.start()
        yield server
    finally:
        server.kill()


async def test_a_session_that_sends_nothing_loses_its_locks(database, monkeypatch):
    """S7: the server ends the session of a frozen process, which notices it and acts no more."""
    # As in a frozen process: no ping.
    monkeypatch.setattr(sessions, "PING_EVERY_S", 3600.0)
    async with open_session(database, "frozen") as frozen, open_session(database, "other") as other:
        assert await frozen.fetchval(LOCK, "events")
        assert not await other.fetchval(LOCK, "events")
        async with asyncio.timeout(VANISHED_S + 10):
            await frozen.lost.wait()
        with pytest.raises(SessionLost):
            await frozen.fetchval(LOCK, "events")
    async with open_session(database, "next") as after:
        assert await after.fetchval(LOCK, "events")


async def test_a_live_session_keeps_its_locks_without_a_transaction(database):
    """S6: pings keep a session beyond the server's limit, and are no queries."""
    connection = await asyncpg.connect(database)
    async with open_session(database, "live") as live:
        assert await live.fetchval(LOCK, "events")
        pid = live.pid
        activity = "SELECT xact_start IS NULL AND query_start < now() - make_interval(secs => $2) FROM pg_stat_activity WHERE pid = $1"

        async def idle():
            # The server has had no statement of the session for longer than it keeps a silent one.
            return await connection.fetchval(activity, pid, float(VANISHED_S) + 1)

        await wait_until(idle, every=0.5, what="the session is older than the limit")
        live.ensure()
        assert await live.fetchval(LOCK, "events")
    await connection.close()


async def test_a_transaction_that_stalls_frees_its_rows(database):
    """S11: the server ends the transaction of a frozen process. For the process it is an outage."""
    async with open_pool(database, "frozen", size=1) as pool:
        connection = await pool.acquire()
        closed = asyncio.Event()
        connection.add_termination_listener(lambda _connection: closed.set())
        await connection.execute("BEGIN; LOCK TABLE outbox")
        async with asyncio.timeout(VANISHED_S + 10):
            await closed.wait()
        with pytest.raises(PostgresUnavailable), translated():
            await connection.execute("SELECT 1")
        await pool.release(connection)
        async with asyncio.timeout(10):
            await pool.execute("BEGIN; LOCK TABLE outbox; COMMIT")


async def test_both_ends_probe_a_connection(server):
    """S7: both ends of each connection over TCP end it when the other end vanishes."""
    connection = await connect(server.url(), "test")
    try:
        settings = {
            name: await connection.fetchval("SELECT current_setting($1)", name)
            for name in ("tcp_keepalives_idle", "tcp_user_timeout", "idle_in_transaction_session_timeout")
        }
        assert settings == {
            "tcp_keepalives_idle": "3",
            "tcp_user_timeout": str(VANISHED_S * 1000),
            "idle_in_transaction_session_timeout": f"{VANISHED_S}s",
        }
        own = connection._transport.get_extra_info("socket")
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == VANISHED_S * 1000
    finally:
        await connection.close()
