"""The metrics server of a process: /metrics, /livez and /readyz."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from penstock.errors import (
    CannotStart,
    KafkaUnavailable,
    ObjectsUnavailable,
    PenstockError,
    PostgresUnavailable,
    SessionLost,
)
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
# The names of probes by the errors of what they probe.
_PROBES: tuple[tuple[type[PenstockError], str], ...] = (
    (PostgresUnavailable, "postgres"),
    (KafkaUnavailable, "kafka"),
    (ObjectsUnavailable, "objects"),
    (SessionLost, "session"),
)
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
    await end_stand_in()
    if not settings.metrics_port:
        yield
        return
    page = Page(service, source)
    runner = await _listen(settings, page, probes)
    logging.getLogger().addHandler(page.logged)
    address = f"http://{settings.metrics_host}:{settings.metrics_port}/metrics"
    log.info("The metrics server listens", extra={"event": "metrics_listening", "address": address})
    try:
        yield
    finally:
        logging.getLogger().removeHandler(page.logged)
        await runner.cleanup()


# The server of a service that waits for another server; a process has one at most.
_stand_in: web.AppRunner | None = None


async def stand_in(settings: Metered, service: str, error: PenstockError) -> None:
    """Runs the metrics server of a service that waits for another server: alive, and not ready.

    It ends when `serving` begins. Without it, a supervisor that probes would end the process.

    Args:
        settings: the address to listen on.
        service: name of the service, for the page.
        error: why the service waits.

    Raises:
        CannotStart: the address cannot be listened on.
    """
    global _stand_in  # noqa: PLW0603 (the service does not know it)

    async def unavailable() -> None:
        raise error

    await end_stand_in()
    if settings.metrics_port:
        name = next((name for kind, name in _PROBES if isinstance(error, kind)), service)
        _stand_in = await _listen(settings, Page(service, lambda: ()), {name: unavailable})


async def end_stand_in() -> None:
    """Ends the server of `stand_in`, if it runs."""
    global _stand_in
    if _stand_in is not None:
        runner, _stand_in = _stand_in, None
        await runner.cleanup()


async def _listen(settings: Metered, page: Page, probes: Mapping[str, Probe]) -> web.AppRunner:
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
    try:
        await web.TCPSite(runner, settings.metrics_host, settings.metrics_port).start()
    except OSError as error:
        await runner.cleanup()
        raise CannotStart(
            f"cannot listen on {settings.metrics_host}:{settings.metrics_port} ({error.strerror}): "
            "set PENSTOCK_METRICS_PORT to a free port, or to 0 for no metrics"
        ) from error
    return runner
