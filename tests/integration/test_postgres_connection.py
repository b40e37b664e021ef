"""Connecting to PostgreSQL: what is wrong with a URL is told, and which way it fails."""

from __future__ import annotations

import asyncio
import os
import socket
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from penstock.errors import CannotStart, PenstockError, PostgresUnavailable, SettingsError
from penstock.postgres import connection as connection_module
from penstock.postgres.connection import connect, open_pool, translated, without_password
from penstock.postgres.dialling import Dialler, servers_of
from penstock.postgres.migrations import migrate
from penstock.postgres.queries import query


@pytest.fixture
async def stranger(database: str) -> str:
    """URL of a user by TCP, whose password is `right` and who may do nothing."""
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
    with pytest.raises(PenstockError) as one:
        await connect(dsn, "test")
    with pytest.raises(type(one.value)) as other:
        async with open_pool(dsn, "test"):
            pass
    assert str(other.value) == str(one.value)
    return one.value


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("right", "secret", "password authentication failed"),
        ("/t_", "/nothing_", "does not exist"),
    ],
)
async def test_a_wrong_url_is_a_wrong_setting(stranger: str, right: str, wrong: str, words: str) -> None:
    """O8: user, password and database: not worth trying again; it is said what to set, and no password is shown."""
    refused = await refusal(stranger.replace(right, wrong))
    assert isinstance(refused, SettingsError)
    assert words in str(refused)
    assert "PENSTOCK_POSTGRES" in str(refused)
    assert "secret" not in str(refused)


async def test_a_user_without_rights_is_a_wrong_setting(stranger: str) -> None:
    """O8: the same for a right that is missing, when the tables are to be made."""
    with pytest.raises(SettingsError, match="permission denied"):
        await migrate(stranger)


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
async def test_what_is_no_url_is_a_wrong_setting(dsn: str) -> None:
    """O8: also where the driver's own message would quote a part of the password."""
    refused = await refusal(dsn)
    assert isinstance(refused, SettingsError)
    assert "is not a connection URL" in str(refused)
    assert "cret" not in str(refused)


async def test_nobody_there_is_worth_trying_again() -> None:
    """O8: the address is named."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        refused = await refusal(f"postgresql://u:secret@{address}/d")
    assert isinstance(refused, PostgresUnavailable)
    assert address in str(refused)
    assert "secret" not in str(refused)


async def test_a_database_without_tables_is_told_with_the_remedy(empty_database: str) -> None:
    """O8: `penstock check` of a database that is somebody else's."""
    async with open_pool(empty_database, "test") as pool:
        with pytest.raises(CannotStart, match="penstock migrate"), translated():
            await pool.fetch(query("checks.states"))


async def test_a_pool_that_is_refused_later_says_so(stranger: str) -> None:
    """A password that was changed while a service runs ends it with what to set."""
    with pytest.raises(SettingsError, match="PENSTOCK_POSTGRES"), translated():
        raise asyncpg.InvalidPasswordError("changed")


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
    """What goes to logs and terminals."""
    assert without_password(dsn) == shown


async def test_a_server_that_is_cut_off_holds_back_nobody_for_long(
    stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11: one that takes connections and says nothing is given up after a while that is shorter than the driver's minute: the next
    one of the URL is asked then, and where there is none, the server is away."""
    assert connection_module._LIMITS["timeout"] <= 10
    monkeypatch.setitem(connection_module._LIMITS, "timeout", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        cut_off = f"127.0.0.1:{silent.getsockname()[1]}"
        parts = urlsplit(stranger)
        user, _, there = parts.netloc.rpartition("@")
        async with asyncio.timeout(30):
            for options in ("", "target_session_attrs=read-write"):
                both = parts._replace(netloc=f"{user}@{cut_off},{there}", query=options).geturl()
                found = await connect(both, "test")
                assert await found.fetchval("SELECT 1") == 1
                await found.close()
                async with open_pool(both, "test", size=2) as pool:
                    assert await pool.fetchval("SELECT 1") == 1
            refused = await refusal(parts._replace(netloc=f"{user}@{cut_off}").geturl())
    assert isinstance(refused, PostgresUnavailable)
    assert cut_off in str(refused)


def test_the_servers_of_a_url_are_asked_one_by_one() -> None:
    """S11: each with user, port and options; what names one server, or leaves the choice to the driver, stays as it is."""
    assert servers_of("postgresql://me:a%40b@db1,[::1]:5433,db3/shop?sslmode=verify-full") == [
        "postgresql://me:a%40b@db1/shop?sslmode=verify-full",
        "postgresql://me:a%40b@[::1]:5433/shop?sslmode=verify-full",
        "postgresql://me:a%40b@db3/shop?sslmode=verify-full",
    ]
    for alone in (
        "postgresql://db/shop",
        "postgresql:///shop",
        "postgresql:///shop?host=/run/a",
        "postgresql:///shop?host=a,b&port=1,2,3",
        "postgresql:///shop?host=a,b&broken",
        "postgresql://a,b/shop?target_session_attrs=prefer-standby&broken",
        "postgresql://[broken/shop",
    ):
        assert servers_of(alone) == (alone,)


@pytest.mark.parametrize(
    ("url", "asked"),
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
async def test_servers_named_in_the_query_or_by_preference_are_asked_one_by_one(
    monkeypatch: pytest.MonkeyPatch, url: str, asked: list[tuple[str, int, str]]
) -> None:
    """S11: each with a limit of its own, as the driver itself reads the URL: host and port lists of the query, and standbys
    before the others."""
    for name in list(os.environ):
        if name.startswith("PG"):
            monkeypatch.delenv(name)
    told: list[tuple[str, int, str]] = []

    async def refuse(*, addr: object, params: object, **_options: object) -> None:
        host, port = addr if isinstance(addr, tuple) else (addr, 0)
        assert (params.user, params.database) == ("me", "shop")  # type: ignore[attr-defined]
        told.append((str(host), port, params.target_session_attrs.value))  # type: ignore[attr-defined]
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncpg.connect_utils, "_connect_addr", refuse)
    calls = []
    real = asyncpg.connect

    async def connect_(*arguments: str, **options: object) -> object:
        calls.append(arguments)
        return await real(*arguments, **options)

    monkeypatch.setattr(asyncpg, "connect", connect_)
    with pytest.raises(ConnectionRefusedError):
        await Dialler(url).connect(timeout=10)
    assert told == asked
    assert len(calls) == len(asked)


async def test_a_primary_that_was_found_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: where only a primary is wanted, so that a silent server costs the first connection its limit and not each; one that
    merely answered is not stuck to, since it may be a standby."""
    asked: list[str] = []

    async def ask(url: str, **_options: object) -> str:
        asked.append(str(urlsplit(url).hostname))
        if asked[-1] in away:
            raise TimeoutError
        return asked[-1]

    monkeypatch.setattr(asyncpg, "connect", ask)
    away = {"db1"}
    dialler = Dialler("postgresql://db1,db2/shop?target_session_attrs=read-write")
    assert [await dialler.connect(), await dialler.connect()] == ["db2", "db2"]
    assert asked == ["db1", "db2", "db2"]
    away = {"db2"}
    assert await dialler.connect() == "db1"
    away = {"db1", "db2"}
    with pytest.raises(TimeoutError):
        await dialler.connect()
    asked, away = [], {"db1"}
    dialler = Dialler("postgresql://db1,db2/shop")
    assert [await dialler.connect(), await dialler.connect()] == ["db2", "db2"]
    assert asked == ["db1", "db2", "db1", "db2"]
