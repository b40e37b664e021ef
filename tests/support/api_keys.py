"""API keys for tests: made in the database, as `penstock keys` makes them."""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import asyncpg

from penstock.core.access import SECRET_BYTES, Role, digest_of, token_of
from penstock.postgres import api_keys
from penstock.postgres.connection import connect
from tests.support.gateways import Caller, running_gateway
from tests.support.waiting import wait_until


async def make_key(
    dsn: str,
    role: Role | str,
    namespaces: Collection[str] | None = None,
    *,
    expires_at: datetime | None = None,
    rate: float | None = None,
) -> tuple[str, str]:
    """Makes an API key; returns its id and its token."""
    key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(SECRET_BYTES)
    connection: asyncpg.Connection[asyncpg.Record] = await connect(dsn, "test")
    try:
        await api_keys.create(
            connection,
            key_id=key_id,
            digest=digest_of(secret),
            name="test",
            role=Role(role),
            namespaces=namespaces,
            rate=rate,
            expires_at=expires_at,
        )
    finally:
        await connection.close()
    return key_id, token_of(key_id, secret)


@asynccontextmanager
async def gateway_with_keys(kafka: str, prefix: str, dsn: str, objects: Path) -> AsyncIterator[Caller]:
    """Runs a gateway that requires API keys, without rate limits, until it is ready."""
    async with running_gateway(
        kafka=kafka,
        prefix=prefix,
        postgres=dsn,
        objects=f"file://{objects}",
        gateway_auth="keys",
        gateway_key_rate=0.0,
        encryption_keys=(base64.b64encode(b"k" * 32).decode(),),
    ) as caller:
        await wait_until(caller.is_ready)
        yield caller


def sent(token: str) -> dict[str, str]:
    """Returns the headers that carry the token."""
    return {"Authorization": f"Bearer {token}"}
