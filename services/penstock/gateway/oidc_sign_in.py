"""Sign-in by an OpenID Connect provider: authorization code with PKCE (RFC 7636).

What this module guarantees: a code counts only in the browser that began the sign-in, once, and
with the id token that answers its nonce. The browser is led back to a page of the console only.
It fails closed: an answer that does not fit begins no session, and the console shows the reason.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
import orjson
from yarl import URL

from penstock.core.access import Grant
from penstock.errors import Unavailable
from penstock.gateway.oidc import OidcAuthenticator
from penstock.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

_HOME = "/console/"
_MAX_RETURN = 1_000


class _Refused(Exception):  # noqa: N818 (a reason for the user, which the console shows)
    """The sign-in ends without a session."""


class SignedIn(NamedTuple):
    """How a sign-in has ended.

    Attributes:
        grant: of the user; None if the sign-in was refused.
        return_to: path of the console.
    """

    grant: Grant | None
    return_to: str


class OidcSignIn:
    """Sign-in by the provider.

    Args:
        settings: client id, secret and issuer.
        authenticator: validates its tokens.
    """

    def __init__(self, settings: GatewaySettings, authenticator: OidcAuthenticator) -> None:
        self._client_id = settings.oidc_client_id
        self._client_secret = settings.oidc_client_secret
        self._authenticator = authenticator

    async def begin(self, callback_url: str, return_to: str) -> tuple[str, str]:
        """Begins a sign-in.

        Returns:
            The URL of the provider, and what the browser keeps in a cookie until it is back.

        Raises:
            ProviderUnavailable: the provider does not answer.
        """
        endpoints = await self._authenticator.endpoints()
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        url = URL(endpoints.authorization).update_query(
            response_type="code",
            client_id=self._client_id,
            redirect_uri=callback_url,
            scope="openid profile",
            state=state,
            nonce=nonce,
            code_challenge=challenge,
            code_challenge_method="S256",
        )
        kept = orjson.dumps([state, nonce, verifier, _own_path(return_to)])
        return str(url), base64.urlsafe_b64encode(kept).decode()

    async def end(self, callback_url: str, query: Mapping[str, str], kept: str) -> SignedIn:
        """Ends a sign-in with the provider's answer.

        Args:
            callback_url: the same as at the beginning.
            query: parameters of the provider's answer.
            kept: what the browser has kept.
        """
        try:
            state, nonce, verifier, return_to = orjson.loads(base64.urlsafe_b64decode(kept))
            return_to = _own_path(return_to)
        except (ValueError, TypeError):
            return _refused(_HOME, "this browser has not begun the sign-in, or too long ago: begin again")
        try:
            _require_state(str(state), query)
            return SignedIn(await self._grant(callback_url, query, str(verifier), str(nonce)), return_to)
        except _Refused as refusal:
            return _refused(return_to, str(refusal))

    async def _grant(self, callback_url: str, query: Mapping[str, str], verifier: str, nonce: str) -> Grant:
        """The grant of the user.

        Raises:
            _Refused: there is none.
        """
        if (error := query.get("error")) is not None:
            raise _Refused(f"the provider refused: {error[:200]}")
        try:
            token = await self._exchange(query.get("code", ""), verifier, callback_url)
            grant = await self._authenticator.verify(token, audience=self._client_id, nonce=nonce)
        except (Unavailable, aiohttp.ClientError, TimeoutError, ValueError) as failure:
            log.warning(
                "A sign-in failed at the provider",
                extra={"event": "sign_in_failed", "error": repr(failure)},
            )
            raise _Refused(
                "the provider does not answer as it should: the gateway's log has more"
            ) from failure
        if grant is None:
            raise _Refused("the provider's token is not valid: the gateway's log has more")
        if not grant.roles:
            raise _Refused("your account has no role in Penstock: ask its administrator")
        return grant

    async def _exchange(self, code: str, verifier: str, callback_url: str) -> str:
        """The id token for a code; empty without one.

        Raises:
            ProviderUnavailable: the provider refuses the code.
            aiohttp.ClientError: it does not answer.
        """
        endpoints = await self._authenticator.endpoints()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": callback_url,
            "client_id": self._client_id,
            "code_verifier": verifier,
        }
        if self._client_secret:
            form["client_secret"] = self._client_secret
        answer = await self._authenticator.post_form(endpoints.token, form)
        return str(answer.get("id_token", ""))


def _require_state(state: str, query: Mapping[str, str]) -> None:
    if not hmac.compare_digest(state.encode(), query.get("state", "").encode()):
        raise _Refused("the answer belongs to another sign-in: begin again")


def _own_path(path: object) -> str:
    """The path if it is one of the console, else that of its first screen."""
    if not isinstance(path, str) or not path.startswith(_HOME) or len(path) > _MAX_RETURN:
        return _HOME
    # A browser takes a backslash for a slash, and ends a header at a control character.
    return path if path.isprintable() and "\\" not in path and "//" not in path else _HOME


def _refused(return_to: str, reason: str) -> SignedIn:
    return SignedIn(None, str(URL(return_to).update_query(sign_in_error=reason)))
