"""Wires authentication: API keys, tokens, rate limits and the audit, according to the settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, Self

import asyncpg
from aiohttp import web

from penstock import metrics, process
from penstock.errors import PostgresUnavailable
from penstock.gateway.access import (
    REFUSAL_CAUSES,
    Authenticator,
    AuthMiddleware,
)
from penstock.gateway.audit import RequestAudit
from penstock.gateway.oidc import OidcAuthenticator
from penstock.gateway.oidc_sign_in import OidcSignIn
from penstock.gateway.session_routes import SessionRoutes
from penstock.gateway.sessions import Sessions
from penstock.gateway.settings import GatewaySettings
from penstock.metrics import Sample
from penstock.postgres.api_keys import ApiKeyCache
from penstock.postgres.types import TypeCache

log = logging.getLogger(__name__)


class Authentication:
    """The parts of authentication, for the time of an `async with` block.

    There are none when PENSTOCK_GATEWAY_AUTH is off.

    Args:
        settings: of the gateway.
        pool: the database.
        types: the registered types.

    Attributes:
        session_routes: sign-in to the console.
    """

    def __init__(
        self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record], types: TypeCache
    ) -> None:
        kinds = settings.auth_kinds
        self._api_keys = ApiKeyCache(settings.sessions, pool) if "keys" in kinds else None
        self._oidc = OidcAuthenticator(settings) if "oidc" in kinds else None
        given: tuple[Authenticator | None, ...] = (self._api_keys, self._oidc)
        authenticators = [each for each in given if each is not None]
        self._audit = RequestAudit(pool, settings.gateway_audit_days) if kinds else None
        self._sessions = (
            Sessions(pool, self._api_keys, settings.oidc_issuer if self._oidc else "") if kinds else None
        )
        sign_in = OidcSignIn(settings, self._oidc) if self._oidc and settings.oidc_client_id else None
        self.session_routes = SessionRoutes(self._sessions, self._api_keys, sign_in)
        self._auth = (
            AuthMiddleware(
                authenticators, types, settings.gateway_key_rate, self._audit.require_room, self._sessions
            )
            if self._audit and self._sessions
            else None
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._api_keys is not None:
            # Before the gateway listens, so that its first request can be authenticated.
            await self._api_keys.load()
        if self._oidc is not None:
            await self._stack.enter_async_context(self._oidc)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        if self._audit is not None:
            try:
                await self._audit.write()
            except PostgresUnavailable as error:
                log.warning(
                    "The last entries of the audit are lost", extra={"event": "audit_lost", "error": error}
                )

    def middlewares(self, problem_middleware: Any, *others: Any) -> list[Any]:
        """All middlewares, the outermost first.

        Args:
            problem_middleware: turns errors into responses; the audit is outside, so that it sees
                the status.
            others: middlewares that do not depend on the grant.
        """
        if self._audit is None or self._auth is None:
            return [problem_middleware, *others]
        return [self._audit.middleware, problem_middleware, *others, self._auth.middleware]

    async def is_valid(self, request: web.Request) -> bool:
        """Whether the credentials of a long request still give the same rights."""
        return self._auth is None or await self._auth.is_valid(request)

    def samples(self) -> Iterator[Sample]:
        """Its metrics (`penstock.metrics`); the same names with and without authentication."""
        if self._auth is not None:
            return self._auth.samples()
        return iter([Sample(metrics.GATEWAY_REFUSED, 0, (cause,)) for cause in REFUSAL_CAUSES])

    async def run(self) -> None:
        """Refreshes the API keys, writes the audit and removes ended sessions, until cancelled."""
        parts = [part.run() for part in (self._api_keys, self._sessions) if part is not None]
        if self._audit is None:
            await asyncio.Event().wait()
            return
        await process.run_with_background(self._audit.run(), *parts)
