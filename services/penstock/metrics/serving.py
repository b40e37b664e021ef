"""The port on which a process tells of itself: /metrics, /livez and /readyz."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from penstock.errors import CannotStart, PenstockError
from penstock.metrics import Source
from penstock.metrics.page import Page
from penstock.settings import Metered

log = logging.getLogger(__name__)

# One thing that a process needs: returns when it is there, raises a PenstockError that says why not. Each sees to it that
# it takes no longer than a few seconds.
Probe = Callable[[], Awaitable[None]]

OK = "ok"
ALIVE = {"status": OK}


async def readiness(probes: Mapping[str, Probe]) -> tuple[dict[str, Any], int]:
    """What /readyz answers: a document that says of each probe "ok" or why not, and the status, 200 or 503."""
    reasons = await asyncio.gather(*(_reason(probe) for probe in probes.values()))
    checks = dict(zip(probes, reasons, strict=True))
    if all(reason == OK for reason in reasons):
        return {"status": "ready", "checks": checks}, 200
    return {"status": "not ready", "checks": checks}, 503


async def _reason(probe: Probe) -> str:
    try:
        await probe()
    except PenstockError as error:
        return str(error)
    return OK


@asynccontextmanager
async def serving(
    settings: Metered, service: str, source: Source, probes: Mapping[str, Probe]
) -> AsyncIterator[None]:
    """Serves for as long as the block runs, unless the port is 0.

    Args:
        settings: where.
        service: name of the service, for the page.
        source: of what /metrics shows besides what every process does.
        probes: what /readyz asks, by name.

    Raises:
        CannotStart: nothing can listen there.
    """
    if not settings.metrics_port:
        yield
        return
    page = Page(service, source)

    async def metrics(request: web.Request) -> web.Response:
        body, content_type = page.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def livez(_request: web.Request) -> web.Response:
        # That this is answered is the answer: it takes the loop in which the service works.
        return web.json_response(ALIVE)

    async def readyz(_request: web.Request) -> web.Response:
        document, status = await readiness(probes)
        return web.json_response(document, status=status)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    logging.getLogger().addHandler(page.logged)
    try:
        try:
            await web.TCPSite(runner, settings.metrics_host, settings.metrics_port).start()
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {settings.metrics_host}:{settings.metrics_port} ({error.strerror}): "
                "set PENSTOCK_METRICS_PORT to a free port, or to 0 for no metrics"
            ) from error
        log.info("metrics at http://%s:%d/metrics", settings.metrics_host, settings.metrics_port)
        yield
    finally:
        logging.getLogger().removeHandler(page.logged)
        await runner.cleanup()
