"""The front page, the API reference and the probes."""

from __future__ import annotations

import asyncio
import html
import logging
from functools import partial
from typing import Any

import asyncpg
from aiohttp import web

import penstock
from penstock.gateway import openapi
from penstock.gateway.api_reference import STYLE, render
from penstock.gateway.background_producer import BackgroundProducer
from penstock.http.server import respond
from penstock.kafka.client.pending_writes import probe_writes
from penstock.metrics.server import ALIVE, READY, Probe, readiness
from penstock.objects import ObjectStore
from penstock.postgres import health as postgres_health

log = logging.getLogger(__name__)

# Seconds for which unauthenticated clients receive the last result of the readiness check.
READINESS_CACHE_S = 1.0

# The pages load nothing from other sites, and may not.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}

_HOME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Penstock gateway</title><style>{style}</style></head>
<body><main class="home">
<h1>Penstock</h1>
<p>This is the gateway of a Penstock deployment, version {version}: tasks go in and out here.</p>
<ul>
<li><a href="/console/">Console</a></li>
<li><a href="/docs">API reference</a> · <a href="/openapi.json">openapi.json</a></li>
<li><a href="/tasks">Latest tasks</a> · <a href="/types">task types</a></li>
<li><a href="/readyz">Readiness</a> · <a href="/livez">liveness</a></li>
</ul>
<p>From a terminal:</p>
<pre>penstock types add demo
penstock submit demo --context '{{"hello": "world"}}' --watch</pre>
</main></body></html>"""


class PageRoutes:
    """The routes of the pages and probes.

    Args:
        pool: the database; /readyz probes it.
        producer: the connection to Kafka; /readyz probes it.
        objects: the object store; /readyz probes it.
        show_reasons: whether /readyz has the reasons, which name servers; otherwise only the log
            has them.
    """

    def __init__(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: BackgroundProducer,
        objects: ObjectStore,
        *,
        show_reasons: bool = True,
    ) -> None:
        self._show_reasons = show_reasons
        self._checking = asyncio.Lock()
        self._checked_at_s = 0.0
        self._cached: tuple[dict[str, Any], int] | None = None
        self._pool = pool
        self._producer = producer
        self._objects = objects

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/", self.home),
            web.get("/docs", self.docs),
            web.get("/openapi.json", self.openapi),
            web.get("/healthz", self.livez),
            web.get("/livez", self.livez),
            web.get("/readyz", self.readyz),
        ]

    def probes(self) -> dict[str, Probe]:
        """The probes of the servers that a gateway needs."""
        return {
            "postgres": partial(postgres_health.probe, self._pool),
            "kafka": self._producer.probe,
            "writes": probe_writes,
            "objects": self._objects.probe,
        }

    async def home(self, _request: web.Request) -> web.Response:
        """GET /."""
        text = _HOME.format(style=STYLE, version=html.escape(penstock.__version__))
        return web.Response(text=text, content_type="text/html", headers=_HEADERS)

    async def docs(self, _request: web.Request) -> web.Response:
        """GET /docs."""
        return web.Response(text=render(), content_type="text/html", headers=_HEADERS)

    async def openapi(self, _request: web.Request) -> web.Response:
        """GET /openapi.json."""
        return web.Response(body=openapi.encoded(), content_type="application/json")

    async def livez(self, _request: web.Request) -> web.Response:
        """GET /livez, and /healthz: the process is alive and needs no restart."""
        return respond(ALIVE)

    async def readyz(self, _request: web.Request) -> web.Response:
        """GET /readyz: whether PostgreSQL, Kafka and the object store are available."""
        if self._show_reasons:
            return respond(*await readiness(self.probes()))
        # The route needs no authentication and has no rate limit, so the result is cached.
        async with self._checking:
            loop = asyncio.get_running_loop()
            if self._cached is None or loop.time() - self._checked_at_s > READINESS_CACHE_S:
                self._cached = await self._check()
                self._checked_at_s = loop.time()
        return respond(*self._cached)

    async def _check(self) -> tuple[dict[str, Any], int]:
        document, status = await readiness(self.probes())
        if document["status"] != READY:
            log.warning(
                "The gateway is not ready, or only in part",
                extra={"event": "readiness_failed", "checks": document["checks"]},
            )
            document["checks"] = {
                name: reason if reason == "ok" else "unavailable: the gateway's log has the reason"
                for name, reason in document["checks"].items()
            }
        return document, status
