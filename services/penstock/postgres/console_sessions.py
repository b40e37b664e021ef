"""Rows of the console's sessions. A row has the digest of a token, never the token."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import asyncpg

from penstock.postgres.queries import execute, fetchrow, fetchval


async def create(
    executor: Any,
    *,
    digest: bytes,
    key_id: str | None,
    issuer: str | None,
    actor: str,
    roles: Collection[str],
    namespaces: Collection[str] | None,
) -> datetime:
    """Inserts a session, and returns when it ends at the latest.

    Args:
        executor: of the database.
        digest: SHA-256 of its token.
        key_id: the API key that begins it, whose rights it has; None for a provider's token.
        issuer: the provider whose token begins it; None for an API key.
        actor: as the audit names it.
        roles: by the provider's token.
        namespaces: by the provider's token; None is all.

    Raises:
        PostgresUnavailable: the session may be inserted or not.
    """
    at: datetime = await fetchval(
        executor,
        "console_sessions.create",
        digest=digest,
        key_id=key_id,
        issuer=issuer,
        actor=actor,
        roles=sorted(roles),
        namespaces=None if namespaces is None else sorted(namespaces),
    )
    return at


async def find(executor: Any, digest: bytes) -> asyncpg.Record | None:
    """A session that has not ended; None without one.

    Raises:
        PostgresUnavailable: no server.
    """
    row: asyncpg.Record | None = await fetchrow(executor, "console_sessions.find", digest)
    return row


async def delete(executor: Any, digest: bytes) -> None:
    """Ends a session.

    Raises:
        PostgresUnavailable: it may have ended or not.
    """
    await execute(executor, "console_sessions.delete", digest)


async def prune(executor: Any) -> None:
    """Removes sessions that have ended.

    Raises:
        PostgresUnavailable: no server.
    """
    await execute(executor, "console_sessions.prune")
