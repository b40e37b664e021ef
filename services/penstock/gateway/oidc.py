"""Bearer tokens of an OpenID Connect provider: who sent them, by the provider's published keys.

What this module guarantees: only tokens of the issuer, for the audience, within their time and signed by a key that the issuer
publishes now are taken; and only with an asymmetric algorithm, whatever the token says of itself. The keys are read again
every `KEYS_S`, and when a token names one that is not among them, at most every `AGAIN_S`. It fails closed: while
the provider does not answer, the keys last read hold for `TRUST_S`, and after that no token does.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Self

import aiohttp
import jwt
import orjson

from penstock.core.access import Grant, namespaces_in, roles_in, storable
from penstock.errors import Unavailable
from penstock.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")

KEYS_S = 300.0
AGAIN_S = 10.0
TRUST_S = 3600.0
# Clocks of others.
LEEWAY_S = 30
_ANSWER_S = 5.0
_MOST_BYTES = 1_000_000
# A signature takes longer to check than a request to answer: tokens that were found good are remembered until they end.
_REMEMBERED = 5_000
_LONGEST_TOKEN = 16_384


class ProviderUnavailable(Unavailable):
    """The provider does not tell its keys."""


class ByToken:
    """Recognises tokens, for the time of an `async with` block.

    Args:
        settings: issuer, audience and claims.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._issuer = settings.oidc_issuer
        self._audience = settings.oidc_audience
        self._role_claim = settings.oidc_role_claim
        self._namespace_claim = settings.oidc_namespace_claim
        self._roles = settings.oidc_role_names
        self._session: aiohttp.ClientSession | None = None
        self._keys: dict[str, jwt.PyJWK] = {}
        self._read_s = self._tried_s = float("-inf")
        self._reading = asyncio.Lock()
        # By digest: the grant, and when the token ends.
        self._good: OrderedDict[bytes, tuple[Grant, float]] = OrderedDict()

    async def __aenter__(self) -> Self:
        # A provider that sends its readers elsewhere is not the one that was named.
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def takes(self, token: str) -> bool:
        """Whether it looks like one: three parts."""
        return token.isascii() and token.count(".") == 2 and len(token) <= _LONGEST_TOKEN

    async def recognise(self, token: str) -> Grant | None:
        """What its subject may do; None when it is not good.

        Raises:
            ProviderUnavailable: its keys are not known, or not lately enough.
        """
        digest = hashlib.sha256(token.encode()).digest()
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError:
            return None
        key = await self._key(header.get("kid"))
        if key is None or header.get("alg") not in ALGORITHMS:
            return None
        remembered = self._good.get(digest)
        if remembered is not None and remembered[1] > _now_s():
            return remembered[0]
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name] if key.algorithm_name in ALGORITHMS else [],
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWTError, ValueError) as error:
            log.info("a bearer token is refused: %s", error)
            return None
        if not claims["sub"]:
            return None
        grant = self._grant(claims)
        self._good[digest] = (grant, _now_s() + self._left_s(claims))
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)
        return grant

    @staticmethod
    def _left_s(claims: Mapping[str, Any]) -> float:
        # By the clock that `jwt.decode` has judged it by, and no longer than the keys are believed.
        return min(KEYS_S, float(claims["exp"]) - time.time())

    def _grant(self, claims: Mapping[str, Any]) -> Grant:
        # A claim that is not there, or makes no sense, gives nothing.
        roles = roles_in(_words(claims, self._role_claim), self._roles)
        words = _words(claims, self._namespace_claim)
        try:
            namespaces = namespaces_in([*words]) if words else frozenset()
        except ValueError as error:
            log.info("the namespaces of a bearer token make no sense: %s", error)
            namespaces = frozenset()
        subject = storable(str(claims["sub"])[:200])
        return Grant(f"oidc:{subject}", roles, namespaces)

    async def _key(self, name: Any) -> jwt.PyJWK | None:
        now_s = _now_s()
        old = now_s - self._read_s > KEYS_S
        # Also while another request's read is under way: what it brings is for all.
        if (old or self._find(name) is None) and (self._reading.locked() or now_s - self._tried_s > AGAIN_S):
            await self._read()
        if _now_s() - self._read_s > TRUST_S:
            raise ProviderUnavailable(
                f"{self._issuer} does not tell its keys: no token is accepted until it does"
            )
        return self._find(name)

    def _find(self, name: Any) -> jwt.PyJWK | None:
        if name is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(name) if isinstance(name, str) else None

    async def _read(self) -> None:
        async with self._reading:
            if _now_s() - self._tried_s <= AGAIN_S:
                # Somebody else has, meanwhile.
                return
            self._tried_s = _now_s()
            try:
                self._keys = _keys_in(await self._document(await self._address()))
            except (aiohttp.ClientError, TimeoutError, ValueError, ProviderUnavailable) as error:
                log.warning("the keys of %s cannot be read: %s", self._issuer, repr(error))
                return
            # What was signed by a key that is gone must not be remembered.
            self._good.clear()
            self._read_s = _now_s()

    async def _address(self) -> str:
        told = await self._document(self._issuer.rstrip("/") + "/.well-known/openid-configuration")
        if told.get("issuer") != self._issuer:
            raise ProviderUnavailable(f"it calls itself {told.get('issuer')!r}")
        return str(told.get("jwks_uri"))

    async def _document(self, url: str) -> dict[str, Any]:
        assert self._session is not None, "use it in a `with` block"
        async with self._session.get(url, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ProviderUnavailable(f"{url} answers {answer.status}")
            data = bytearray()
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > _MOST_BYTES:
                    raise ProviderUnavailable(f"{url} answers more than {_MOST_BYTES:,} bytes")
        found = orjson.loads(data)
        if not isinstance(found, dict):
            raise ProviderUnavailable(f"{url} is no JSON object")
        return found


def _keys_in(document: Mapping[str, Any]) -> dict[str, jwt.PyJWK]:
    """The keys for signatures that are understood, by name."""
    found = {}
    for raw in document.get("keys") or ():
        try:
            key = jwt.PyJWK(raw)
        except (jwt.PyJWTError, TypeError, ValueError):
            # Of a kind that we do not know, which others may.
            continue
        if key.algorithm_name in ALGORITHMS and key.public_key_use in (None, "sig"):
            found[key.key_id or ""] = key
    return found


def _words(claims: Mapping[str, Any], path: str) -> list[str]:
    """The words of a claim, by a path with dots: a list of them, or a text with blanks between."""
    value: Any = claims.get(path)
    if value is None:
        value = claims
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value.split()
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _now_s() -> float:
    return asyncio.get_running_loop().time()
