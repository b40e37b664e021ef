"""Authentication and authorization of requests, before a body is read.

What this module guarantees: with PENSTOCK_GATEWAY_AUTH set, every route that is not open needs a
valid API key or token whose role permits its action (`gateway.rules`). It fails closed: a token
that cannot be checked is answered 503. A request that is limited to namespaces carries the types
that it may see.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock import metrics
from penstock.core.access import UNRESTRICTED, Action, Grant
from penstock.core.token_bucket import TokenBucket
from penstock.errors import Forbidden, Throttled, Unauthenticated, Unavailable
from penstock.gateway.rules import RULES, route_of
from penstock.metrics import Sample
from penstock.postgres.types import TypeCache

GRANT = web.RequestKey("grant", Grant)
_VISIBLE_TYPES = web.RequestKey("visible_types", list)

# Most actors with a rate limit in memory. Beyond them, the gateway forgets the actor that has been
# idle longest, which may then burst again.
_MAX_BUCKETS = 10_000
# An actor that was idle may send the requests of this many seconds at once.
_BURST_S = 2.0

# Values of the metric's label.
REFUSAL_CAUSES = ("nobody", "unknown", "role", "rate", "unavailable")


class Authenticator(Protocol):
    """Checks tokens of one kind."""

    def accepts(self, token: str) -> bool:
        """Whether a token has the form of this kind."""
        ...

    async def authenticate(self, token: str) -> Grant | None:
        """The grant of a token; None when the token is not valid.

        Raises:
            Unavailable: the token cannot be checked now.
        """
        ...


class SessionAuthenticator(Protocol):
    """Checks requests that have a cookie of the console."""

    async def authenticate(self, request: web.Request) -> Grant | None:
        """The grant of the session; None without a session.

        Raises:
            Forbidden: another site may have sent the request.
            Unavailable: the session cannot be checked now.
        """
        ...


def grant_of(request: web.Request) -> Grant:
    """The grant of a request; unrestricted when authentication is off."""
    grant: Grant = request.get(GRANT, UNRESTRICTED)
    return grant


def visible_types(request: web.Request) -> Sequence[str] | None:
    """The names of the types that a request may see; None is all."""
    # A limited request without the list is a bug; the KeyError keeps it from showing all types.
    return None if grant_of(request).namespaces is None else request[_VISIBLE_TYPES]


class AuthMiddleware:
    """The middleware that authenticates, limits and authorizes requests.

    Args:
        authenticators: the first that accepts a token decides.
        types: the registered types.
        rate: requests a second of one actor, unless its API key has another limit; 0 is no limit.
        before_change: called before a request that may change something; raises to refuse it.
        sessions: of the console, for requests with a cookie in place of a token.
    """

    def __init__(
        self,
        authenticators: Sequence[Authenticator],
        types: TypeCache,
        rate: float,
        before_change: Callable[[], None],
        sessions: SessionAuthenticator,
    ) -> None:
        self._authenticators = authenticators
        self._types = types
        self._rate = rate
        self._before_change = before_change
        self._sessions = sessions
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._refused: Counter[str] = Counter()

    def samples(self) -> Iterator[Sample]:
        """Its metrics (`penstock.metrics`)."""
        for cause in REFUSAL_CAUSES:
            yield Sample(metrics.GATEWAY_REFUSED, self._refused[cause], (cause,))

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Calls the handler, or raises the reason for a refusal."""
        route = route_of(request)
        # An unknown route has nothing to protect: every client receives the same 404 or 405.
        if route is None:
            return await handler(request)
        action = RULES[route]
        if action is not None:
            grant = await self._authenticate(request)
            request[GRANT] = grant
            self._require_rate(grant)
            self._require_role(grant, action)
            if action is not Action.READ:
                self._before_change()
            if grant.namespaces is not None:
                # Needs no query unless a type has changed.
                await self._types.require(())
                request[_VISIBLE_TYPES] = [
                    task_type.name for task_type in self._types if grant.covers(task_type.name)
                ]
        return await handler(request)

    async def _authenticate(self, request: web.Request) -> Grant:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        if "Authorization" not in request.headers:
            try:
                session = await self._sessions.authenticate(request)
            except Unavailable:
                self._refused["unavailable"] += 1
                raise
            if session is not None:
                return session
        if scheme.lower() != "bearer" or not token:
            self._refused["nobody"] += 1
            raise Unauthenticated("send `Authorization: Bearer …` with an API key or token")
        authenticator = next(
            (accepting for accepting in self._authenticators if accepting.accepts(token)), None
        )
        try:
            grant = await authenticator.authenticate(token) if authenticator else None
        except Unavailable:
            self._refused["unavailable"] += 1
            raise
        if grant is None:
            self._refused["unknown"] += 1
            raise Unauthenticated(
                "this API key or token is not valid, has expired or was revoked: use another"
            )
        return grant

    async def is_valid(self, request: web.Request) -> bool:
        """Whether the credentials of a long request still give the same rights."""
        try:
            return await self._authenticate(request) == request[GRANT]
        except Unauthenticated:
            return False
        except Unavailable:
            # They were valid before; the next check decides.
            return True

    def _require_role(self, grant: Grant, action: Action) -> None:
        if not grant.allows(action):
            self._refused["role"] += 1
            roles = ", ".join(sorted(grant.roles)) or "no role"
            raise Forbidden(f"this route needs a role that may {action}; {roles} may not")

    def _require_rate(self, grant: Grant) -> None:
        rate = grant.rate or self._rate
        if not rate:
            return
        now_s = time.monotonic()
        bucket = self._buckets.pop(grant.actor, None)
        if bucket is None or bucket.rate != rate:
            bucket = TokenBucket(rate, now_s, capacity_s=_BURST_S, full=True)
        self._buckets[grant.actor] = bucket
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        if not bucket.available(now_s):
            self._refused["rate"] += 1
            raise Throttled(
                f"more than {rate:g} requests a second by {grant.actor}", retry_after_s=bucket.wait_s()
            )
        bucket.take()
