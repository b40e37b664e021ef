"""API keys: their rows, and the cache of valid keys in a gateway.

What the cache guarantees: a revoked key is refused as soon as its notification arrives, which takes
milliseconds, and after `REFRESH_S` when the notification is lost. It fails closed: no key is valid
when the cache is older than `TRUST_S`. A request needs no query.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from penstock.core.access import ApiKey, Grant, Role, find_valid_key, valid_key
from penstock.errors import Conflict, NotFound, PostgresUnavailable, SessionLost
from penstock.postgres.connection import translated
from penstock.postgres.queries import fetch, fetchrow, fetchval
from penstock.postgres.session import Session, open_session

log = logging.getLogger(__name__)

# Channel of notifications: an API key was created, replaced or revoked.
CHANNEL = "penstock_api_keys"

REFRESH_S = 5.0
TRUST_S = 15.0
# How often a gateway writes `last_used_at`.
USE_RECORDED_S = 60.0
_RETRY_S = 1.0


async def create(
    executor: Any,
    *,
    key_id: str,
    digest: bytes,
    name: str,
    role: Role,
    namespaces: Collection[str] | None,
    rate: float | None,
    expires_at: datetime | None,
) -> asyncpg.Record:
    """Inserts an API key; `core.access.ApiKey` describes its fields.

    Raises:
        PostgresUnavailable: the key may be inserted or not.
    """
    [row] = await fetch(
        executor,
        "api_keys.create",
        id=key_id,
        name=name,
        digest=digest,
        role=role.value,
        namespaces=None if namespaces is None else sorted(namespaces),
        rate=rate,
        expires_at=expires_at,
    )
    return row


async def list_keys(executor: Any) -> list[asyncpg.Record]:
    """All API keys in the order of their creation, with those that are not valid any more.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return await fetch(executor, "api_keys.list")


async def rotate(
    connection: Any,
    key_id: str,
    *,
    new_id: str,
    digest: bytes,
    overlap_s: float,
    expires_at: datetime | None,
) -> tuple[asyncpg.Record, asyncpg.Record]:
    """Inserts an API key that replaces another, with the same name, role and namespaces.

    Args:
        connection: to the database.
        key_id: id of the old key.
        new_id: id of the new key.
        digest: digest of the new secret.
        overlap_s: seconds for which both keys are valid.
        expires_at: when the new key expires; None is after the lifetime of the old key.

    Returns:
        The rows of the new and of the old key.

    Raises:
        NotFound: there is no key with this id.
        Conflict: the old key is revoked, has expired or was replaced before.
        PostgresUnavailable: the key may be replaced or not.
    """
    with translated():
        async with connection.transaction():
            old = await fetchrow(connection, "api_keys.lock", key_id)
            if old is None:
                raise NotFound(f"there is no key {key_id!r}")
            now_at = await now(connection)
            state = state_of(old, now_at)
            if state != "valid":
                raise Conflict(f"key {key_id} is {state}: create a new key")
            if expires_at is None and old["expires_at"] is not None:
                expires_at = now_at + (old["expires_at"] - old["created_at"])
            new = await create(
                connection,
                key_id=new_id,
                digest=digest,
                name=old["name"],
                role=Role(old["role"]),
                namespaces=old["namespaces"],
                rate=old["rate"],
                expires_at=expires_at,
            )
            replaced = await fetchrow(connection, "api_keys.replace", key_id, new_id, overlap_s)
            assert replaced is not None
            return new, replaced


async def now(executor: Any) -> datetime:
    """The database's time, by which keys expire.

    Raises:
        PostgresUnavailable: no server.
    """
    at: datetime = await fetchval(executor, "api_keys.now")
    return at


async def revoke(executor: Any, key_id: str) -> bool:
    """Revokes an API key; returns False when it was revoked before.

    Raises:
        NotFound: there is no key with this id.
        PostgresUnavailable: the key may be revoked or not; repeating the call is safe.
    """
    if await fetchrow(executor, "api_keys.revoke", key_id) is not None:
        return True
    if await fetchrow(executor, "api_keys.lock", key_id) is None:
        raise NotFound(f"there is no key {key_id!r}")
    return False


def state_of(row: Mapping[str, Any] | asyncpg.Record, now: datetime) -> str:
    """State of an API key: valid, replaced (valid until it expires), expired or revoked."""
    if row["revoked_at"] is not None:
        return "revoked"
    if row["expires_at"] is not None and row["expires_at"] <= now:
        return "expired"
    return "replaced" if row["replaced_by"] else "valid"


