"""The metrics server of a process: /metrics, /livez and /readyz."""

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

# Checks one dependency of a process: returns when the dependency is available, raises a
# PenstockError with the reason when it is not. Each probe limits itself to a few seconds.
Probe = Callable[[], Awaitable[None]]

OK = "ok"
READY = "ready"
ALIVE = {"status": OK}
# Probes of what only some work needs: the process goes on with all other, so it is ready in part.
PARTIAL = frozenset({"objects"})


async def readiness(probes: Mapping[str, Probe]) -> tuple[dict[str, Any], int]:
    """Returns the body of /readyz ("ok" or a reason per probe) and its status: 200 or 503."""
    reasons = await asyncio.gather(*(_reason(probe) for probe in probes.values()))
    checks = dict(zip(probes, reasons, strict=True))
    failed = {name for name, reason in checks.items() if reason != OK}
    if not failed:
        return {"status": READY, "checks": checks}, 200
    if failed <= PARTIAL:
        return {"status": "ready in part", "checks": checks}, 200
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
    """Runs the metrics server while the block runs, unless the port is 0.

    Args:
        settings: the address to listen on.
        service: name of the service, for the page.
        source: returns the service's samples; called for each scrape.
        probes: the checks behind /readyz, by name.

    Raises:
        CannotStart: the address cannot be listened on.
    """
    if not settings.metrics_port:
        yield
        return
    page = Page(service, source)

    async def metrics(request: web.Request) -> web.Response:
        body, content_type = page.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def livez(_request: web.Request) -> web.Response:
        # An answer proves that the service's event loop runs.
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
        address = f"http://{settings.metrics_host}:{settings.metrics_port}/metrics"
        log.info("The metrics server listens", extra={"event": "metrics_listening", "address": address})
        yield
    finally:
        logging.getLogger().removeHandler(page.logged)
        await runner.cleanup()
