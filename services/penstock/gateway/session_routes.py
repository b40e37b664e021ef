"""Routes of sign-in: by API key, or by the OpenID Connect provider (`gateway.oidc_sign_in`)."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Any

from aiohttp import web

from penstock.core.access import UNRESTRICTED, Action, Grant
from penstock.core.hosts import is_loopback
from penstock.core.token_bucket import TokenBucket
from penstock.errors import Forbidden, Throttled, Unauthenticated
from penstock.gateway.access import GRANT
from penstock.gateway.bodies import read_document
from penstock.gateway.oidc_sign_in import OidcSignIn
from penstock.gateway.sessions import (
    ABSOLUTE_S,
    COOKIE,
    ConsoleSession,
    Sessions,
    csrf_token,
    require_own_page,
)
from penstock.http.server import refuse_unknown_parameters, respond
from penstock.postgres.api_keys import ApiKeyCache

log = logging.getLogger(__name__)

# Sign-ins a second of one address, and at once after a pause.
# Behind a proxy all users have the address of the proxy.
_RATE = 10.0
_BURST_S = 5.0
_MAX_ADDRESSES = 10_000
_STATE_COOKIE = "__Host-penstock-sign-in"
_STATE_S = 600


class SessionRoutes:
    """The routes of sign-in.

    Args:
        sessions: None when authentication is off.
        api_keys: the valid API keys; None when they are not accepted.
        oidc: sign-in by the provider; None without one.
    """

    def __init__(
        self, sessions: Sessions | None, api_keys: ApiKeyCache | None, oidc: OidcSignIn | None
    ) -> None:
        self._sessions = sessions
        self._api_keys = api_keys
        self._oidc = oidc
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/session", self.get, allow_head=False),
            web.post("/session", self.sign_in),
            web.delete("/session", self.sign_out),
            web.get("/session/oidc", self.begin_oidc, allow_head=False),
            web.get("/session/oidc/callback", self.end_oidc, allow_head=False),
        ]

    async def get(self, request: web.Request) -> web.Response:
        """GET /session: who the console's user is."""
        refuse_unknown_parameters(request)
        if self._sessions is None:
            return respond(_document("off", UNRESTRICTED))
        token = request.cookies.get(COOKIE)
        session = await self._sessions.find(token, request.remote) if token else None
        if token is None or session is None:
            return respond(self._signed_out())
        require_own_page(request)
        return respond(self._signed_in(token, session))

    async def sign_in(self, request: web.Request) -> web.Response:
        """POST /session: exchanges an API key for a session."""
        require_own_page(request)
        self._require_rate(request)
        body = await read_document(request, "SignIn")
        if self._sessions is None:
            return respond(_document("off", UNRESTRICTED))
        api_key = body["api_key"]
        grant = None
        if self._api_keys is not None and self._api_keys.accepts(api_key):
            grant = await self._api_keys.authenticate(api_key)
        if grant is None:
            log.warning(
                "A sign-in had no valid API key",
                extra={"event": "sign_in_refused", "remote": request.remote},
            )
            raise Unauthenticated("this API key is not valid, has expired or was revoked: use another")
        token, session = await self._begin(request, grant)
        response = respond(self._signed_in(token, session))
        _set_cookie(response, COOKIE, token, ABSOLUTE_S, same_site="Strict")
        return response

    async def sign_out(self, request: web.Request) -> web.Response:
        """DELETE /session."""
        refuse_unknown_parameters(request)
        token = request.cookies.get(COOKIE)
        if self._sessions is not None and token:
            grant = await self._sessions.authenticate(request)
            if grant is not None:
                request[GRANT] = grant
            await self._sessions.end(token)
        response = respond(self._signed_out() if self._sessions else _document("off", UNRESTRICTED))
        _set_cookie(response, COOKIE, "", 0, same_site="Strict")
        return response

    async def begin_oidc(self, request: web.Request) -> web.Response:
        """GET /session/oidc: leads to the provider."""
        oidc = self._require_oidc()
        self._require_rate(request)
        url, state = await oidc.begin(_callback_url(request), request.query.get("return", ""))
        response = web.Response(status=302, headers={"Location": url})
        # The provider's page leads back, so a strict cookie would not be sent.
        _set_cookie(response, _STATE_COOKIE, state, _STATE_S, same_site="Lax")
        return response

    async def end_oidc(self, request: web.Request) -> web.Response:
        """GET /session/oidc/callback: the provider's answer."""
        oidc = self._require_oidc()
        found = await oidc.end(_callback_url(request), request.query, request.cookies.get(_STATE_COOKIE, ""))
        response = web.Response(status=302, headers={"Location": found.return_to})
        if found.grant is not None:
            token, _ = await self._begin(request, found.grant)
            _set_cookie(response, COOKIE, token, ABSOLUTE_S, same_site="Strict")
        _set_cookie(response, _STATE_COOKIE, "", 0, same_site="Lax")
        return response

    async def _begin(self, request: web.Request, grant: Grant) -> tuple[str, ConsoleSession]:
        assert self._sessions is not None
        # A session is never taken over from before a sign-in: its token might be another's.
        if before := request.cookies.get(COOKIE):
            await self._sessions.end(before)
        # For the audit.
        request[GRANT] = grant
        return await self._sessions.begin(grant)

    def _require_oidc(self) -> OidcSignIn:
        if self._sessions is None or self._oidc is None:
            raise Forbidden(
                "no sign-in by a provider: set PENSTOCK_GATEWAY_AUTH=oidc and PENSTOCK_OIDC_CLIENT_ID"
            )
        return self._oidc

    def _require_rate(self, request: web.Request) -> None:
        now_s, address = time.monotonic(), request.remote or ""
        bucket = self._buckets.pop(address, None) or TokenBucket(_RATE, now_s, capacity_s=_BURST_S, full=True)
        self._buckets[address] = bucket
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        if not bucket.available(now_s):
            raise Throttled("too many sign-ins from this address", retry_after_s=bucket.wait_s())
        bucket.take()

    @property
    def _methods(self) -> list[str]:
        given = {"keys": self._api_keys, "oidc": self._oidc}
        return [name for name, part in given.items() if part is not None]

    def _signed_out(self) -> dict[str, Any]:
        return {**_document("on", None), "methods": self._methods}

    def _signed_in(self, token: str, session: ConsoleSession) -> dict[str, Any]:
        return {
            **_document("on", session.grant),
            "methods": self._methods,
            "csrf": csrf_token(token),
            "expires_at": session.expires_at,
        }


def _document(authentication: str, grant: Grant | None) -> dict[str, Any]:
    namespaces = grant.namespaces if grant is not None else frozenset()
    return {
        "authentication": authentication,
        "signed_in": authentication == "on" and grant is not None,
        "actor": grant.actor or None if grant is not None else None,
        "roles": sorted(grant.roles) if grant is not None else [],
        "actions": [action.value for action in Action if grant is not None and grant.allows(action)],
        "namespaces": None if namespaces is None else sorted(namespaces),
        "csrf": None,
        "methods": [],
        "expires_at": None,
    }


def _callback_url(request: web.Request) -> str:
    # The host is one of the allowed ones (`http.listener`). Sign-in needs HTTPS but on loopback,
    # because browsers refuse the cookie without it.
    scheme = "http" if is_loopback(request.url.host or "") else "https"
    return f"{scheme}://{request.host}/session/oidc/callback"


def _set_cookie(response: web.Response, name: str, value: str, age_s: int, *, same_site: str) -> None:
    response.set_cookie(name, value, max_age=age_s, path="/", secure=True, httponly=True, samesite=same_site)
