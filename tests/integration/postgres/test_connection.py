"""Connections to PostgreSQL: an error names the faulty part of the URL and says whether a retry can
help."""

from __future__ import annotations

import asyncio
import os
import socket
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from penstock.errors import CannotStart, PenstockError, PostgresUnavailable, SettingsError
from penstock.postgres import connection as connection_module
from penstock.postgres.connection import close, connect, open_pool, translated, without_password
from penstock.postgres.migrations import migrate
from penstock.postgres.multi_host import MultiHostConnector, servers_of
from penstock.postgres.queries import query


@pytest.fixture
async def user_url(database: str) -> str:
    """Creates a user without rights, with the password `right`, and returns its URL over TCP."""
    parts = urlsplit(database)
    name = "u_" + parts.path[1:]
    connection = await asyncpg.connect(database)
    await connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'right'")
    await connection.close()
    port = parts.port or parse_qs(parts.query).get("port", ["5432"])[0]
    yield f"postgresql://{name}:right@{parts.hostname or '127.0.0.1'}:{port}{parts.path}"
    connection = await asyncpg.connect(database)
    await connection.execute(f"DROP ROLE {name}")
    await connection.close()


async def refusal(dsn: str) -> PenstockError:
    with pytest.raises(PenstockError) as error:
        await connect(dsn, "test")
    with pytest.raises(type(error.value)) as pool_error:
        async with open_pool(dsn, "test"):
            pass
    assert str(pool_error.value) == str(error.value)
    return error.value


async def test_a_missing_socket_is_an_outage(tmp_path):
    """S11: a Unix socket that does not exist is an outage, as a refused connection is: its server
    stops and starts."""
    refused = await refusal(f"postgresql:///postgres?host={tmp_path}")
    assert isinstance(refused, PostgresUnavailable)
    assert str(tmp_path) in str(refused)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("right", "secret", "password authentication failed"),
        ("/t_", "/nothing_", "does not exist"),
    ],
)
async def test_a_wrong_url_is_a_wrong_setting(user_url: str, right: str, wrong: str, message: str) -> None:
    """O8: a wrong user, password or database raises a SettingsError that names the setting and
    shows no password."""
    refused = await refusal(user_url.replace(right, wrong))
    assert isinstance(refused, SettingsError)
    assert message in str(refused)
    assert "PENSTOCK_POSTGRES" in str(refused)
    assert "secret" not in str(refused)


async def test_a_user_without_rights_is_a_wrong_setting(user_url: str) -> None:
    """O8: migrating as a user without rights raises a SettingsError."""
    with pytest.raises(SettingsError, match="permission denied"):
        await migrate(user_url)


@pytest.mark.parametrize(
    "dsn",
    [
        "nothing",
        "mysql://u@h/d",
        "postgresql://u:se/cret@h/d",
        "postgresql://u@h:x/d",
        "postgresql://u@[::1/d",
    ],
)
async def test_an_invalid_url_is_a_wrong_setting(dsn: str) -> None:
    """O8: an invalid URL raises a SettingsError, without the part of the password that the driver's
    message quotes."""
    refused = await refusal(dsn)
    assert isinstance(refused, SettingsError)
    assert "is not a connection URL" in str(refused)
    assert "cret" not in str(refused)


