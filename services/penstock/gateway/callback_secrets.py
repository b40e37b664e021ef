"""Routes of the secrets that sign callbacks.

No answer has a secret, except the one that creates it. A private ed25519 key never leaves: the
answer has its public key. A secret by reference names something of the callbacks service's machine,
which belongs to no namespace; so only API keys of all namespaces may create one.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
from aiohttp import web

from penstock.contracts import subscription
from penstock.core.access import EVERY_NAMESPACE
from penstock.core.changes import difference
from penstock.core.target import TargetId
from penstock.core.webhook_secrets import (
    SYMMETRIC_PREFIX,
    Scheme,
    Scope,
    encode,
    parse_reference,
    public_key_bytes,
    scopes_of,
    secret_problem,
)
from penstock.crypto import PrivateKey, Sealer, UnreadableSecret, generate_private_key
from penstock.errors import Conflict, Forbidden, InvalidRecord, NotFound
from penstock.gateway.access import grant_of
from penstock.gateway.bodies import read_document
from penstock.gateway.changes import note
from penstock.gateway.paging import page_size, respond_page
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.views import pick
from penstock.gateway.visibility import (
    MAX_NAMESPACE_LENGTH,
    require_namespace,
    resolve_target,
    target_namespace,
    visible_namespaces,
)
from penstock.http.server import refuse_unknown_parameters, respond, text_parameter
from penstock.postgres import callback_secrets
from penstock.postgres.callback_secrets import Stored, identity_of
from penstock.postgres.queries import transaction
from penstock.postgres.read_pool import reading
from penstock.postgres.types import TypeCache

MAX_URL_LENGTH = 2048
OVERLAP_S = 86_400.0
_SECRET_BYTES = 32
_ID_BYTES = 8

_COLUMNS = (
    "id",
    "namespace",
    "scheme",
    "public_key",
    "reference",
    "created_at",
    "created_by",
    "expires_at",
    "wider_until",
    "replaced_by",
)

# The audit keeps these fields.
_AUDITED = (
    "id",
    "namespace",
    "url",
    "scheme",
    "state",
    "public_key",
    "reference",
    "encryption_key",
    "expires_at",
    "wider_until",
)


class CallbackSecretRoutes:
    """The routes below /targets/secrets, and /targets/public-keys.

    Args:
        settings: limits, and the keys that encrypt.
        pool: the database.
        types: the registered types, which determine the namespaces.
    """

    def __init__(
        self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record], types: TypeCache
    ) -> None:
        self._pool = pool
        self._types = types
        self._sealer = Sealer(settings.encryption_keys)

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/targets/secrets", self.find, allow_head=False),
            web.post("/targets/secrets", self.create),
            web.post("/targets/secrets/reencrypt", self.reencrypt),
            web.post("/targets/secrets/{id}/rotate", self.rotate),
            web.delete("/targets/secrets/{id}", self.revoke),
            web.get("/targets/public-keys", self.public_keys, allow_head=False),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /targets/secrets: by namespace, URL and id, without the secrets themselves."""
        refuse_unknown_parameters(request, "namespace", "url", "limit", "cursor")
        size = page_size(request)
        url = text_parameter(request, "url", longest=MAX_URL_LENGTH)
        namespace = text_parameter(request, "namespace", longest=MAX_NAMESPACE_LENGTH)
        cursor = text_parameter(request, "cursor", longest=MAX_URL_LENGTH + MAX_NAMESPACE_LENGTH + 20) or ""
        after_namespace, _, rest = cursor.partition(" ")
        after_id, _, after_url = rest.partition(" ")
        rows = await callback_secrets.find(
            self._pool,
            namespaces=visible_namespaces(request, namespace),
            url=url,
            after=(after_namespace, after_url, after_id),
            limit=size + 1,
        )
        return respond_page(
            "secrets", rows, size, lambda row: f"{row['namespace']} {row['id']} {row['url']}", _document
        )

    async def create(self, request: web.Request) -> web.Response:
        """POST /targets/secrets: generates a secret, or takes a given one or a reference."""
        raw = await read_document(request, "CallbackSecretCreate")
        scope = await self._scope(request, raw)
        scheme = Scheme(raw.get("scheme", Scheme.V1))
        stored, shown = self._new(request, scope, scheme, raw)
        row = await callback_secrets.create(
            self._pool, stored, created_by=grant_of(request).actor or None, wider_s=raw.get("overlap_s")
        )
        note(request, secret=row["id"], before=None, after=_audited(row))
        return respond({"secret": shown, **_document(row)}, 201)

    async def rotate(self, request: web.Request) -> web.Response:
        """POST /targets/secrets/{id}/rotate: a new secret; the old one signs during the overlap."""
        raw = await read_document(request, "CallbackSecretRotate")
        secret_id = request.match_info["id"]
        async with transaction(self._pool) as connection:
            old = await self._visible(request, connection, secret_id)
            if old["revoked_at"] is not None:
                raise Conflict(f"secret {secret_id} is revoked: create a new one")
            if old["replaced_by"] is not None:
                raise Conflict(f"secret {secret_id} was rotated before: rotate {old['replaced_by']}")
            if old["reference"] is not None and "reference" not in raw and "secret" not in raw:
                raise InvalidRecord(
                    "the secret is by reference: change its variable or file, or give another one",
                    pointer="/reference",
                )
            scope, scheme = Scope(old["namespace"], old["url"]), Scheme(old["scheme"])
            stored, shown = self._new(request, scope, scheme, raw)
            row = await callback_secrets.create(
                connection, stored, created_by=grant_of(request).actor or None, wider_s=None
            )
            replaced = await callback_secrets.replace(
                connection, secret_id, stored.id, raw.get("overlap_s", OVERLAP_S)
            )
        note(request, old=_audited(replaced), new=_audited(row))
        return respond({"secret": shown, **_document(row), "replaces": _document(replaced)}, 201)

    async def revoke(self, request: web.Request) -> web.Response:
        """DELETE /targets/secrets/{id}: it signs nothing from now on; may be repeated."""
        refuse_unknown_parameters(request)
        secret_id = request.match_info["id"]
        async with transaction(self._pool) as connection:
            row = await self._visible(request, connection, secret_id)
            before = _audited(row)
            if row["revoked_at"] is None:
                row = await callback_secrets.revoke(connection, secret_id)
        note(request, **difference(before, _audited(row)))
        return respond(_document(row))

    async def reencrypt(self, request: web.Request) -> web.Response:
        """POST /targets/secrets/reencrypt: encrypts all secrets with the first key."""
        refuse_unknown_parameters(request)
        if grant_of(request).namespaces is not None:
            raise Forbidden("the keys that encrypt are the deployment's: use an API key of all namespaces")
        self._require_key()
        try:
            count = await callback_secrets.reseal_all(self._pool, self._sealer)
        except UnreadableSecret as error:
            raise Conflict(f"a secret cannot be decrypted: {error}") from error
        note(request, reencrypted=count, encryption_key=self._sealer.current_id)
        return respond({"reencrypted": count, "encryption_key": self._sealer.current_id})

    async def public_keys(self, request: web.Request) -> web.Response:
        """GET /targets/public-keys: the keys that verify callbacks to a target.

        It needs no credentials. A receiver asks with its namespace and URL, so it accepts no key of
        another namespace.
        """
        refuse_unknown_parameters(request, "namespace", "url")
        namespace = text_parameter(request, "namespace", longest=MAX_NAMESPACE_LENGTH)
        url = text_parameter(request, "url", longest=MAX_URL_LENGTH)
        scope = Scope(namespace or "default", url or "")
        # Reads without credentials share one turn, so that they delay no other.
        with reading("public keys", lists=True):
            rows = await callback_secrets.public_keys(self._pool, scope)
        return respond({"keys": _public_documents(rows, scope)})

    async def _scope(self, request: web.Request, raw: Mapping[str, Any]) -> Scope:
        url, namespace = raw.get("url"), raw.get("namespace")
        if namespace == EVERY_NAMESPACE:
            if url is not None:
                raise InvalidRecord("a secret of the deployment has no URL", pointer="/url")
            if grant_of(request).namespaces is not None:
                raise NotFound(f"there is no namespace {namespace}: no type is in it")
            return Scope(EVERY_NAMESPACE)
        if url is None:
            namespace = target_namespace(request, namespace)
            await require_namespace(request, self._types, namespace)
            return Scope(namespace)
        subscription.read_one(url, "/url")
        return Scope(*await resolve_target(request, self._pool, self._types, url, namespace))

    def _new(
        self, request: web.Request, scope: Scope, scheme: Scheme, raw: Mapping[str, Any]
    ) -> tuple[Stored, str | None]:
        """A new secret, and its text if the answer shows it."""
        secret_id = secrets.token_hex(_ID_BYTES)
        if "reference" in raw:
            return self._by_reference(request, secret_id, scope, scheme, raw), None
        given, shown, public_key = raw.get("secret"), None, None
        if given is not None:
            if (problem := secret_problem(given, scheme)) is not None:
                raise InvalidRecord(f"the secret {problem}", pointer="/secret")
            secret = given
        elif scheme is Scheme.V1:
            secret = shown = encode(SYMMETRIC_PREFIX, secrets.token_bytes(_SECRET_BYTES))
        else:
            secret = generate_private_key()
        if scheme is Scheme.V1A:
            public_key = PrivateKey(secret).public
        if raw.get("public_key") not in (None, public_key):
            raise InvalidRecord("it is not the public key of the secret", pointer="/public_key")
        self._require_key()
        sealed = self._sealer.seal(secret, identity_of(secret_id, scope, scheme))
        return Stored(id=secret_id, scope=scope, scheme=scheme, sealed=sealed, public_key=public_key), shown

    def _by_reference(
        self, request: web.Request, secret_id: str, scope: Scope, scheme: Scheme, raw: Mapping[str, Any]
    ) -> Stored:
        if "secret" in raw:
            raise InvalidRecord("give either the secret or a reference to it", pointer="/reference")
        if grant_of(request).namespaces is not None:
            # Another namespace's secret could be named, and would then sign this one's callbacks.
            raise Forbidden(
                "a reference names a variable or file of the callbacks service: use an API key of all namespaces"
            )
        public_key = raw.get("public_key")
        try:
            parse_reference(raw["reference"])
        except ValueError as error:
            raise InvalidRecord(str(error), pointer="/reference") from error
        if (public_key is None) != (scheme is Scheme.V1):
            raise InvalidRecord(
                "v1 has no public key" if public_key else "v1a by reference needs the public key to serve",
                pointer="/public_key",
            )
        if public_key is not None:
            try:
                public_key_bytes(public_key)
            except ValueError as error:
                raise InvalidRecord(str(error), pointer="/public_key") from error
        return Stored(
            id=secret_id, scope=scope, scheme=scheme, reference=raw["reference"], public_key=public_key
        )

    def _require_key(self) -> None:
        if self._sealer.current_id is None:
            raise Conflict(
                "the gateway has no key to encrypt secrets: set PENSTOCK_ENCRYPTION_KEYS for gateway and callbacks, or "
                "give a reference"
            )

    async def _visible(self, request: web.Request, connection: Any, secret_id: str) -> asyncpg.Record:
        row = await callback_secrets.lock(connection, secret_id)
        visible = grant_of(request).namespaces
        if visible is not None and row["namespace"] not in visible:
            raise callback_secrets.not_found(secret_id)
        return row


