"""Authenticates bearer tokens of an OpenID Connect provider by the keys that it publishes.

What this module guarantees: a token is valid only when its issuer, audience and times are right and
a key that the issuer publishes has signed it. Only asymmetric algorithms are accepted, regardless
of the token's header. The keys are fetched every `KEY_REFRESH_S`, and when a token names an unknown
key, at most every `KEY_RETRY_S`. It fails closed: while the provider is unavailable, the last keys
are valid for `KEY_TRUST_S`, and then no token is valid.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import aiohttp
import jwt
import orjson

from penstock.core.access import Grant, map_roles, parse_namespaces, storable
from penstock.errors import Unavailable
from penstock.gateway.settings import GatewaySettings
from penstock.outgoing_http import LARGE_HEADS, as_given

log = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")

KEY_REFRESH_S = 300.0
KEY_RETRY_S = 10.0
KEY_TRUST_S = 3600.0
# Tolerated difference between the clocks of the provider and the gateway.
LEEWAY_S = 30
_TIMEOUT_S = 5.0
_MAX_DOCUMENT_BYTES = 1_000_000
# Checking a signature takes longer than answering a request, so valid tokens are cached until they
# expire.
_MAX_CACHED_TOKENS = 5_000
_MAX_TOKEN_LENGTH = 16_384


class ProviderUnavailable(Unavailable):
    """The keys of the OpenID Connect provider cannot be fetched."""


class Endpoints(NamedTuple):
    """Addresses of the provider for sign-in."""

    authorization: str
    token: str


class OidcAuthenticator:
    """Authenticates tokens, for the time of an `async with` block.

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
        self._fetched_s = self._tried_s = float("-inf")
        self._fetching = asyncio.Lock()
        # By digest of the token: its grant, and when it expires on the monotonic clock.
        self._cache: OrderedDict[bytes, tuple[Grant, float]] = OrderedDict()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), **LARGE_HEADS)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def accepts(self, token: str) -> bool:
        """Whether a token has the form of a JSON Web Token: three parts."""
        return token.isascii() and token.count(".") == 2 and len(token) <= _MAX_TOKEN_LENGTH

    async def authenticate(self, token: str) -> Grant | None:
        """The grant of a token; None when the token is not valid.

        Raises:
            ProviderUnavailable: the provider's keys are unknown or too old.
        """
        key = await self._key_of(token)
        if key is None:
            return None
        digest = hashlib.sha256(token.encode()).digest()
        cached = self._cache.get(digest)
        if cached is not None and cached[1] > time.monotonic():
            return cached[0]
        claims = self._claims(token, key, self._audience)
        if claims is None:
            return None
        grant = self._grant(claims)
        self._cache[digest] = (grant, time.monotonic() + self._remaining_s(claims))
        if len(self._cache) > _MAX_CACHED_TOKENS:
            self._cache.popitem(last=False)
        return grant

    async def verify(self, token: str, *, audience: str, nonce: str) -> Grant | None:
        """The grant of an id token that answers a sign-in; None when the token is not valid.

        Raises:
            ProviderUnavailable: the provider's keys are unknown or too old.
        """
        key = await self._key_of(token) if self.accepts(token) else None
        claims = self._claims(token, key, audience) if key is not None else None
        if claims is None or claims.get("nonce") != nonce:
            return None
        # A token for several audiences names the one that it was issued to.
        if claims.get("azp", audience) != audience:
            return None
        return self._grant(claims)

    async def endpoints(self) -> Endpoints:
        """The addresses for sign-in, as the provider publishes them.

        Raises:
            ProviderUnavailable: the provider does not answer, or publishes none.
        """
        try:
            configuration = await self._configuration()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ProviderUnavailable(f"{self._issuer} does not answer: {error!r}") from error
        found = [configuration.get(name) for name in ("authorization_endpoint", "token_endpoint")]
        if not all(isinstance(url, str) and url for url in found):
            raise ProviderUnavailable(f"{self._issuer} publishes no endpoints for sign-in")
        return Endpoints(*map(str, found))

    async def post_form(self, url: str, form: Mapping[str, str]) -> dict[str, Any]:
        """The provider's answer to a form.

        Raises:
            ProviderUnavailable: it refuses the form, or answers no JSON object.
            aiohttp.ClientError: it does not answer.
        """
        assert self._session is not None, "use it in a `with` block"
        async with self._session.post(as_given(url), data=form, allow_redirects=False) as response:
            return await _read_json(url, response)

    async def _key_of(self, token: str) -> jwt.PyJWK | None:
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError:
            return None
        key = await self._key(header.get("kid"))
        return key if header.get("alg") in ALGORITHMS else None

    def _claims(self, token: str, key: jwt.PyJWK, audience: str) -> Mapping[str, Any] | None:
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name] if key.algorithm_name in ALGORITHMS else [],
                audience=audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWTError, ValueError) as error:
            log.info("Refused a bearer token", extra={"event": "bearer_token_refused", "error": error})
            return None
        return claims if claims["sub"] else None

    @staticmethod
    def _remaining_s(claims: Mapping[str, Any]) -> float:
        # `jwt.decode` uses the wall clock, too. A withdrawn key takes effect after KEY_REFRESH_S at
        # most.
        return min(KEY_REFRESH_S, float(claims["exp"]) - time.time())

    def _grant(self, claims: Mapping[str, Any]) -> Grant:
        # A missing or invalid claim gives no role and no namespace.
        roles = map_roles(_words(claims, self._role_claim), self._roles)
        names = _words(claims, self._namespace_claim)
        try:
            namespaces = parse_namespaces(names) if names else frozenset()
        except ValueError as error:
            log.info(
                "A bearer token has invalid namespaces; it permits none",
                extra={"event": "token_namespaces_refused", "error": error},
            )
            namespaces = frozenset()
        subject = storable(str(claims["sub"])[:200])
        return Grant(f"oidc:{subject}", roles, namespaces)

    async def _key(self, key_id: Any) -> jwt.PyJWK | None:
        now_s = time.monotonic()
        outdated = now_s - self._fetched_s > KEY_REFRESH_S
        # A fetch that another request has started serves this request as well.
        if (outdated or self._find(key_id) is None) and (
            self._fetching.locked() or now_s - self._tried_s > KEY_RETRY_S
        ):
            await self._fetch_keys()
        if time.monotonic() - self._fetched_s > KEY_TRUST_S:
            raise ProviderUnavailable(
                f"the keys of {self._issuer} cannot be fetched: no token is accepted until they can"
            )
        return self._find(key_id)

    def _find(self, key_id: Any) -> jwt.PyJWK | None:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id) if isinstance(key_id, str) else None

    async def _fetch_keys(self) -> None:
        async with self._fetching:
            if time.monotonic() - self._tried_s <= KEY_RETRY_S:
                # Another request has just fetched them.
                return
            self._tried_s = time.monotonic()
            try:
                self._keys = _signing_keys(await self._fetch_json(await self._jwks_url()))
            except (aiohttp.ClientError, TimeoutError, ValueError, ProviderUnavailable) as error:
                log.warning(
                    "The keys of the OpenID Connect provider cannot be fetched",
                    extra={"event": "oidc_keys_unavailable", "issuer": self._issuer, "error": repr(error)},
                )
                return
            # A token that a withdrawn key has signed is no longer valid.
            self._cache.clear()
            self._fetched_s = time.monotonic()

    async def _jwks_url(self) -> str:
        return str((await self._configuration()).get("jwks_uri"))

    async def _configuration(self) -> dict[str, Any]:
        configuration = await self._fetch_json(self._issuer.rstrip("/") + "/.well-known/openid-configuration")
        if configuration.get("issuer") != self._issuer:
            raise ProviderUnavailable(f"its configuration names the issuer {configuration.get('issuer')!r}")
        return configuration

    async def _fetch_json(self, url: str) -> dict[str, Any]:
        assert self._session is not None, "use it in a `with` block"
        # A redirect would move trust to another server than the one in the settings.
        async with self._session.get(as_given(url), allow_redirects=False) as response:
            return await _read_json(url, response)


