"""Marks the requests that only read, whose statements have connections of their own."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.core.access import Action
from penstock.gateway.access import grant_of
from penstock.gateway.rules import RULES, route_of
from penstock.postgres.read_pool import reading


@web.middleware
async def reads_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Calls the handler of a route that reads inside `reading`; the innermost middleware.

    A route of GET without a name or id in its path lists, and may take long.
    """
    route = route_of(request)
    if route is None or RULES[route] is not Action.READ:
        return await handler(request)
    with reading(grant_of(request).actor, lists=route.startswith("GET ") and "{" not in route):
        return await handler(request)
