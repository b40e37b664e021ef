"""Sessions of the console: a cookie in place of an API key or token.

What this module guarantees: the cookie is opaque, and PostgreSQL has only its digest. A session has
the rights that its API key has at this moment, and ends with it. A session that was signed out is
refused by this gateway at once, and by others after `CACHED_S`. A request that may change something
needs the page's origin and the session's token beside the cookie, so no other site can send it. It
fails closed: a session that cannot be checked is answered 503.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import OrderedDict
from datetime import datetime
from typing import NamedTuple

import asyncpg
from aiohttp import web

from penstock.core.access import Grant, Role
from penstock.core.token_bucket import TokenBucket
from penstock.errors import Forbidden, PostgresUnavailable, Throttled
from penstock.postgres import console_sessions
from penstock.postgres.api_keys import ApiKeyCache

log = logging.getLogger(__name__)

# The prefix makes browsers refuse a cookie that another host or an unencrypted page has set.
COOKIE = "__Host-penstock"
CSRF_HEADER = "X-Penstock-CSRF"
CACHED_S = 2.0
ABSOLUTE_S = 86_400
_TOKEN_BYTES = 32
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
# Queries a second for cookies that belong to no session.
_UNKNOWN_RATE = 50.0
_BURST_S = 2.0
_MAX_CACHED = 10_000
_PRUNE_EVERY_S = 600.0
_READS = ("GET", "HEAD")


class ConsoleSession(NamedTuple):
    """A session that has not ended.

    Attributes:
        grant: its rights.
        expires_at: when it ends at the latest.
    """

    grant: Grant
    expires_at: datetime


def csrf_token(token: str) -> str:
    """The token that changes of a session carry. Only pages of the gateway can read it."""
    return hmac.new(token.encode(), b"csrf", hashlib.sha256).hexdigest()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class Sessions:
    """The sessions of the console.

    Args:
        pool: the database.
        api_keys: the valid API keys; None when they are not accepted.
        issuer: the trusted OpenID Connect provider; empty without one.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], api_keys: ApiKeyCache | None, issuer: str) -> None:
        self._pool = pool
        self._api_keys = api_keys
        self._issuer = issuer
        # Rows by digest, and when they were read on the monotonic clock.
        self._cache: OrderedDict[bytes, tuple[asyncpg.Record, float]] = OrderedDict()
        # Sessions that this gateway has ended, which a read may still find.
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        # By address: cookies that belong to no session.
        self._unknown: OrderedDict[str, TokenBucket] = OrderedDict()

    async def begin(self, grant: Grant) -> tuple[str, ConsoleSession]:
        """Begins a session; returns the token of its cookie.

        Raises:
            PostgresUnavailable: no session has begun.
        """
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        kind, _, key_id = grant.actor.partition(":")
        expires_at = await console_sessions.create(
            self._pool,
            digest=_digest(token),
            key_id=key_id if kind == "key" else None,
            issuer=None if kind == "key" else self._issuer,
            actor=grant.actor,
            roles=[] if kind == "key" else [role.value for role in grant.roles],
            namespaces=None if kind == "key" else grant.namespaces,
        )
        return token, ConsoleSession(grant, expires_at)

    async def end(self, token: str) -> None:
        """Ends a session.

        Raises:
            PostgresUnavailable: it may have ended or not.
        """
        digest = _digest(token)
        # Before the deletion: a read that began earlier must not bring the session back.
        self._ended[digest] = None
        if len(self._ended) > _MAX_CACHED:
            self._ended.popitem(last=False)
        self._cache.pop(digest, None)
        await console_sessions.delete(self._pool, digest)

    async def find(self, token: str, address: str | None) -> ConsoleSession | None:
        """The session of a cookie; None when it has ended.

        Args:
            token: in the cookie.
            address: of the client.

        Raises:
            PostgresUnavailable: it cannot be checked.
            Throttled: too many cookies without a session came from this address.
        """
        row = await self._row(_digest(token), address or "") if _TOKEN.fullmatch(token) else None
        if row is None:
            return None
        if row["key_id"] is None:
            # The gateway may trust another provider, or none, since it was restarted.
            if not self._issuer or row["issuer"] != self._issuer:
                return None
            roles = frozenset(Role(role) for role in row["roles"])
            namespaces = None if row["namespaces"] is None else frozenset(row["namespaces"])
            return ConsoleSession(Grant(row["actor"], roles, namespaces), row["expires_at"])
        grant = self._api_keys.grant_of_key(row["key_id"]) if self._api_keys else None
        return ConsoleSession(grant, row["expires_at"]) if grant else None

    async def _row(self, digest: bytes, address: str) -> asyncpg.Record | None:
        cached = self._cache.get(digest)
        if digest in self._ended:
            return None
        read_s = time.monotonic()
        if cached is not None and read_s - cached[1] < CACHED_S:
            return cached[0]
        # Cookies that belong to no session cost a query each, without any credentials.
        unknown = self._unknown.get(address)
        if cached is None and unknown is not None and not unknown.available(read_s):
            raise Throttled(
                "too many cookies without a session from this address", retry_after_s=unknown.wait_s()
            )
        row = await console_sessions.find(self._pool, digest)
        if row is None or digest in self._ended:
            self._cache.pop(digest, None)
            self._count_unknown(address, read_s)
            return None
        self._cache[digest] = row, read_s
        self._cache.move_to_end(digest)
        if len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return row

    def _count_unknown(self, address: str, now_s: float) -> None:
        bucket = self._unknown.pop(address, None)
        if bucket is None:
            bucket = TokenBucket(_UNKNOWN_RATE, now_s, capacity_s=_BURST_S, full=True)
        self._unknown[address] = bucket
        if len(self._unknown) > _MAX_CACHED:
            self._unknown.popitem(last=False)
        if bucket.available(now_s):
            bucket.take()

    async def authenticate(self, request: web.Request) -> Grant | None:
        """The grant of a request with a cookie; None without a session.

        Raises:
            Forbidden: the request comes from another site, or lacks the proof that it does not.
            PostgresUnavailable: the session cannot be checked.
        """
        token = request.cookies.get(COOKIE)
        session = await self.find(token, request.remote) if token else None
        if token is None or session is None:
            return None
        require_own_page(request)
        if request.method not in _READS and not hmac.compare_digest(
            request.headers.get(CSRF_HEADER, "").encode(), csrf_token(token).encode()
        ):
            raise Forbidden(f"a session needs the header {CSRF_HEADER} that GET /session tells")
        return session.grant

    async def run(self) -> None:
        """Removes sessions that have ended, until cancelled."""
        while True:
            try:
                await console_sessions.prune(self._pool)
            except PostgresUnavailable as error:
                log.warning(
                    "Ended sessions cannot be removed; trying again",
                    extra={"event": "sessions_unpruned", "error": error},
                )
            await asyncio.sleep(_PRUNE_EVERY_S)


def require_own_page(request: web.Request) -> None:
    """Returns when a request with a cookie comes from a page of this gateway.

    The origins of requests that have one are compared by `http.server.same_origin_middleware`.

    Raises:
        Forbidden: a browser says that it comes from another site, or a change names no origin.
    """
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("a session is for pages of this gateway; other sites may not use it")
    if request.method not in _READS and request.headers.get("Origin") is None:
        raise Forbidden("a change by a session needs the header Origin, which every browser sends")
