"""Wiring of the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

from aiohttp import web

from penstock import process
from penstock.errors import CannotStart
from penstock.gateway.authentication import Access
from penstock.gateway.broker import Broker
from penstock.gateway.callbacks import Callbacks
from penstock.gateway.door import Door
from penstock.gateway.hold import Hold
from penstock.gateway.keys import Keys
from penstock.gateway.operations import Operations
from penstock.gateway.pages import Pages
from penstock.gateway.requests import Requests
from penstock.gateway.rules import require_rules
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.targets import Targets
from penstock.gateway.tasks import Tasks
from penstock.gateway.types import Types, keep_fresh
from penstock.gateway.waiting import Waiting
from penstock.http.listening import accepting
from penstock.http.server import harden, problems, same_origin
from penstock.metrics import Sample
from penstock.metrics.serving import serving
from penstock.objects import ObjectStore
from penstock.postgres.connection import open_pool
from penstock.postgres.health import missing_migrations
from penstock.postgres.types import KnownTypes

NAME = "gateway"

log = logging.getLogger(__name__)

# For answers under way when the process is asked to stop; long-polls are answered at once.
STOP_S = 10.0


def create_app(
    settings: GatewaySettings, *, listening: Callable[[int], None] = lambda _port: None
) -> process.Service:
    """The service.

    Args:
        settings: of the gateway.
        listening: told the port, which matters when the settings say 0.
    """

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        # First: a wrong setting is told also while the database is away.
        objects = ObjectStore(settings.objects)
        async with open_pool(
            settings.postgres, NAME, pooled=settings.pooled, size=settings.gateway_connections
        ) as pool:
            missing = await missing_migrations(pool)
            if missing:
                raise CannotStart(
                    f"the database lacks {', '.join(missing)}: run `penstock migrate` against it"
                )
            broker = Broker(settings, pool)
            known = KnownTypes(pool)
            door = Door(settings)
            requests = Requests()
            hold = Hold(settings, pool, known, objects, broker)
            operations = Operations(settings, pool, broker)
            access = Access(settings, pool, known)
            app = web.Application(
                middlewares=[requests.middleware(), *access.around(problems, same_origin)],
                client_max_size=settings.gateway_body_limit_bytes,
            )
            app.on_response_prepare.append(harden)
            app.add_routes(Tasks(settings, pool, known, objects, broker, door).routes())
            app.add_routes(Waiting(settings, pool).routes())
            app.add_routes(Types(settings, pool, known).routes())
            app.add_routes(Keys(settings, pool).routes())
            app.add_routes(Targets(settings, pool, known).routes())
            app.add_routes(Callbacks(settings, pool).routes())
            app.add_routes(operations.routes())
            app.add_routes(hold.routes())
            pages = Pages(pool, broker, telling=not settings.auth_kinds)
            app.add_routes(pages.routes())
            require_rules(app.router.routes())

            def serves(port: int) -> None:
                listening(port)
                ready()

            def samples() -> Iterator[Sample]:
                yield from door.samples()
                yield from requests.samples()
                yield from access.samples()

            async with access, serving(settings, NAME, samples, pages.probes()):
                await process.leading(
                    _serve(app, settings, hold, stopping, serves),
                    broker.run(),
                    keep_fresh(settings, known),
                    operations.run(),
                    access.run(),
                )

    return service


async def _serve(
    app: web.Application,
    settings: GatewaySettings,
    hold: Hold,
    stopping: asyncio.Event,
    serves: Callable[[int], None],
) -> None:
    runner = web.AppRunner(app, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        await _listen(runner, settings, stopping, serves)
    finally:
        # Before the server waits for its answers: long-polls end now, and whatever ends the gateway, its members leave
        # their groups instead of being missed.
        await hold.close()
        await runner.cleanup()


def main() -> int:
    """Runs the service with settings from the environment."""
    return process.run(NAME, create_app(GatewaySettings.load()), stall_s=process.STALL_S)


async def _listen(
    runner: web.AppRunner, settings: GatewaySettings, stopping: asyncio.Event, serves: Callable[[int], None]
) -> None:
    """Takes connections until `stopping` is set.

    Raises:
        CannotStart: the port is not free.
    """
    async with AsyncExitStack() as stack:
        try:
            port = await stack.enter_async_context(
                accepting(runner, settings.gateway_host, settings.gateway_port)
            )
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {settings.gateway_host}:{settings.gateway_port} ({error.strerror}): "
                "set PENSTOCK_GATEWAY_PORT to a free port"
            ) from error
        log.info("listening on http://%s:%d", settings.gateway_host, port)
        serves(port)
        await stopping.wait()
