"""What a request changed, for the audit (`gateway.audit`).

What this module guarantees: only what a handler notes is kept. A body is never noted as a whole
where it may have a secret. So a new route keeps nothing until its handler notes something; a test
requires that of every route that operates or configures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from penstock.core.changes import difference

CHANGE = web.RequestKey("change", dict)

# A larger change is kept as its size only: many entries wait in memory while PostgreSQL is away.
MAX_BYTES = 8_192

# Told a document before and after its change; None where there was or is none.
Observer = Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None], None]


def observer(request: web.Request, **about: Any) -> Observer:
    """What notes a change of a document, as answers show it: without secrets.

    Args:
        request: that changes it.
        about: names the document, where the path does not.
    """

    def observe(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> None:
        note(request, **about, **difference(before, after))

    return observe


def note(request: web.Request, /, **change: Any) -> None:
    """Notes what a request changed; values are those of JSON, and moments."""
    request[CHANGE] = change


def noted(request: web.Request) -> str | None:
    """The JSON text of what a request changed; None if nothing was noted."""
    change = request.get(CHANGE)
    if change is None:
        return None
    data = orjson.dumps(change)
    if len(data) > MAX_BYTES:
        data = orjson.dumps({"bytes": len(data), "omitted": True})
    return data.decode()