async def _read_json(url: str, response: aiohttp.ClientResponse) -> dict[str, Any]:
    if response.status != 200:
        raise ProviderUnavailable(f"{url} answers {response.status}")
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > _MAX_DOCUMENT_BYTES:
            raise ProviderUnavailable(f"{url} answers more than {_MAX_DOCUMENT_BYTES:,} bytes")
    document = orjson.loads(data)
    if not isinstance(document, dict):
        raise ProviderUnavailable(f"{url} is no JSON object")
    return document


def _signing_keys(document: Mapping[str, Any]) -> dict[str, jwt.PyJWK]:
    """The keys for signatures with a supported algorithm, by id."""
    keys = {}
    for raw in document.get("keys") or ():
        try:
            key = jwt.PyJWK(raw)
        except (jwt.PyJWTError, TypeError, ValueError):
            # A key set may have keys of unknown types, for other readers.
            continue
        if key.algorithm_name in ALGORITHMS and key.public_key_use in (None, "sig"):
            keys[key.key_id or ""] = key
    return keys


def _words(claims: Mapping[str, Any], path: str) -> list[str]:
    """The words of a claim: a list of strings, or one string with spaces.

    Args:
        claims: the claims of a token.
        path: name of the claim; dots lead into objects.
    """
    value: Any = claims.get(path)
    if value is None:
        value = claims
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value.split()
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []
