"""Keys of the API: rows, and the copy by which a gateway knows them.

What the copy guarantees: a key that was revoked is refused as soon as its notification has come, which takes milliseconds, or
`REFRESH_S` later when it is lost. It fails closed: when the database has not told for `TRUST_S` which keys hold, none does.
No request costs a query.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import asyncpg

from penstock.core.access import Grant, Key, Role, recognised
from penstock.errors import Conflict, NotFound, PostgresUnavailable, SessionLost
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.session import Session, open_session

log = logging.getLogger(__name__)

# Notified when a key is created, replaced or revoked.
CHANNEL = "penstock_api_keys"

REFRESH_S = 5.0
TRUST_S = 15.0
# How often a gateway notes which keys were used.
NOTED_S = 60.0
_AGAIN_S = 1.0


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
    """Writes a key down; see `core.access.Key` for what each argument means.

    Raises:
        PostgresUnavailable: perhaps it was not written.
    """
    with translated():
        row: asyncpg.Record = await executor.fetchrow(
            query("api_keys.create"),
            key_id,
            name,
            digest,
            role.value,
            None if namespaces is None else sorted(namespaces),
            rate,
            expires_at,
        )
    return row


async def all_keys(executor: Any) -> list[asyncpg.Record]:
    """Every key, in the order of creation, also those that hold no more.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(query("api_keys.list"))
    return rows


async def rotate(
    connection: asyncpg.Connection[asyncpg.Record],
    key_id: str,
    *,
    new_id: str,
    digest: bytes,
    overlap_s: float,
    expires_at: datetime | None,
) -> tuple[asyncpg.Record, asyncpg.Record]:
    """Writes a key down that takes the place of another, with the same name, role and namespaces.

    Args:
        connection: to the database.
        key_id: of the one to be replaced.
        new_id: of the one that takes its place.
        digest: of its secret.
        overlap_s: seconds for which both hold.
        expires_at: of the new one; None is as long as the old one was made for.

    Returns:
        The new one, and the old one as it is now.

    Raises:
        NotFound: there is none of this id.
        Conflict: it is revoked, has expired or was replaced before.
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        async with connection.transaction():
            old = await connection.fetchrow(query("api_keys.lock"), key_id)
            if old is None:
                raise NotFound(f"there is no key {key_id!r}")
            state = state_of(old, datetime.now(UTC))
            if state != "valid":
                raise Conflict(f"key {key_id} is {state}: create another")
            if expires_at is None and old["expires_at"] is not None:
                expires_at = datetime.now(UTC) + (old["expires_at"] - old["created_at"])
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
            replaced = await connection.fetchrow(query("api_keys.replace"), key_id, new_id, overlap_s)
            assert replaced is not None
            return new, replaced


async def revoke(executor: Any, key_id: str) -> bool:
    """Refuses a key from now on; False when it was revoked before.

    Raises:
        NotFound: there is none of this id.
        PostgresUnavailable: perhaps it still holds; the same again is safe.
    """
    with translated():
        if await executor.fetchrow(query("api_keys.revoke"), key_id) is not None:
            return True
        if await executor.fetchrow(query("api_keys.lock"), key_id) is None:
            raise NotFound(f"there is no key {key_id!r}")
    return False


def state_of(row: Mapping[str, Any] | asyncpg.Record, now: datetime) -> str:
    """Whether a key holds: valid, replaced (and valid until it expires), expired or revoked."""
    if row["revoked_at"] is not None:
        return "revoked"
    if row["expires_at"] is not None and row["expires_at"] <= now:
        return "expired"
    return "replaced" if row["replaced_by"] else "valid"


class KnownKeys:
    """The copy.

    Args:
        dsn: of the database, for the session that hears of changes.
        pool: where they are read for the first time.
    """

    def __init__(self, dsn: str, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._dsn = dsn
        self._pool = pool
        self._keys: dict[str, Key] = {}
        self._told_s = float("-inf")
        self._used: dict[str, datetime] = {}
        self._noted_s = float("-inf")
        self._changed = asyncio.Event()

    def recognise(self, token: str) -> Grant | None:
        """What the sender of a token may do; None when it is of no key that holds.

        Raises:
            PostgresUnavailable: the copy is too old to be trusted.
        """
        if _now_s() - self._told_s > TRUST_S:
            raise PostgresUnavailable(
                f"the database has not told for {TRUST_S:g} s which API keys hold: none is accepted until it does"
            )
        now = datetime.now(UTC)
        key = recognised(self._keys, token, now)
        if key is None:
            return None
        self._used[key.id] = now
        return key.grant

    async def load(self) -> None:
        """Reads all keys that hold.

        Raises:
            PostgresUnavailable: no server; the copy is what it was.
        """
        asked_s = _now_s()
        with translated():
            self._take(await self._pool.fetch(query("api_keys.valid")), asked_s)

    def _take(self, rows: Iterable[asyncpg.Record], asked_s: float) -> None:
        self._keys = {row["id"]: _key(row) for row in rows}
        # When it was asked: what the query did not see was changed after that.
        self._told_s = asked_s

    async def run(self) -> None:
        """Keeps the copy fresh and notes which keys were used, until cancelled."""
        while True:
            try:
                async with open_session(self._dsn, "gateway api keys") as session:
                    await session.listen(CHANNEL, lambda _payload: self._changed.set())
                    while not session.lost.is_set():
                        # Before the query: a change that comes while it runs must be followed by another.
                        self._changed.clear()
                        asked_s = _now_s()
                        # In a session of its own: a pool that is busy must not keep everybody out.
                        rows = await asyncio.wait_for(session.fetch("api_keys.valid"), REFRESH_S)
                        self._take(rows, asked_s)
                        await self._note(session)
                        try:
                            await asyncio.wait_for(self._changed.wait(), REFRESH_S)
                        except TimeoutError:
                            continue
            except (PostgresUnavailable, SessionLost, TimeoutError) as error:
                log.warning("API keys cannot be read again: %r", error)
            await asyncio.sleep(_AGAIN_S)

    async def _note(self, session: Session) -> None:
        if not self._used or _now_s() - self._noted_s < NOTED_S:
            return
        used, self._used, self._noted_s = self._used, {}, _now_s()
        await session.fetch("api_keys.used", list(used), list(used.values()))


def _key(row: asyncpg.Record) -> Key:
    namespaces = None if row["namespaces"] is None else frozenset(row["namespaces"])
    grant = Grant(f"key:{row['id']}", frozenset({Role(row["role"])}), namespaces, row["rate"])
    return Key(row["id"], bytes(row["digest"]), grant, row["expires_at"])


def _now_s() -> float:
    return asyncio.get_running_loop().time()
