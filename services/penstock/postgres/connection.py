"""Connections: the one place that chooses asyncpg's options and translates its errors."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg

from penstock.concurrency.cancellation import cleanup_timeout
from penstock.errors import (
    CannotStart,
    LockConflict,
    PostgresUnavailable,
    SettingsError,
    Throttled,
    ValueRefused,
)
from penstock.postgres import refused_writes
from penstock.postgres.multi_host import MultiHostConnector
from penstock.postgres.repeating import RepeatingConnection
from penstock.sockets import (
    PROBE_AFTER_S,
    PROBE_EVERY_S,
    PROBES,
    VANISHED_S,
    end_when_peer_vanishes,
)

SCHEMA = "penstock"

# The pool logs each failed connection with its traceback. The caller reports the outage once.
logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)

# Raised for a transaction that may be repeated: a deadlock, a serialization failure, or a lock that
# was not free within `lock_timeout`.
_LOCK_CONFLICTS = (asyncpg.TransactionRollbackError, asyncpg.LockNotAvailableError)

# Raised while the server is unavailable, starts, stops or is full.
_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    # Raised by a pooled connection that has ended, before the pool has noticed it.
    asyncpg.InternalClientError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    # Raised when the loop stalled in a transaction: it is rolled back.
    asyncpg.IdleInTransactionSessionTimeoutError,
    # Raised when the server cannot read or write a file.
    asyncpg.PostgresSystemError,
    ConnectionError,
    OSError,
    TimeoutError,
)


# Raised for a user, password or database that no retry makes right.
_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)

# Raised for a value that its column, its index or the protocol cannot take: NUL in text, an integer
# out of range, an entry of an index that is too long.
_UNSTORABLE = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)

# The errors for a file that the URL names: a certificate, a key. A Unix socket is missing while its
# server is, and is none of these.
_UNREADABLE = (FileNotFoundError, IsADirectoryError, PermissionError)
_FILES = re.compile(r"ssl(?:rootcert|cert|key|crl)=")

READ_ONLY = (
    "the server takes no writes, as a standby or a primary that was demoted: name every server in the URL "
    "(postgresql://USER@HOST1,HOST2/DATABASE?target_session_attrs=read-write)"
)

# The settings that our statements expect of every session. A pooler in transaction mode drops them,
# so the roles have them too (schemas/postgres/roles.sql, which is tested against this).
SESSION_SETTINGS = {
    "search_path": SCHEMA,
    # Our statements are short: compiling them costs more than it saves.
    "jit": "off",
    # Our statements name rows by key. The statistics of a queue are always stale, and the planner
    # would follow them into sequential scans and joins of every row with every other.
    "enable_seqscan": "off",
    "enable_nestloop": "off",
    "enable_mergejoin": "off",
}

# The setting of sessions whose statements all name rows by key: each is planned once. Otherwise
# PostgreSQL plans it anew while its arrays are short, which takes longer than its execution. Other
# sessions have statements with optional filters, which need a plan for their values.
GENERIC_PLANS = {"plan_cache_mode": "force_generic_plan"}

# The settings of the server's end: it keeps row locks, advisory locks and connections of a host
# that vanished, or of a process that is stopped in a transaction. The roles lack them, because
# behind a pooler the server's client is the pooler.
_VANISHING = {
    "tcp_keepalives_idle": str(PROBE_AFTER_S),
    "tcp_keepalives_interval": str(PROBE_EVERY_S),
    "tcp_keepalives_count": str(PROBES),
    "tcp_user_timeout": f"{VANISHED_S}s",
    "idle_in_transaction_session_timeout": f"{VANISHED_S}s",
}

# Seconds. The limit of connecting is for each server of a URL: an unreachable one must not delay
# the next for a minute. A statement without an answer ends before the stall timeout (60 s), and so
# counts as an outage.
_LIMITS: dict[str, Any] = {
    "timeout": 10,
    "command_timeout": 50,
    "connection_class": RepeatingConnection,
}

# A graceful close waits for the server: one that does not answer must not delay a stop.
CLOSE_S = 5.0

# Up to the last @, because an unescaped password may contain any separator.
_PASSWORDS = re.compile(r"(?P<before>://[^:/@]*:).*(?=@)|(?P<name>(?:\b|ssl)password=)[^&]*")


@contextmanager
def translated() -> Iterator[None]:
    """Turns asyncpg's errors into ours; the error of a wrong statement stays.

    Raises:
        PostgresUnavailable: a retry may succeed.
        LockConflict: the statement met the locks of another transaction, and had no effect.
        CannotStart: the database has none of our tables.
        SettingsError: PENSTOCK_POSTGRES names a user, password or database that the server refuses.
            A running pool raises it too, when the server's rules have changed.
        ValueRefused: PostgreSQL cannot store a value.
    """
    try:
        yield
    except _UNSTORABLE as error:
        raise ValueRefused(f"PostgreSQL cannot store a value: {str(error).splitlines()[0][:500]}") from error
    except asyncpg.UndefinedTableError as error:
        raise CannotStart(
            f"PostgreSQL: {error}: run `penstock migrate` against this database, or name another"
        ) from error
    except _REFUSED as error:
        raise SettingsError(
            f"PostgreSQL refuses: {error}: set PENSTOCK_POSTGRES (or --postgres) to "
            "postgresql://USER:PASSWORD@HOST:PORT/DATABASE with a user who may use that database"
        ) from error
    except asyncpg.ReadOnlySQLTransactionError as error:
        # A retry may succeed: the next connection leads to a server that takes writes, once there
        # is one.
        raise PostgresUnavailable(f"PostgreSQL: {error}: {READ_ONLY}") from error
    except _LOCK_CONFLICTS as error:
        raise LockConflict(f"PostgreSQL: {type(error).__name__}: {error}") from error
    except _PASSING as error:
        refused_writes.note(error)
        # When a cancellation meets a lost connection, the driver raises its own error instead. A
        # retry loop would then never end.
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise asyncio.CancelledError from error
        # A driver's own time limit has no text.
        reason = "it does not answer in time" if isinstance(error, TimeoutError) else str(error)
        raise PostgresUnavailable(f"PostgreSQL: {type(error).__name__}: {reason}") from error


@contextmanager
def _connecting(dsn: str) -> Iterator[None]:
    """As `translated`, with the URL without its password.

    Raises:
        PostgresUnavailable: no server, or none that accepts connections now.
        SettingsError: the URL is malformed, or the server refuses it.
    """
    shown = without_password(dsn)
    try:
        with translated():
            yield
    except PostgresUnavailable as error:
        if wrong := _misconfigured(error.__cause__, dsn):
            raise SettingsError(f"PENSTOCK_POSTGRES={shown!r} {wrong}") from error
        raise PostgresUnavailable(f"{error} (at {shown})") from error
    except SettingsError as error:
        raise SettingsError(f"{error} (this was {shown})") from error
    except (ValueError, OverflowError) as error:
        # Raised by the driver's parser, whose message may quote a part of the password.
        raise SettingsError(
            f"PENSTOCK_POSTGRES={shown!r} is not a connection URL: give postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
            "with %40 for @, %2F for / and so on in the password"
        ) from error


def without_password(dsn: str) -> str:
    """A connection URL as it may be shown."""
    return _PASSWORDS.sub(lambda found: f"{found['before'] or found['name']}***", dsn)


def _misconfigured(cause: BaseException | None, dsn: str) -> str:
    """The fault of a URL that no retry helps; empty when there is none."""
    if isinstance(cause, asyncpg.ClientConfigurationError):
        return f"is not a connection URL: {cause}"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"leads to a server whose certificate is not accepted: {cause.verify_message}: "
            "sslrootcert must name the file of the authority that signed it, and the URL the host it was made out to"
        )
    if isinstance(cause, _UNREADABLE) and _FILES.search(dsn):
        return f"names a file that cannot be read: {cause}"
    if isinstance(cause, ssl.SSLError):
        return f"cannot be reached by TLS: {cause}: are sslrootcert, sslcert and sslkey PEM files?"
    if isinstance(cause, asyncpg.ProtocolViolationError) and "startup parameter" in str(cause):
        return (
            f"leads to a pooler ({cause}): set PENSTOCK_POSTGRES_SESSION to the URL of the server itself, "
            "and this one is taken for a pooler in transaction mode"
        )
    return ""


def read_only(connection: asyncpg.Connection[asyncpg.Record]) -> bool:
    """Whether the server takes no writes, which it reports without a query."""
    reported = connection.get_settings()
    return "on" in (
        getattr(reported, "in_hot_standby", ""),
        getattr(reported, "default_transaction_read_only", ""),
    )


async def _ensure_writable(connection: Any) -> None:
    """Checks a pooled connection before each use; the pool replaces one that fails.

    Raises:
        PostgresUnavailable: its server takes no writes.
    """
    if read_only(connection):
        raise PostgresUnavailable(f"PostgreSQL: {READ_ONLY}")


def _options(name: str, *, pooled: bool = False, generic_plans: bool = False) -> dict[str, Any]:
    named = {"application_name": f"penstock {name}"}
    if pooled:
        # The next transaction may be in another session, without the statements that were prepared
        # in this one.
        return {**_LIMITS, "statement_cache_size": 0, "server_settings": named}
    plans = GENERIC_PLANS if generic_plans else {}
    return {**_LIMITS, "server_settings": {**named, **SESSION_SETTINGS, **_VANISHING, **plans}}


def _connector(dsn: str) -> Callable[..., Coroutine[Any, Any, asyncpg.Connection[asyncpg.Record]]]:
    """As `MultiHostConnector.connect`, with connections that end when their server vanishes."""
    servers = MultiHostConnector(dsn)

    async def connected(*arguments: Any, **options: Any) -> asyncpg.Connection[asyncpg.Record]:
        connection = await servers.connect(*arguments, **options)
        end_when_peer_vanishes(connection._transport)  # type: ignore[attr-defined]  # noqa: SLF001 (the driver has no other way in)
        return connection

    return connected


async def connect(
    dsn: str,
    name: str,
    *,
    durable: bool = True,
    idle_s: int = 0,
    lock_timeout: str | None = None,
    generic_plans: bool = False,
) -> asyncpg.Connection[asyncpg.Record]:
    """A dedicated connection, for locks and notifications.

    Args:
        dsn: connection URL.
        name: shown in `pg_stat_activity`.
        durable: see `penstock.postgres.session.open_session`.
        idle_s: seconds without a message after which the server ends the session; 0 for never.
        lock_timeout: how long a statement waits for a lock; None is for ever.
        generic_plans: see `GENERIC_PLANS`.

    Raises:
        PostgresUnavailable: no server, or none that accepts connections and writes.
        SettingsError: user, password, database or the URL itself is wrong.
    """
    options = _options(name, generic_plans=generic_plans)
    if lock_timeout is not None:
        options["server_settings"]["lock_timeout"] = lock_timeout
    if idle_s:
        options["server_settings"]["idle_session_timeout"] = f"{idle_s}s"
    if not durable:
        options["server_settings"]["synchronous_commit"] = "off"
    with _connecting(dsn):
        connection: asyncpg.Connection[asyncpg.Record] = await _connector(dsn)(**options)
        if read_only(connection):
            connection.terminate()
            raise PostgresUnavailable(f"PostgreSQL: {READ_ONLY}")
        return connection


async def _leave_as_is(_connection: object) -> None:
    """Replaces the driver's reset, a round trip: our statements leave no state in a session.

    The driver still rolls back a transaction that was left open.
    """


@asynccontextmanager
async def open_pool(
    dsn: str,
    name: str,
    *,
    size: int = 4,
    pooled: bool = False,
    writing: bool = True,
    generic_plans: bool = False,
    statement_s: int | None = None,
) -> AsyncIterator[asyncpg.Pool[asyncpg.Record]]:
    """A pool of at most `size` connections, closed at the end of the block.

    Args:
        dsn: connection URL.
        name: shown in `pg_stat_activity`.
        size: most connections.
        pooled: whether the URL leads to a pooler in transaction mode.
        writing: False also accepts a server that takes no writes, such as a standby.
        generic_plans: see `GENERIC_PLANS`.
        statement_s: seconds after which a statement is ended; None is the default of `_LIMITS`.

    Raises:
        PostgresUnavailable: no server, or none that accepts connections and writes.
        SettingsError: user, password, database or the URL itself is wrong.
        CannotStart: behind a pooler the role does not find our tables.
    """
    ensure = _ensure_writable if writing else None
    options = _options(name, pooled=pooled, generic_plans=generic_plans)
    if statement_s is not None:
        options["command_timeout"] = statement_s
        if not pooled:
            # Also ends a statement whose cancellation is lost.
            options["server_settings"]["statement_timeout"] = f"{statement_s}s"
    with _connecting(dsn):
        pool = await asyncpg.create_pool(
            dsn,
            connect=_connector(dsn),
            min_size=1,
            max_size=size,
            reset=_leave_as_is,
            init=ensure,
            setup=ensure,
            **options,
        )
        if pooled and SCHEMA not in str(await pool.fetchval("SHOW search_path")):
            pool.terminate()
            raise CannotStart(
                f"behind the pooler at {without_password(dsn)} this role does not look into the schema {SCHEMA}: run "
                "`penstock roles apply` and use its roles, or ALTER ROLE … SET search_path = penstock, and let the pooler reconnect"
            )
    try:
        yield pool
    finally:
        await close(pool)


async def close(connected: asyncpg.Connection[Any] | asyncpg.Pool[Any]) -> None:
    """Closes a connection or a pool, within `CLOSE_S`.

    It reports nothing: the server may be away, or end the session at the same moment, and the work
    of the connection is done or its error is under way.
    """
    try:
        async with cleanup_timeout(CLOSE_S):
            await connected.close()
    except (*_PASSING, asyncpg.PostgresError):
        connected.terminate()


@asynccontextmanager
async def acquired_connection(pool: asyncpg.Pool[asyncpg.Record], wait_s: float) -> AsyncIterator[Any]:
    """A connection of a pool for a `with` block.

    Raises:
        Throttled: none was free within `wait_s` seconds, or the server accepted none.
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
        with translated():
            await pool.release(connection)