async def test_an_unreachable_server_allows_a_retry() -> None:
    """O8: an unreachable server raises PostgresUnavailable, which allows a retry and names the
    address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        refused = await refusal(f"postgresql://u:secret@{address}/d")
    assert isinstance(refused, PostgresUnavailable)
    assert address in str(refused)
    assert "secret" not in str(refused)


async def test_a_database_without_tables_is_reported_with_the_remedy(empty_database: str) -> None:
    """O8: a query on a database without tables raises an error that names `penstock migrate`."""
    async with open_pool(empty_database, "test") as pool:
        with pytest.raises(CannotStart, match="penstock migrate"), translated():
            await pool.fetch(query("checks.states"))


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://u:p:?w@d@h:1/d", "postgresql://u:***@h:1/d"),
        ("postgresql://u@h:1/d?password=x&host=y", "postgresql://u@h:1/d?password=***&host=y"),
        (
            "postgresql://postgres@/postgres?host=/tmp/x&port=1",
            "postgresql://postgres@/postgres?host=/tmp/x&port=1",
        ),
        ("postgresql://u@h/d?sslpassword=x&host=y", "postgresql://u@h/d?sslpassword=***&host=y"),
        ("postgresql://h:5432/d", "postgresql://h:5432/d"),
    ],
)
def test_passwords_are_not_shown(dsn: str, shown: str) -> None:
    """URLs in logs and terminals show no password."""
    assert without_password(dsn) == shown


async def test_a_silent_server_delays_a_connection_briefly(
    user_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11: connecting to a silent server times out before the driver's minute. The connector then
    tries the next server of the URL, or raises PostgresUnavailable."""
    assert connection_module._LIMITS["timeout"] <= 10
    monkeypatch.setitem(connection_module._LIMITS, "timeout", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        cut_off = f"127.0.0.1:{silent.getsockname()[1]}"
        parts = urlsplit(user_url)
        user, _, reachable = parts.netloc.rpartition("@")
        async with asyncio.timeout(120):
            for options in ("", "target_session_attrs=read-write"):
                both = parts._replace(netloc=f"{user}@{cut_off},{reachable}", query=options).geturl()
                found = await connect(both, "test")
                assert await found.fetchval("SELECT 1") == 1
                await found.close()
                async with open_pool(both, "test", size=2) as pool:
                    assert await pool.fetchval("SELECT 1") == 1
            refused = await refusal(parts._replace(netloc=f"{user}@{cut_off}").geturl())
    assert isinstance(refused, PostgresUnavailable)
    assert cut_off in str(refused)


def test_the_servers_of_a_url_are_tried_one_by_one() -> None:
    """S11: each server gets its own URL with user, port and options. A URL of one server, or one
    that the driver must read, stays as it is."""
    assert servers_of("postgresql://me:a%40b@db1,[::1]:5433,db3/shop?sslmode=verify-full") == [
        "postgresql://me:a%40b@db1/shop?sslmode=verify-full",
        "postgresql://me:a%40b@[::1]:5433/shop?sslmode=verify-full",
        "postgresql://me:a%40b@db3/shop?sslmode=verify-full",
    ]
    for single in (
        "postgresql://db/shop",
        "postgresql:///shop",
        "postgresql:///shop?host=/run/a",
        "postgresql:///shop?host=a,b&port=1,2,3",
        "postgresql:///shop?host=a,b&broken",
        "postgresql://a,b/shop?target_session_attrs=prefer-standby&broken",
        "postgresql://[broken/shop",
    ):
        assert servers_of(single) == (single,)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://me@/shop?host=a,b&port=1,2", [("a", 1, "any"), ("b", 2, "any")]),
        ("postgresql:///shop?user=me&host=a,b&port=7", [("a", 7, "any"), ("b", 7, "any")]),
        ("postgresql://me@/shop?host=a:1,b:2", [("a", 1, "any"), ("b", 2, "any")]),
        ("postgresql://me@/shop?host=/run/a,b", [("/run/a/.s.PGSQL.5432", 0, "any"), ("b", 5432, "any")]),
        (
            "postgresql://me@a:1,b:2/shop?target_session_attrs=prefer-standby",
            [("a", 1, "standby"), ("b", 2, "standby"), ("a", 1, "any"), ("b", 2, "any")],
        ),
        (
            "postgresql://me@/shop?target_session_attrs=prefer-standby&host=a,b",
            [(host, 5432, kind) for kind in ("standby", "any") for host in ("a", "b")],
        ),
    ],
)
async def test_servers_of_the_query_are_tried_in_the_drivers_order(
    monkeypatch: pytest.MonkeyPatch, url: str, expected: list[tuple[str, int, str]]
) -> None:
    """S11: the connector tries each server with its own timeout, in the driver's order: lists in
    the query, and standbys first if preferred."""
    for name in list(os.environ):
        if name.startswith("PG"):
            monkeypatch.delenv(name)
    attempted: list[tuple[str, int, str]] = []

    async def refuse(*, addr: object, params: object, **_options: object) -> None:
        host, port = addr if isinstance(addr, tuple) else (addr, 0)
        assert (params.user, params.database) == ("me", "shop")  # type: ignore[attr-defined]
        attempted.append((str(host), port, params.target_session_attrs.value))  # type: ignore[attr-defined]
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncpg.connect_utils, "_connect_addr", refuse)
    calls = []
    real = asyncpg.connect

    async def connect_(*arguments: str, **options: object) -> object:
        calls.append(arguments)
        return await real(*arguments, **options)

    monkeypatch.setattr(asyncpg, "connect", connect_)
    with pytest.raises(ConnectionRefusedError):
        await MultiHostConnector(url).connect(timeout=10)
    assert attempted == expected
    assert len(calls) == len(expected)


async def test_a_known_primary_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: a connector that needs a primary tries the last primary first, so that a silent server
    delays only the first connection. Without that need, it keeps the order of the URL."""
    attempted: list[str] = []

    async def ask(url: str, **_options: object) -> str:
        attempted.append(str(urlsplit(url).hostname))
        if attempted[-1] in unavailable:
            raise TimeoutError
        return attempted[-1]

    monkeypatch.setattr(asyncpg, "connect", ask)
    unavailable = {"db1"}
    connector = MultiHostConnector("postgresql://db1,db2/shop?target_session_attrs=read-write")
    assert [await connector.connect(), await connector.connect()] == ["db2", "db2"]
    assert attempted == ["db1", "db2", "db2"]
    unavailable = {"db2"}
    assert await connector.connect() == "db1"
    unavailable = {"db1", "db2"}
    with pytest.raises(TimeoutError):
        await connector.connect()
    attempted, unavailable = [], {"db1"}
    connector = MultiHostConnector("postgresql://db1,db2/shop")
    assert [await connector.connect(), await connector.connect()] == ["db2", "db2"]
    assert attempted == ["db1", "db2", "db1", "db2"]


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(),
        asyncpg.AdminShutdownError("ended"),
        asyncpg.InternalClientError("ended"),
        asyncpg.PostgresError("of a pooler"),
        TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_failed_close_reports_nothing(error):
    """S11: the end of a session by its server, at the moment in which it is closed, is no error."""

    class Ending:
        terminated = False

        async def close(self):
            raise error

        def terminate(self):
            self.terminated = True

    ending = Ending()
    await close(ending)
    assert ending.terminated


async def test_sessions_that_the_server_ends_are_closed(database):
    """S11: as above, with a real server."""
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1"
    async with open_pool(database, "administrator", size=1) as administrator:
        for number in range(20):
            async with open_pool(database, f"ended {number}", size=1):
                assert await administrator.fetchval(ended, f"penstock ended {number}") == 1
