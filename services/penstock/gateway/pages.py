"""What is no business of tasks: the front page, the documentation, and the probes."""

from __future__ import annotations

import asyncio
import html
import logging
from functools import partial
from http import HTTPStatus
from typing import Any

import asyncpg
from aiohttp import web

import penstock
from penstock.gateway import openapi
from penstock.gateway.broker import Broker
from penstock.gateway.reference import STYLE, render
from penstock.http.server import respond
from penstock.metrics.serving import ALIVE, Probe, readiness
from penstock.postgres import health as postgres_health

log = logging.getLogger(__name__)

# Seconds for which strangers are told what was found before.
KEPT_S = 1.0

# Nothing on these pages comes from anywhere else, and nothing may.
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
<li><a href="/docs">API reference</a> · <a href="/openapi.json">openapi.json</a></li>
<li><a href="/tasks">Latest tasks</a> · <a href="/types">task types</a></li>
<li><a href="/readyz">Readiness</a> · <a href="/livez">liveness</a></li>
</ul>
<p>From a terminal:</p>
<pre>penstock types add demo
penstock submit demo --context '{{"hello": "world"}}' --watch</pre>
</main></body></html>"""


class Pages:
    """The routes that are not about tasks.

    Args:
        pool: probed by /readyz.
        broker: likewise.
        telling: whether anybody may hear why something is away, which names servers; else only the log does.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], broker: Broker, *, telling: bool = True) -> None:
        self._telling = telling
        self._asking = asyncio.Lock()
        self._asked_s = 0.0
        self._answer: tuple[dict[str, Any], int] | None = None
        self._pool = pool
        self._broker = broker

    def routes(self) -> list[web.RouteDef]:
        """What this class answers."""
        return [
            web.get("/", self.home),
            web.get("/docs", self.docs),
            web.get("/openapi.json", self.openapi),
            web.get("/healthz", self.livez),
            web.get("/livez", self.livez),
            web.get("/readyz", self.readyz),
        ]

    def probes(self) -> dict[str, Probe]:
        """What a gateway needs."""
        return {"postgres": partial(postgres_health.probe, self._pool), "kafka": self._broker.probe}

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
        """GET /livez, and /healthz: the process is alive; restarting it would help nobody."""
        return respond(ALIVE)

    async def readyz(self, _request: web.Request) -> web.Response:
        """GET /readyz: whether requests would find what they need, and if not, why."""
        if self._telling:
            return respond(*await readiness(self.probes()))
        # Strangers may ask as often as they like, so PostgreSQL and Kafka are asked for all of them together.
        async with self._asking:
            loop = asyncio.get_running_loop()
            if self._answer is None or loop.time() - self._asked_s > KEPT_S:
                self._answer = await self._look()
                self._asked_s = loop.time()
        return respond(*self._answer)

    async def _look(self) -> tuple[dict[str, Any], int]:
        document, status = await readiness(self.probes())
        if status != HTTPStatus.OK:
            log.warning("not ready: %s", document["checks"])
            document["checks"] = {
                name: reason if reason == "ok" else "away: the gateway's log tells more"
                for name, reason in document["checks"].items()
            }
        return document, status
