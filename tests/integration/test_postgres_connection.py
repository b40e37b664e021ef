"""Connecting to PostgreSQL: what is wrong with a URL is told, and which way it fails."""

from __future__ import annotations

import socket
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from penstock.errors import CannotStart, PenstockError, PostgresUnavailable, SettingsError
from penstock.postgres.connection import connect, open_pool, translated, without_password
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
