"""Routes of API keys and of the audit of requests, for administrators.

What this module guarantees: a secret is in one answer only. An administrator of some namespaces
sees and makes keys of these namespaces, and the audit, which has all, is for those of all of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.core.access import SECRET_BYTES, Grant, Role, digest_of, parse_namespaces, token_of
from penstock.core.changes import difference
from penstock.errors import Forbidden, InvalidRecord, NotFound
from penstock.gateway.access import grant_of
from penstock.gateway.audit import NOTHING_CHANGED
from penstock.gateway.bodies import read_document
from penstock.gateway.changes import note
from penstock.gateway.paging import id_cursor, page_size, respond_page
from penstock.http.server import refuse_unknown_parameters, respond, text_parameter
from penstock.postgres import api_keys, audit
from penstock.postgres.read_pool import reading

_OVERLAP_S = 86_400
_NOTED = ("name", "role", "namespaces", "rate", "expires_at", "revoked_at", "replaced_by")


class ApiKeyRoutes:
    """The routes of API keys and of the audit.

    Args:
        pool: the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/keys", self.find, allow_head=False),
            web.post("/keys", self.create),
            web.post("/keys/{id}/rotate", self.rotate),
            web.delete("/keys/{id}", self.revoke),
            web.get("/audit", self.audit, allow_head=False),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /keys: all keys, the expired and revoked ones too."""
        refuse_unknown_parameters(request)
        request[NOTHING_CHANGED] = True
        grant = grant_of(request)
        with reading(grant.actor, lists=True):
            rows = await api_keys.list_keys(self._pool)
            now = await api_keys.now(self._pool)
        return respond({"keys": [_document(row, now) for row in rows if _sees(grant, row["namespaces"])]})

    async def create(self, request: web.Request) -> web.Response:
        """POST /keys: a new key, with its secret."""
        body = await read_document(request, "ApiKeyCreate")
        grant = grant_of(request)
        namespaces = _namespaces(body.get("namespaces"))
        if not _sees(grant, namespaces):
            raise Forbidden(f"a key may have your namespaces only: {_names(grant.namespaces)}")
        if not body["name"].strip():
            raise InvalidRecord("a name must have a character other than spaces", pointer="/name")
        now = await api_keys.now(self._pool)
        expires_at = _expiry(now, body.get("expires_in_s"))
        await self._require_own_bounds(grant, expires_at, body.get("rate"))
        key_id, secret = _generate()
        row = await api_keys.create(
            self._pool,
            key_id=key_id,
            digest=digest_of(secret),
            name=body["name"],
            role=Role(body["role"]),
            namespaces=namespaces,
            rate=body.get("rate"),
            expires_at=expires_at,
        )
        note(request, id=key_id, **difference(None, _settings(row)))
        return respond(_with_secret(row, now, secret), 201)

    async def rotate(self, request: web.Request) -> web.Response:
        """POST /keys/{id}/rotate: a key that replaces another, with its secret."""
        body = await read_document(request, "ApiKeyRotate")
        old_row = await self._visible(request)
        key_id = old_row["id"]
        now = await api_keys.now(self._pool)
        expires_at = _expiry(now, body.get("expires_in_s"))
        if expires_at is None and old_row["expires_at"] is not None:
            expires_at = now + (old_row["expires_at"] - old_row["created_at"])
        await self._require_own_bounds(grant_of(request), expires_at, old_row["rate"])
        new_id, secret = _generate()
        async with self._pool.acquire() as connection:
            new, old = await api_keys.rotate(
                connection,
                key_id,
                new_id=new_id,
                digest=digest_of(secret),
                overlap_s=body.get("overlap_s", _OVERLAP_S),
                expires_at=expires_at,
            )
        note(request, old={"id": key_id, **_settings(old)}, new={"id": new_id, **_settings(new)})
        return respond(_with_secret(new, now, secret), 201)

    async def revoke(self, request: web.Request) -> web.Response:
        """DELETE /keys/{id}: the key is refused from now on."""
        refuse_unknown_parameters(request)
        key_id = (await self._visible(request))["id"]
        revoked = await api_keys.revoke(self._pool, key_id)
        note(request, id=key_id, revoked=revoked)
        return respond({"id": key_id, "revoked": revoked})

    async def audit(self, request: web.Request) -> web.Response:
        """GET /audit: requests that may have changed something, the latest first."""
        refuse_unknown_parameters(request, "actor", "limit", "cursor")
        request[NOTHING_CHANGED] = True
        grant = grant_of(request)
        if grant.namespaces is not None:
            raise Forbidden("the audit has all namespaces: it needs a key of all of them")
        size = page_size(request)
        with reading(grant.actor, lists=True):
            rows = await audit.find(
                self._pool, before=id_cursor(request), actor=text_parameter(request, "actor"), limit=size + 1
            )
        return respond_page("entries", rows, size, lambda row: str(row["seq"]), _entry)

    async def _require_own_bounds(
        self, grant: Grant, expires_at: datetime | None, rate: float | None
    ) -> None:
        """Returns when a key lasts no longer, and may send no more, than the key that makes it.

        Raises:
            Forbidden: it would outlive its maker, or exceed its rate.
        """
        kind, _, own_id = grant.actor.partition(":")
        own = {row["id"]: row for row in await api_keys.list_keys(self._pool)}.get(own_id)
        if kind != "key" or own is None:
            return
        if own["expires_at"] is not None and (expires_at is None or expires_at > own["expires_at"]):
            raise Forbidden(
                f"your key expires at {own['expires_at']:%Y-%m-%dT%H:%MZ}, and this one would outlive it: "
                "give expires_in_s"
            )
        if own["rate"] is not None and (rate is None or rate > own["rate"]):
            raise Forbidden(f"your key may send {own['rate']:g} requests a second: give at most this rate")

    async def _visible(self, request: web.Request) -> asyncpg.Record:
        """The key in the path, which the request may change.

        Raises:
            NotFound: there is none.
        """
        key_id = request.match_info["id"]
        rows = {row["id"]: row for row in await api_keys.list_keys(self._pool)}
        if key_id not in rows or not _sees(grant_of(request), rows[key_id]["namespaces"]):
            raise NotFound(f"there is no key {key_id[:100]!r}")
        return rows[key_id]


def _generate() -> tuple[str, str]:
    return secrets.token_hex(8), secrets.token_urlsafe(SECRET_BYTES)


def _sees(grant: Grant, namespaces: Collection[str] | None) -> bool:
    """Whether an administrator may see and make a key of some namespaces; None is all."""
    if grant.namespaces is None:
        return True
    return namespaces is not None and grant.namespaces.issuperset(namespaces)


def _namespaces(names: list[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    try:
        return parse_namespaces(names)
    except ValueError as error:
        raise InvalidRecord(str(error), pointer="/namespaces") from error


def _names(namespaces: Collection[str] | None) -> str:
    return ", ".join(sorted(namespaces or ())) or "none"


def _expiry(now: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)


def _document(row: Mapping[str, Any] | asyncpg.Record, now: datetime) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": row["name"],
        "role": row["role"],
        "namespaces": row["namespaces"],
        "rate": row["rate"],
        "state": api_keys.state_of(row, now),
        "created_at": row["created_at"],
        "expires_at": row["expires_at"],
        "last_used_at": row["last_used_at"],
        "replaced_by": row["replaced_by"],
    }


def _with_secret(row: asyncpg.Record, now: datetime, secret: str) -> dict[str, Any]:
    return {**_document(row, now), "secret": token_of(row["id"], secret)}


def _settings(row: Mapping[str, Any] | asyncpg.Record) -> dict[str, Any]:
    return {name: row[name] for name in _NOTED}


def _entry(row: asyncpg.Record) -> dict[str, Any]:
    change = row["change"]
    return {**dict(row), "change": orjson.loads(change) if change is not None else None}
