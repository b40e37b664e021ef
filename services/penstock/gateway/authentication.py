"""Wiring of who may ask: keys, tokens, allowances and the audit, as the settings have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, Self

import asyncpg

from penstock import metrics, process
from penstock.errors import PostgresUnavailable
from penstock.gateway.access import WHY, ByKey, Gate, Recogniser
from penstock.gateway.audit import Audit
from penstock.gateway.oidc import ByToken
from penstock.gateway.settings import GatewaySettings
from penstock.metrics import Sample
from penstock.postgres.api_keys import KnownKeys
from penstock.postgres.types import KnownTypes

log = logging.getLogger(__name__)


class Access:
    """All of it, for the time of an `async with` block; nothing where PENSTOCK_GATEWAY_AUTH is off.

    Args:
        settings: of the gateway.
        pool: of the database.
        known: which types there are.
    """

    def __init__(
        self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record], known: KnownTypes
    ) -> None:
        kinds = settings.auth_kinds
        self._keys = KnownKeys(settings.sessions, pool) if "keys" in kinds else None
        self._tokens = ByToken(settings) if "oidc" in kinds else None
        recognisers: list[Recogniser] = []
        if self._keys is not None:
            recognisers.append(ByKey(self._keys))
        if self._tokens is not None:
            recognisers.append(self._tokens)
        self._audit = Audit(pool, settings.gateway_audit_days) if kinds else None
        self._gate = (
            Gate(recognisers, known, settings.gateway_key_rate, self._audit.require_room)
            if self._audit
            else None
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._keys is not None:
            # The first request already is to be judged by them.
            await self._keys.load()
        if self._tokens is not None:
            await self._stack.enter_async_context(self._tokens)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        if self._audit is not None:
            try:
                await self._audit.write()
            except PostgresUnavailable as error:
                log.warning("the end of the audit is lost: %s", error)

    def around(self, told: Any, *others: Any) -> list[Any]:
        """All middlewares, the outermost first.

        Args:
            told: turns errors into answers; the audit is around it, to see them.
            others: what is refused to everybody.
        """
        if self._audit is None or self._gate is None:
            return [told, *others]
        return [self._audit.middleware, told, *others, self._gate.middleware]

    def samples(self) -> Iterator[Sample]:
        """What is to be told of it (`penstock.metrics`)."""
        if self._gate is not None:
            return self._gate.samples()
        # Nobody is asked, so nobody is refused: the same names for dashboards, whatever the settings.
        return iter([Sample(metrics.GATEWAY_REFUSED, 0, (why,)) for why in WHY])

    async def run(self) -> None:
        """Keeps the keys fresh and writes the audit, until cancelled."""
        if self._audit is None:
            await asyncio.Event().wait()
            return
        if self._keys is None:
            await self._audit.run()
            return
        await process.leading(self._audit.run(), self._keys.run())
