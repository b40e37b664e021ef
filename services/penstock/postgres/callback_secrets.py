"""Secrets that sign callbacks, in PostgreSQL: encrypted, or by reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock.core.webhook_secrets import Scheme, Scope
from penstock.crypto import Sealed, Sealer
from penstock.errors import Conflict, NotFound
from penstock.postgres.queries import fetch, fetchrow

# Notified with a scope when one of its secrets has changed; `parse_notification` reads the payload.
CHANNEL = "penstock_callback_secrets"

# Each valid secret adds a signature to every call.
MAX_OF_SCOPE = 4
# Bounds what one namespace stores, with the secrets that ended less than a day ago.
MAX_OF_NAMESPACE = 10_000

_RESEALED_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A secret as it is stored.

    Attributes:
        id: 16 hexadecimal digits.
        scope: what it signs for.
        scheme: how it signs.
        sealed: the encrypted secret; None with a reference.
        reference: where the callbacks service finds the secret; None when it is encrypted.
        public_key: of an ed25519 key.
    """

    id: str
    scope: Scope
    scheme: Scheme
    sealed: Sealed | None = None
    reference: str | None = None
    public_key: str | None = None

    @property
    def identity(self) -> str:
        """The identity that its ciphertext is bound to."""
        return identity_of(self.id, self.scope, self.scheme)


def identity_of(secret_id: str, scope: Scope, scheme: Scheme) -> str:
    """The identity that the ciphertext of a secret is bound to."""
    return f"{secret_id} {scope.namespace} {scheme} {scope.url}"


def parse_notification(payload: str) -> Scope:
    """The scope of a notification."""
    namespace, _blank, url = payload.partition(" ")
    return Scope(namespace, url)


async def create(
    connection: Any, stored: Stored, *, created_by: str | None, wider_s: float | None
) -> asyncpg.Record:
    """Inserts a secret, and removes those of its namespace that ended more than a day ago.

    Args:
        connection: to the database.
        stored: the secret.
        created_by: the actor of the request; None without authentication.
        wider_s: seconds for which secrets of the next wider scope sign too; None is never.

    Raises:
        Conflict: the scope or the namespace has as many secrets as it may have.
        PostgresUnavailable: the secret may be inserted or not.
    """
    [counts] = await fetch(connection, "callback_secrets.count", *stored.scope)
    if counts["of_scope"] >= MAX_OF_SCOPE:
        raise Conflict(f"{MAX_OF_SCOPE} secrets are valid already, and all of them sign: revoke one first")
    if counts["of_namespace"] >= MAX_OF_NAMESPACE:
        raise Conflict(
            f"the namespace has {MAX_OF_NAMESPACE:,} secrets, which is the limit: revoke unused ones"
        )
    [row] = await fetch(
        connection,
        "callback_secrets.create",
        id=stored.id,
        namespace=stored.scope.namespace,
        url=stored.scope.url,
        scheme=stored.scheme.value,
        key_id=stored.sealed and stored.sealed.key_id,
        sealed=stored.sealed and stored.sealed.data,
        reference=stored.reference,
        public_key=stored.public_key,
        created_by=created_by,
        wider_s=wider_s,
    )
    return row


async def find(
    executor: Any,
    *,
    namespaces: Sequence[str] | None,
    url: str | None,
    after: tuple[str, str, str],
    limit: int,
) -> list[asyncpg.Record]:
    """A page of secrets by namespace, URL and id.

    Args:
        executor: a pool or a connection.
        namespaces: only these; None for all.
        url: only of this URL; empty for those of whole namespaces, None for all.
        after: namespace, URL and id of the last one of the page before.
        limit: most rows.

    Raises:
        PostgresUnavailable: no server.
    """
    return await fetch(
        executor,
        "callback_secrets.find",
        namespaces=namespaces,
        after_namespace=after[0],
        after_url=after[1],
        after_id=after[2],
        url=url,
        limit=limit,
    )


async def lock(connection: Any, secret_id: str) -> asyncpg.Record:
    """The row of a secret, locked until the transaction ends.

    Raises:
        NotFound: there is none.
        PostgresUnavailable: no server.
    """
    row: asyncpg.Record | None = await fetchrow(connection, "callback_secrets.lock", secret_id)
    if row is None:
        raise not_found(secret_id)
    return row


def not_found(secret_id: str) -> NotFound:
    """The error for a secret that does not exist, or is not visible."""
    return NotFound(f"there is no secret {secret_id}")


async def replace(connection: Any, secret_id: str, new_id: str, overlap_s: float) -> asyncpg.Record:
    """Lets a secret expire after an overlap with its replacement; returns its row.

    Raises:
        PostgresUnavailable: the transaction has failed.
    """
    [row] = await fetch(connection, "callback_secrets.replace", secret_id, new_id, overlap_s)
    return row


async def revoke(executor: Any, secret_id: str) -> asyncpg.Record:
    """Revokes a secret: it signs nothing any more, and its ciphertext is removed. Returns its row.

    Raises:
        PostgresUnavailable: the secret may be revoked or not.
    """
    [row] = await fetch(executor, "callback_secrets.revoke", secret_id)
    return row


async def reseal_all(executor: Any, sealer: Sealer) -> int:
    """Encrypts all secrets with the first key that another key encrypted; returns how many.

    Raises:
        UnreadableSecret: one cannot be decrypted; others before it are encrypted again.
        PostgresUnavailable: some are encrypted again; the same call continues.
    """
    after, count = "", 0
    while True:
        rows = await fetch(
            executor, "callback_secrets.sealed_by_other_keys", sealer.current_id, after, _RESEALED_AT_ONCE
        )
        for row in rows:
            identity = stored_in(row).identity
            resealed = sealer.seal(sealer.open(Sealed(row["key_id"], row["sealed"]), identity), identity)
            changed = await fetch(
                executor,
                "callback_secrets.reseal",
                id=row["id"],
                sealed=row["sealed"],
                new_key_id=resealed.key_id,
                new_sealed=resealed.data,
            )
            count += len(changed)
        if len(rows) < _RESEALED_AT_ONCE:
            return count
        after = rows[-1]["id"]


async def of_scopes(executor: Any, scopes: Sequence[Scope]) -> list[asyncpg.Record]:
    """The valid secrets of some scopes, the newest first.

    Raises:
        PostgresUnavailable: no server.
    """
    return await fetch(
        executor,
        "callback_secrets.of_scopes",
        [scope.namespace for scope in scopes],
        [scope.url for scope in scopes],
    )


async def with_targets(executor: Any, namespaces: Sequence[str]) -> set[str]:
    """Those of some namespaces in which a target has a secret of its own.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "callback_secrets.with_targets", list(namespaces))
    return {row["namespace"] for row in rows}


async def public_keys(executor: Any, scope: Scope) -> list[asyncpg.Record]:
    """The valid secrets of a scope and of the wider ones, without the secrets themselves.

    Raises:
        PostgresUnavailable: no server.
    """
    return await fetch(executor, "callback_secrets.public_keys", *scope)


def stored_in(row: asyncpg.Record) -> Stored:
    """The secret of a row with at least its identity and its ciphertext."""
    columns = dict(row)
    return Stored(
        id=row["id"],
        scope=Scope(row["namespace"], row["url"]),
        scheme=Scheme(row["scheme"]),
        sealed=None if row["sealed"] is None else Sealed(row["key_id"], bytes(row["sealed"])),
        reference=columns.get("reference"),
        public_key=columns.get("public_key"),
    )
