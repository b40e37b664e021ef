"""Tokens for SASL/OAUTHBEARER: fetched by client credentials (RFC 6749, 4.4), kept until most of their life is over.

Fails closed: without a token no connection is made. What a token or secret is appears in no error and no log.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import aiohttp
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError, KafkaError

from penstock.settings import Kafka

FETCH_S = 10.0
# Of its life, after which a new one is fetched; Java's clients do the same.
RENEW_AT = 0.8
# When the issuer does not say.
LIFE_S = 60.0
# Connections that fail are tried again every 100 ms; the issuer is not asked so often.
AGAIN_S = 1.0

_REFUSED = (400, 401, 403, 404)


class TokenRefusedError(KafkaError):  # type: ignore[misc]  # aiokafka has no types
    """The issuer does not give this client a token."""


class TokenUnavailableError(KafkaConnectionError):  # type: ignore[misc]  # as above
    """The issuer does not answer."""


class ClientCredentials(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    """Gets tokens for one client.

    Used from several event loops at once (Faust's consumer has one of its own), so it keeps nothing of a loop's; two that
    ask at the same moment both fetch, which harms nobody.

    Args:
        settings: where tokens are issued, and for whom.
        clock: seconds, never going back.
    """

    def __init__(self, settings: Kafka, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._kept: tuple[str, float] | None = None
        self._failed: tuple[KafkaError, float] | None = None

    async def token(self) -> str:
        """A token that has some of its life left.

        Raises:
            TokenRefusedError: the issuer refuses this client.
            TokenUnavailableError: it does not answer.
        """
        now = self._clock()
        if self._kept is not None and now < self._kept[1]:
            return self._kept[0]
        if self._failed is not None and now < self._failed[1]:
            raise self._failed[0]
        try:
            token, life_s = await self._fetch()
        except KafkaError as error:
            self._failed = error, now + AGAIN_S
            raise
        self._kept, self._failed = (token, now + RENEW_AT * life_s), None
        return token

    async def _fetch(self) -> tuple[str, float]:
        settings = self._settings
        url = settings.kafka_token_url
        form = {"grant_type": "client_credentials"}
        if settings.kafka_scope:
            form["scope"] = settings.kafka_scope
        try:
            key = read_secret(settings.kafka_client_secret_file)
            # Encoded first, as RFC 6749, 2.3.1 has it.
            who = aiohttp.encode_basic_auth(quote_plus(settings.kafka_client_id), quote_plus(key))
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FETCH_S)) as session,
                session.post(
                    url,
                    data=form,
                    headers={"Authorization": who, "Accept": "application/json"},
                    ssl=_trust(settings.kafka_ca_file),
                    # The secret goes where the setting says and nowhere else.
                    allow_redirects=False,
                ) as answer,
            ):
                body: Any = None
                if answer.content_type == "application/json":
                    body = await answer.json()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TokenUnavailableError(f"no token: {url} does not answer: {error!r}") from error
        said = body if isinstance(body, dict) else {}
        if status in _REFUSED:
            raise TokenRefusedError(
                f"no token: {url} refuses client {settings.kafka_client_id!r} with status {status}"
                f" ({str(said.get('error_description') or said.get('error') or 'no reason given')[:200]}): "
                "check PENSTOCK_KAFKA_CLIENT_ID, PENSTOCK_KAFKA_CLIENT_SECRET_FILE and PENSTOCK_KAFKA_SCOPE"
            )
        token = said.get("access_token")
        if status != 200 or not isinstance(token, str) or not token:
            raise TokenUnavailableError(f"no token: {url} answers status {status} without an access_token")
        life = said.get("expires_in")
        return token, float(life) if isinstance(life, int | float) and life > 0 else LIFE_S


def _trust(ca_file: str) -> ssl.SSLContext:
    # The system's authorities, and the brokers' as well: who runs a CA of their own runs it for both.
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    return context


def read_secret(file: str) -> str:
    """What a file holds, without the line's end that editors leave.

    Raises:
        OSError: it cannot be read.
    """
    return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