def _document(row: asyncpg.Record) -> dict[str, Any]:
    if row["revoked_at"] is not None:
        state = "revoked"
    elif row["replaced_by"] is None:
        state = "valid"
    else:
        state = "replaced" if row["expires_at"] > row["read_at"] else "expired"
    return {
        **pick(row, _COLUMNS),
        "url": row["url"] or None,
        "encryption_key": row["key_id"],
        "state": state,
    }


def _audited(row: asyncpg.Record) -> dict[str, Any]:
    """The fields that the audit keeps, without the secret itself."""
    document = _document(row)
    return {name: document[name] for name in _AUDITED}


def _public_documents(rows: Sequence[asyncpg.Record], scope: Scope) -> list[dict[str, Any]]:
    """The public keys of the scopes that sign for a target, the newest of the narrowest first."""
    found: list[dict[str, Any]] = []
    for each in dict.fromkeys(scopes_of(TargetId(*scope))):
        own = [row for row in rows if (row["namespace"], row["url"]) == each]
        for row in own:
            if row["public_key"] is not None:
                key = base64.urlsafe_b64encode(public_key_bytes(row["public_key"])).rstrip(b"=").decode()
                found.append(
                    {
                        **pick(row, ("id", "scheme", "public_key", "created_at", "expires_at")),
                        "jwk": {"kty": "OKP", "crv": "Ed25519", "kid": row["id"], "x": key, "use": "sig"},
                    }
                )
        if own and not any(row["wider"] for row in own):
            break
    return found
