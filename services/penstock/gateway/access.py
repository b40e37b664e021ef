"""Who asks, and whether they may: before anything of a request is read.

What this module guarantees: with PENSTOCK_GATEWAY_AUTH set no route but the open ones of `gateway.rules` does anything for
whom it does not know, or for a role that may not. It fails closed: what cannot be checked is answered 503. What is confined to
namespaces is told the types it may see (`among`); a handler that asks for them sees no others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock import metrics
from penstock.core.access import ANYBODY, Action, Grant
from penstock.core.allowance import Allowance
from penstock.errors import Forbidden, Throttled, Unauthenticated, Unavailable
from penstock.gateway.rules import RULES, Rule, route_of
from penstock.metrics import Sample
from penstock.postgres.types import KnownTypes

GRANT = web.RequestKey("grant", Grant)
_AMONG = web.RequestKey("among", list)

# Whose allowance is remembered at once; beyond, that of whoever has been quiet for longest begins anew.
_REMEMBERED = 10_000

WHY = ("nobody", "unknown", "role", "rate", "unavailable")


class Recogniser(Protocol):
    """A way to prove who one is."""

    def takes(self, token: str) -> bool:
        """Whether a token looks like one of its kind."""
        ...

    async def recognise(self, token: str) -> Grant | None:
        """What the sender may do; None when the token proves nothing.

        Raises:
            Unavailable: it cannot be checked now.
        """
        ...


def grant_of(request: web.Request) -> Grant:
    """What whoever sent a request may do: everything, where nobody is asked who they are."""
    grant: Grant = request.get(GRANT, ANYBODY)
    return grant


def among(request: web.Request) -> Sequence[str] | None:
    """The names of the types that whoever sent a request may see; None is all of them."""
    # Confined and without a list is a mistake of ours, and shows nothing.
    return None if grant_of(request).namespaces is None else request[_AMONG]


class Gate:
    """Lets requests through, for a middleware of its own.

    Args:
        recognisers: the ways to prove who one is; the first that takes a token decides.
        known: which types there are.
        rate: requests a second that one actor may make, unless its key says otherwise; 0 is no limit.
        before_change: asked before what may change something; raises when it must not.
    """

    def __init__(
        self,
        recognisers: Sequence[Recogniser],
        known: KnownTypes,
        rate: float,
        before_change: Callable[[], None],
    ) -> None:
        self._recognisers = recognisers
        self._known = known
        self._rate = rate
        self._before_change = before_change
        self._allowances: OrderedDict[str, tuple[float, Allowance]] = OrderedDict()
        self._refused: Counter[str] = Counter()

    def samples(self) -> Iterator[Sample]:
        """What is to be told of it (`penstock.metrics`)."""
        for why in WHY:
            yield Sample(metrics.GATEWAY_REFUSED, self._refused[why], (why,))

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets a request through, or tells why not."""
        route = route_of(request)
        # Where there is no route there is nothing to protect, and the same 404 or 405 for everybody.
        if route is None:
            return await handler(request)
        rule = RULES[route]
        if rule.action is not None:
            grant = await self._known_as(request)
            request[GRANT] = grant
            self._require_allowance(grant)
            self._require_rule(grant, rule)
            if rule.action is not Action.READ:
                self._before_change()
            if grant.namespaces is not None:
                # Without a query while no type has changed.
                await self._known.require(())
                request[_AMONG] = [one.name for one in self._known if grant.covers(one.name)]
        return await handler(request)

    async def _known_as(self, request: web.Request) -> Grant:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            self._refused["nobody"] += 1
            raise Unauthenticated("send `Authorization: Bearer …` with an API key or token")
        recogniser = next((one for one in self._recognisers if one.takes(token)), None)
        try:
            grant = await recogniser.recognise(token) if recogniser else None
        except Unavailable:
            self._refused["unavailable"] += 1
            raise
        if grant is None:
            self._refused["unknown"] += 1
            raise Unauthenticated("this key or token is not valid, or not any more")
        return grant

    def _require_rule(self, grant: Grant, rule: Rule) -> None:
        assert rule.action is not None
        if not grant.allows(rule.action):
            self._refused["role"] += 1
            roles = ", ".join(sorted(grant.roles)) or "no role"
            raise Forbidden(f"this takes a role that may {rule.action}; {roles} may not")

    def _require_allowance(self, grant: Grant) -> None:
        rate = grant.rate or self._rate
        if not rate:
            return
        now_s = asyncio.get_running_loop().time()
        known_rate, allowance = self._allowances.pop(grant.actor, (rate, None))
        if allowance is None or known_rate != rate:
            allowance = Allowance(rate, now_s)
        self._allowances[grant.actor] = (rate, allowance)
        if len(self._allowances) > _REMEMBERED:
            self._allowances.popitem(last=False)
        wait_s = allowance.take(now_s)
        if wait_s:
            self._refused["rate"] += 1
            raise Throttled(f"more than {rate:g} requests a second by {grant.actor}", retry_after_s=wait_s)


class KnownKeysLike(Protocol):
    """What is asked of `penstock.postgres.api_keys.KnownKeys`."""

    def recognise(self, token: str) -> Grant | None:
        """See there."""
        ...


class ByKey:
    """Recognises API keys.

    Args:
        keys: the copy of those that hold.
    """

    def __init__(self, keys: KnownKeysLike) -> None:
        self._keys = keys

    def takes(self, token: str) -> bool:
        """Whether it looks like one."""
        return token.startswith("pk_")

    async def recognise(self, token: str) -> Grant | None:
        """See `Recogniser`."""
        return self._keys.recognise(token)
