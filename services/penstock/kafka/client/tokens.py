"""Tokens for SASL/OAUTHBEARER, fetched by client credentials (RFC 6749, 4.4) and cached.

Fails closed: the client makes no connection without a token. No error and no log contains a token
or secret.
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

from penstock.errors import reason_of
from penstock.outgoing_http import LARGE_HEADS, as_given
from penstock.settings import Kafka

FETCH_S = 10.0
# The share of its life after which a new token is fetched; Java's clients do the same.
RENEW_AT = 0.8
# The life of a token if the issuer does not name it.
LIFE_S = 60.0
# Failed connections are retried every 100 ms; the issuer is asked less often.
RETRY_S = 1.0

_REFUSED = (400, 401, 403, 404)


class TokenRefusedError(KafkaError):  # type: ignore[misc]  # aiokafka has no types
    """The issuer refuses this client a token."""


class TokenUnavailableError(KafkaConnectionError):  # type: ignore[misc]  # as above
    """The issuer does not answer."""


class ClientCredentials(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    """Gets tokens for one client.

    Several event loops use it (Faust's consumer has one of its own), so it keeps no object of a
    loop. Two concurrent calls may both fetch a token, which is harmless.

    Args:
        settings: where tokens are issued, and for whom.
        clock: monotonic seconds.
    """

    def __init__(self, settings: Kafka, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._cached: tuple[str, float] | None = None
        self._failed: tuple[KafkaError, float] | None = None

    async def token(self) -> str:
        """A token that is still valid.

        Raises:
            TokenRefusedError: the issuer refuses this client.
            TokenUnavailableError: it does not answer.
        """
        now = self._clock()
        if self._cached is not None and now < self._cached[1]:
            return self._cached[0]
        if self._failed is not None and now < self._failed[1]:
            raise self._failed[0]
        try:
            token, life_s = await self._fetch()
        except KafkaError as error:
            self._failed = error, now + RETRY_S
            raise
        self._cached, self._failed = (token, now + RENEW_AT * life_s), None
        return token

    async def _fetch(self) -> tuple[str, float]:
        settings = self._settings
        url = settings.kafka_token_url
        form = {"grant_type": "client_credentials"}
        if settings.kafka_scope:
            form["scope"] = settings.kafka_scope
        try:
            secret = read_secret(settings.kafka_client_secret_file)
        except (OSError, ValueError) as error:
            raise TokenUnavailableError(
                f"no token: PENSTOCK_KAFKA_CLIENT_SECRET_FILE={settings.kafka_client_secret_file} cannot be read: "
                f"{error}"
            ) from error
        try:
            # Id and secret are encoded first, as RFC 6749, 2.3.1 requires.
            credentials = aiohttp.encode_basic_auth(quote_plus(settings.kafka_client_id), quote_plus(secret))
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FETCH_S), **LARGE_HEADS) as session,
                session.post(
                    as_given(url),
                    data=form,
                    headers={"Authorization": credentials, "Accept": "application/json"},
                    ssl=_trust(settings.kafka_ca_file),
                    # A redirect must not send the secret to another server.
                    allow_redirects=False,
                ) as answer,
            ):
                body: Any = None
                if answer.content_type == "application/json":
                    body = await answer.json()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TokenUnavailableError(f"no token: {url} does not answer: {reason_of(error)}") from error
        reply = body if isinstance(body, dict) else {}
        if status in _REFUSED:
            raise TokenRefusedError(
                f"no token: {url} refuses client {settings.kafka_client_id!r} with status {status}"
                f" ({str(reply.get('error_description') or reply.get('error') or 'no reason given')[:200]}): "
                "check PENSTOCK_KAFKA_CLIENT_ID, PENSTOCK_KAFKA_CLIENT_SECRET_FILE and PENSTOCK_KAFKA_SCOPE"
            )
        token = reply.get("access_token")
        if status != 200 or not isinstance(token, str) or not token:
            raise TokenUnavailableError(f"no token: {url} answers status {status} without an access_token")
        life = reply.get("expires_in")
        return token, float(life) if isinstance(life, int | float) and life > 0 else LIFE_S


def _trust(ca_file: str) -> ssl.SSLContext:
    # Trusts the system's authorities and the brokers': a private CA usually signs brokers and
    # issuer.
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    return context


def read_secret(file: str) -> str:
    """The content of a file, without the newline that editors append.

    Raises:
        OSError: it cannot be read.
    """
    return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
