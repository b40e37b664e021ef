"""The metrics server of a process: /metrics, /livez and /readyz.

It needs no package that the worker SDK lacks: the page is the caller's.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

from penstock.concurrency.outages import Wait, server_of
from penstock.errors import CannotStart, PenstockError
from penstock.http.listener import listen
from penstock.metrics.log_counter import LogCounter

log = logging.getLogger(__name__)


class Address(Protocol):
    """The settings of the server: `MetricsPages`, and the port."""

    @property
    def metrics_host(self) -> str: ...  # noqa: D102 (see the settings)
    @property
    def metrics_port(self) -> int: ...  # noqa: D102 (see the settings)
    @property
    def metrics_token(self) -> str: ...  # noqa: D102 (see the settings)
    @property
    def allowed_hosts(self) -> tuple[str, ...]: ...  # noqa: D102 (see the settings)


# Checks one dependency of a process: returns when the dependency is available, raises a
# PenstockError with the reason when it is not. Each probe limits itself to a few seconds.
Probe = Callable[[], Awaitable[None]]

OK = "ok"
READY = "ready"
ALIVE = {"status": OK}
# Probes of what only some work needs: the process goes on with all other, so it is ready in part.
PARTIAL = frozenset({"objects", "writes"})


class MetricsPage(Protocol):
    """The page that Prometheus scrapes.

    Attributes:
        service: the name of the process's service.
        logged: the log handler that counts warnings and errors for the page.
        checks: whether each check of /readyz succeeds, as of this scrape.
    """

    service: str
    logged: LogCounter
    checks: Mapping[str, bool]

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that an Accept header requests, and its content type."""


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


def _counted(probe: Probe, wait: Wait) -> Probe:
    """A probe whose server the process waits for while it fails."""

    async def counted() -> None:
        try:
            await probe()
        except PenstockError as error:
            wait.begin(error)
            raise
        wait.end()

    return counted


async def _reason(probe: Probe) -> str:
    try:
        await probe()
    except PenstockError as error:
        return str(error)
    return OK


@asynccontextmanager
async def serving_page(
    settings: Address, page: MetricsPage, probes: Mapping[str, Probe]
) -> AsyncIterator[None]:
    """Runs the metrics server while the block runs, unless the port is 0.

    Args:
        settings: the address to listen on.
        page: the page of /metrics.
        probes: the checks behind /readyz, by name.

    Raises:
        CannotStart: the address cannot be listened on.
    """
    await end_stand_in()
    if not settings.metrics_port:
        yield
        return
    server = await _listen(settings, page, probes)
    logging.getLogger().addHandler(page.logged)
    address = f"http://{settings.metrics_host}:{settings.metrics_port}/metrics"
    log.info("The metrics server listens", extra={"event": "metrics_listening", "address": address})
    try:
        yield
    finally:
        logging.getLogger().removeHandler(page.logged)
        await server.aclose()


# The server of a process that waits for another server; a process has one at most.
_stand_in: AsyncExitStack | None = None


async def stand_in_page(settings: Address, page: MetricsPage, error: PenstockError) -> None:
    """Runs the metrics server of a service that waits for another server: alive, and not ready.

    It ends when `serving_page` begins. Without it, a supervisor that probes would end the process.

    Args:
        settings: the address to listen on.
        page: the page of /metrics.
        error: why the service waits.

    Raises:
        CannotStart: the address cannot be listened on.
    """
    global _stand_in  # noqa: PLW0603 (the service does not know it)

    async def unavailable() -> None:
        raise error

    await end_stand_in()
    if settings.metrics_port:
        _stand_in = await _listen(settings, page, {server_of(error) or page.service: unavailable})


async def end_stand_in() -> None:
    """Ends the server of `stand_in_page`, if it runs."""
    global _stand_in
    if _stand_in is not None:
        server, _stand_in = _stand_in, None
        await server.aclose()


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # As bytes, since a header may have other characters. In constant time, so that the time of an
    # answer does not reveal the token.
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode(errors="replace"), token.encode()
    )


async def _listen(settings: Address, page: MetricsPage, probes: Mapping[str, Probe]) -> AsyncExitStack:
    """Returns what ends the server."""
    waits = [Wait() for _ in probes]
    probes = {name: _counted(probe, wait) for (name, probe), wait in zip(probes.items(), waits, strict=True)}

    async def metrics(request: web.Request) -> web.Response:
        # First, so that a client without the token causes no probes.
        if settings.metrics_token and not _has_token(request, settings.metrics_token):
            return web.Response(
                status=401,
                text="/metrics needs PENSTOCK_METRICS_TOKEN as a bearer token\n",
                headers={"WWW-Authenticate": "Bearer"},
            )
        # An outage must be in the series: a process that waits for a server has no others.
        document, _status = await readiness(probes)
        page.checks = {name: reason == OK for name, reason in document["checks"].items()}
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
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    async with AsyncExitStack() as stack:
        for wait in waits:
            stack.callback(wait.end)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        try:
            await stack.enter_async_context(
                listen(runner, settings.metrics_host, settings.metrics_port, settings.allowed_hosts)
            )
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {settings.metrics_host}:{settings.metrics_port} ({error.strerror}): "
                "set PENSTOCK_METRICS_PORT, or PENSTOCK_WORKER_METRICS_PORT of a worker, to a free port, or to 0 for no metrics"
            ) from error
        return stack.pop_all()