class ApiKeyCache:
    """The cache of valid API keys, refreshed by notification.

    Args:
        dsn: address of the database, for the session that receives notifications.
        pool: reads the keys for the first time.
    """

    def __init__(self, dsn: str, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._dsn = dsn
        self._pool = pool
        self._api_keys: dict[str, ApiKey] = {}
        self._read_at_s = float("-inf")
        # The database's time at `_read_at_s`: this machine's clock must not decide what is valid.
        self._read_at = datetime.min.replace(tzinfo=UTC)
        self._last_used: dict[str, datetime] = {}
        self._use_recorded_at_s = float("-inf")
        self._changed = asyncio.Event()

    def accepts(self, token: str) -> bool:
        """Whether a token has the form of an API key."""
        return token.startswith("pk_")

    async def authenticate(self, token: str) -> Grant | None:
        """The grant of a token; None when it belongs to no valid API key.

        Raises:
            PostgresUnavailable: the cache is older than `TRUST_S`.
        """
        now = self._now()
        return self._used(find_valid_key(self._api_keys, token, now), now)

    def grant_of_key(self, key_id: str) -> Grant | None:
        """The grant of an API key, for the sessions that it has begun; None when it is not valid.

        Raises:
            PostgresUnavailable: the cache is older than `TRUST_S`.
        """
        now = self._now()
        return self._used(valid_key(self._api_keys, key_id, now), now)

    def _now(self) -> datetime:
        """The database's time, by which keys expire."""
        if time.monotonic() - self._read_at_s > TRUST_S:
            raise PostgresUnavailable(
                f"the API keys could not be read for {TRUST_S:g} s: none is accepted until they can"
            )
        return self._read_at + timedelta(seconds=time.monotonic() - self._read_at_s)

    def _used(self, api_key: ApiKey | None, now: datetime) -> Grant | None:
        if api_key is None:
            return None
        self._last_used[api_key.id] = now
        return api_key.grant

    async def load(self) -> None:
        """Reads all valid keys.

        Raises:
            PostgresUnavailable: the database is unavailable; the cache is unchanged.
        """
        started_s = time.monotonic()
        self._replace(await fetch(self._pool, "api_keys.valid"), started_s)

    def _replace(self, rows: Sequence[asyncpg.Record], started_s: float) -> None:
        if rows:
            self._read_at = rows[0]["read_at"]
        self._api_keys = {row["id"]: _api_key(row) for row in rows}
        # The start of the query, since the result lacks later changes.
        self._read_at_s = started_s

    async def run(self) -> None:
        """Refreshes the cache and records the use of keys, until cancelled."""
        while True:
            try:
                async with open_session(self._dsn, "gateway api keys", locks=False) as session:
                    await session.listen(CHANNEL, lambda _payload: self._changed.set())
                    while not session.lost.is_set():
                        # Before the query, so that a change during the query causes another one.
                        self._changed.clear()
                        started_s = time.monotonic()
                        # In a session of its own, since a busy pool would make the cache too old.
                        async with asyncio.timeout(REFRESH_S):
                            rows = await session.fetch("api_keys.valid")
                        self._replace(rows, started_s)
                        await self._record_use(session)
                        try:
                            async with asyncio.timeout(REFRESH_S):
                                await self._changed.wait()
                        except TimeoutError:
                            continue
            except (PostgresUnavailable, SessionLost, TimeoutError) as error:
                log.warning(
                    "The API keys cannot be read; trying again",
                    extra={"event": "api_keys_unavailable", "error": error},
                )
            await asyncio.sleep(_RETRY_S)

    async def _record_use(self, session: Session) -> None:
        if not self._last_used or time.monotonic() - self._use_recorded_at_s < USE_RECORDED_S:
            return
        last_used, self._last_used = self._last_used, {}
        self._use_recorded_at_s = time.monotonic()
        await session.fetch("api_keys.used", list(last_used), list(last_used.values()))


def _api_key(row: asyncpg.Record) -> ApiKey:
    namespaces = None if row["namespaces"] is None else frozenset(row["namespaces"])
    grant = Grant(f"key:{row['id']}", frozenset({Role(row["role"])}), namespaces, row["rate"])
    return ApiKey(row["id"], bytes(row["digest"]), grant, row["expires_at"])
