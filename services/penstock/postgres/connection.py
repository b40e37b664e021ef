"""Connections: the one place where asyncpg's options are chosen and its errors translated."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg

from penstock.errors import CannotStart, PostgresUnavailable, SettingsError, Throttled

SCHEMA = "penstock"

# Raised while the server is away, starts, stops or is full, and for transactions worth repeating.
_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    # What a pooled connection raises whose end the driver has heard of but not yet acted upon.
    asyncpg.InternalClientError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.TransactionRollbackError,
    ConnectionError,
    OSError,
    TimeoutError,
)


# Said by the server of a user, password or database that will be wrong however often it is tried.
_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)

# Up to the last @: an unescaped password may contain any of the separators.
_PASSWORDS = re.compile(r"(?P<before>://[^:/@]*:).*(?=@)|(?P<name>\bpassword=)[^&]*")


@contextmanager
def translated() -> Iterator[None]:
    """Turns asyncpg's errors into ours; a wrong statement stays what it is.

    Raises:
        PostgresUnavailable: worth trying again.
        CannotStart: the database has none of our tables.
        SettingsError: PENSTOCK_POSTGRES names a user, password or database that the server refuses. A pool hears of
            that late, too, when what was right has been changed.
    """
    try:
        yield
    except asyncpg.UndefinedTableError as error:
        raise CannotStart(
            f"PostgreSQL: {error}: run `penstock migrate` against this database, or name another"
        ) from error
    except _REFUSED as error:
        raise SettingsError(
            f"PostgreSQL refuses: {error}: set PENSTOCK_POSTGRES (or --postgres) to "
            "postgresql://USER:PASSWORD@HOST:PORT/DATABASE with a user who may use that database"
        ) from error
    except _PASSING as error:
        # The driver puts its own error in the place of a cancellation that meets a lost connection; whoever tries
        # again on `PostgresUnavailable` would never end.
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise asyncio.CancelledError from error
        raise PostgresUnavailable(f"PostgreSQL: {type(error).__name__}: {error}") from error


@contextmanager
def _connecting(dsn: str) -> Iterator[None]:
    """As `translated`, and names the URL, without its password.

    Raises:
        PostgresUnavailable: no server, or none that takes us now.
        SettingsError: the URL is none, or what it names is refused.
    """
    shown = without_password(dsn)
    try:
        with translated():
            yield
    except PostgresUnavailable as error:
        if isinstance(error.__cause__, asyncpg.ClientConfigurationError):
            raise SettingsError(f"postgres={shown!r} is not a connection URL: {error.__cause__}") from error
        raise PostgresUnavailable(f"{error} (at {shown})") from error
    except SettingsError as error:
        raise SettingsError(f"{error} (this was {shown})") from error
    except (ValueError, OverflowError) as error:
        # Of the driver's own parsing, which may quote a part of the password.
        raise SettingsError(
            f"postgres={shown!r} is not a connection URL: give postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
            "with %40 for @, %2F for / and so on in the password"
        ) from error


def without_password(dsn: str) -> str:
    """A connection URL as it may be shown."""
    return _PASSWORDS.sub(lambda found: f"{found['before'] or found['name']}***", dsn)


def _options(name: str) -> dict[str, Any]:
    return {
        "command_timeout": 60,
        "server_settings": {
            "application_name": f"penstock {name}",
            "search_path": SCHEMA,
            # Our statements are short and repeated: compiling them costs more than it saves.
            "jit": "off",
            # They name rows by key. The planner would go by statistics, which on a table where every row passes
            # through every state are stale at any time: seen were sequential scans and joins of every row with every other.
            "enable_seqscan": "off",
            "enable_nestloop": "off",
            "enable_mergejoin": "off",
        },
    }


async def connect(dsn: str, name: str, *, durable: bool = True) -> asyncpg.Connection[asyncpg.Record]:
    """One connection of its own, for locks and notifications.

    Args:
        dsn: connection URL.
        name: shown in `pg_stat_activity`.
        durable: see `penstock.postgres.session.open_session`.

    Raises:
        PostgresUnavailable: no server, or none that takes us.
        SettingsError: user, password, database or the URL itself is wrong.
    """
    options = _options(name)
    if not durable:
        options["server_settings"]["synchronous_commit"] = "off"
    with _connecting(dsn):
        return await asyncpg.connect(dsn, **options)


async def _leave_as_is(_connection: object) -> None:
    """Instead of a round trip after every use: nothing of ours leaves a trace in a pooled session.

    The driver still rolls back a transaction that was left open.
    """


@asynccontextmanager
async def open_pool(dsn: str, name: str, *, size: int = 4) -> AsyncIterator[asyncpg.Pool[asyncpg.Record]]:
    """A pool of at most `size` connections, closed at the end of the block.

    Raises:
        PostgresUnavailable: no server, or none that takes us.
        SettingsError: user, password, database or the URL itself is wrong.
    """
    with _connecting(dsn):
        pool = await asyncpg.create_pool(dsn, min_size=1, max_size=size, reset=_leave_as_is, **_options(name))
    try:
        yield pool
    finally:
        # A peer that has gone away must not keep us from stopping.
        try:
            await asyncio.wait_for(pool.close(), 5)
        except TimeoutError:
            pool.terminate()


@asynccontextmanager
async def lent(pool: asyncpg.Pool[asyncpg.Record], wait_s: float) -> AsyncIterator[Any]:
    """A connection of a pool for the time of a `with` block.

    Raises:
        Throttled: none was free within `wait_s` seconds, or the server took none of ours.
        PostgresUnavailable: no server.
    """
    with translated():
        try:
            connection = await pool.acquire(timeout=wait_s)
        except TimeoutError as error:
            raise Throttled(f"PostgreSQL is behind: no connection within {wait_s:g} s") from error
    try:
        yield connection
    finally:
        await pool.release(connection)
