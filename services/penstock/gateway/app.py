"""Wires the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial

from aiohttp import web

from penstock import process
from penstock.errors import CannotStart
from penstock.gateway.authentication import Authentication
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.callbacks import CallbackRoutes
from penstock.gateway.concurrency_keys import ConcurrencyKeyRoutes
from penstock.gateway.deployment_check import DeploymentCheck
from penstock.gateway.hold import WorkerRoutes
from penstock.gateway.operations import OperationRoutes
from penstock.gateway.pages import PageRoutes
from penstock.gateway.request_metrics import RequestMetrics
from penstock.gateway.rules import require_rules
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.gateway.targets import TargetRoutes
from penstock.gateway.tasks import TaskRoutes
from penstock.gateway.types import TypeRoutes, keep_fresh
from penstock.gateway.why import BacklogRoutes
from penstock.http.listener import listen
from penstock.http.server import add_security_headers, problem_middleware, same_origin_middleware
from penstock.kafka.refusals import refused_by_topic
from penstock.metrics import Sample
from penstock.metrics.processing import refusal_samples
from penstock.metrics.serving import serving, stand_in
from penstock.objects import ObjectStore
from penstock.postgres.connection import open_pool
from penstock.postgres.deployment import deployment_id
from penstock.postgres.health import missing_migrations
from penstock.postgres.types import TypeCache

NAME = "gateway"

log = logging.getLogger(__name__)

# How long a stopping gateway waits for responses under way; long polls are answered at once.
STOP_S = 10.0


def create_app(
    settings: GatewaySettings, *, listening: Callable[[int], None] = lambda _port: None
) -> process.Service:
    """The service.

    Args:
        settings: of the gateway.
        listening: called with the port, which is unknown before when the settings have 0.
    """

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        # Before the database, so that a wrong setting is reported while the database is
        # unavailable.
        objects = ObjectStore(settings.objects)
        async with open_pool(
            settings.postgres, NAME, pooled=settings.pooled, size=settings.gateway_connections
        ) as pool:
            missing = await missing_migrations(pool)
            if missing:
                raise CannotStart(
                    f"the database lacks {', '.join(missing)}: run `penstock migrate` against it"
                )
            deployment = DeploymentCheck(await deployment_id(pool))
            producer = BackgroundProducer(settings, pool)
            types = TypeCache(pool)
            limiter = SubmissionLimiter(settings)
            request_metrics = RequestMetrics()
            workers = WorkerRoutes(settings, pool, types, objects, producer)
            operations = OperationRoutes(settings, pool, producer)
            authentication = Authentication(settings, pool, types)
            app = web.Application(
                middlewares=[
                    request_metrics.middleware(),
                    *authentication.middlewares(
                        problem_middleware, same_origin_middleware, deployment.middleware
                    ),
                ],
                client_max_size=settings.gateway_body_limit_bytes,
            )
            app.on_response_prepare.extend([add_security_headers, deployment.add_header])
            app.add_routes(TaskRoutes(settings, pool, types, objects, producer, limiter).routes())
            app.add_routes(BacklogRoutes(settings, pool).routes())
            app.add_routes(TypeRoutes(settings, pool, types).routes())
            app.add_routes(ConcurrencyKeyRoutes(settings, pool).routes())
            app.add_routes(TargetRoutes(settings, pool, types).routes())
            app.add_routes(CallbackRoutes(settings, pool).routes())
            app.add_routes(operations.routes())
            app.add_routes(workers.routes())
            pages = PageRoutes(pool, producer, objects, show_reasons=not settings.auth_kinds)
            app.add_routes(pages.routes())
            require_rules(app.router.routes())

            def started(port: int) -> None:
                listening(port)
                ready()

            def samples() -> Iterator[Sample]:
                yield from limiter.samples()
                yield from request_metrics.samples()
                yield from authentication.samples()
                yield from refusal_samples(refused_by_topic(settings.prefix))

            async with authentication, serving(settings, NAME, samples, pages.probes()):
                await process.run_with_background(
                    _serve(app, settings, workers, stopping, started),
                    producer.run(),
                    keep_fresh(settings, types),
                    operations.run(),
                    authentication.run(),
                )

    return service


async def _serve(
    app: web.Application,
    settings: GatewaySettings,
    workers: WorkerRoutes,
    stopping: asyncio.Event,
    started: Callable[[int], None],
) -> None:
    runner = web.AppRunner(app, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        await _accept(runner, settings, stopping, started)
    finally:
        # Before the server waits for its responses: it ends the long polls and leaves the groups.
        # Otherwise the groups would wait for the session timeout of this member.
        await workers.close()
        await runner.cleanup()


async def _accept(
    runner: web.AppRunner, settings: GatewaySettings, stopping: asyncio.Event, started: Callable[[int], None]
) -> None:
    """Accepts connections until `stopping` is set.

    Raises:
        CannotStart: the port is not free.
    """
    async with AsyncExitStack() as stack:
        try:
            port = await stack.enter_async_context(
                listen(runner, settings.gateway_host, settings.gateway_port)
            )
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {settings.gateway_host}:{settings.gateway_port} ({error.strerror}): "
                "set PENSTOCK_GATEWAY_PORT to a free port"
            ) from error
        log.info(
            "The gateway listens",
            extra={"event": "gateway_listening", "url": f"http://{settings.gateway_host}:{port}"},
        )
        started(port)
        await stopping.wait()


def main() -> int:
    """Runs the service with settings from the environment."""
    settings = GatewaySettings.load()
    return process.run(
        NAME, create_app(settings), stall_s=process.STALL_S, on_wait=partial(stand_in, settings, NAME)
    )
