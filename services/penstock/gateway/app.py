"""Wires the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial

from aiohttp import web

from penstock import process
from penstock.core.report_tokens import ReportTokens
from penstock.errors import CannotStart
from penstock.gateway.api_keys import ApiKeyRoutes
from penstock.gateway.authentication import Authentication
from penstock.gateway.backfills import BackfillRoutes
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.callback_secrets import CallbackSecretRoutes
from penstock.gateway.callbacks import CallbackRoutes
from penstock.gateway.concurrency_keys import ConcurrencyKeyRoutes
from penstock.gateway.console import ConsoleRoutes, console_folder
from penstock.gateway.deployment_check import DeploymentCheck
from penstock.gateway.end_listener import EndListener
from penstock.gateway.flow_definitions import FlowDefinitionRoutes
from penstock.gateway.flow_operations import FlowCommandRoutes
from penstock.gateway.flow_reruns import Reruns
from penstock.gateway.flow_views import FlowViewRoutes
from penstock.gateway.hold import WorkerRoutes
from penstock.gateway.hold_answers import UnconfirmedTasks
from penstock.gateway.live import LiveRoutes
from penstock.gateway.log_reports import LogReportRoutes
from penstock.gateway.log_source import LogSource
from penstock.gateway.log_tail import LogTail
from penstock.gateway.operations import OperationRoutes
from penstock.gateway.overview import OverviewRoutes
from penstock.gateway.pages import PageRoutes
from penstock.gateway.reads import reads_middleware
from penstock.gateway.request_metrics import RequestMetrics
from penstock.gateway.rules import require_rules
from penstock.gateway.schedules import ScheduleRoutes
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.gateway.submissions import SubmissionRoutes
from penstock.gateway.targets import TargetRoutes
from penstock.gateway.task_logs import TaskLogRoutes
from penstock.gateway.task_reruns import TaskRerunRoutes
from penstock.gateway.tasks import TaskRoutes
from penstock.gateway.types import TypeRoutes, keep_fresh
from penstock.gateway.why import BacklogRoutes, TaskExplainer
from penstock.gateway.worker_tail import WorkerTail, status_sender
from penstock.gateway.workers import ListWorkersRoutes
from penstock.http.connection_guard import ConnectionCounts
from penstock.http.listener import listen
from penstock.http.server import (
    add_security_headers,
    admitted_first,
    problem_middleware,
    same_origin_middleware,
)
from penstock.kafka.client.refusals import refused_by_topic
from penstock.kafka.processing.worker_status import StatusSender
from penstock.metrics import Sample
from penstock.metrics.processing import refusal_samples
from penstock.metrics.serving import serving, stand_in
from penstock.objects import ObjectStore
from penstock.postgres.deployment import deployment_id
from penstock.postgres.flow_definitions import DefinitionCache
from penstock.postgres.health import missing_migrations
from penstock.postgres.read_pool import open_split_pool
from penstock.postgres.types import TypeCache

NAME = "gateway"
CONNECTIONS = web.AppKey("connections", ConnectionCounts)

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
    unconfirmed = UnconfirmedTasks()

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        # Before the database, so that a wrong setting is reported while the database is
        # unavailable.
        objects = ObjectStore(settings.objects)
        async with open_split_pool(
            settings.postgres,
            NAME,
            size=settings.gateway_connections,
            reads=settings.gateway_read_connections,
            pooled=settings.pooled,
        ) as pool:
            missing = await missing_migrations(pool)
            if missing:
                raise CannotStart(
                    f"the database lacks {', '.join(missing)}: run `penstock migrate` against it"
                )
            deployment = DeploymentCheck(await deployment_id(pool))
            tokens = ReportTokens(settings.report_keys)
            producer = BackgroundProducer(settings, pool, tokens)
            types = TypeCache(pool)
            definitions = DefinitionCache(pool)
            reruns = Reruns(pool, objects, definitions)
            limiter = SubmissionLimiter(settings)
            ends = EndListener(settings.sessions, pool)
            tail = LogTail(settings, tokens)
            log_reports = LogReportRoutes(settings, pool)
            request_metrics = RequestMetrics()
            explainer = TaskExplainer(settings, pool)
            workers = WorkerRoutes(settings, pool, types, objects, producer, unconfirmed)
            worker_tail = WorkerTail(settings)
            status = status_sender(producer, workers)
            operations = OperationRoutes(settings, pool, producer, reruns)
            authentication = Authentication(settings, pool, types)
            app = web.Application(
                middlewares=[
                    request_metrics.middleware(),
                    *authentication.middlewares(
                        problem_middleware, same_origin_middleware, deployment.middleware
                    ),
                    reads_middleware,
                ],
                client_max_size=settings.gateway_body_limit_bytes,
            )
            app.on_response_prepare.extend([add_security_headers, deployment.add_header])
            show_reasons = not settings.auth_kinds
            pages = PageRoutes(pool, producer, objects, show_reasons=show_reasons)
            live = LiveRoutes(pool, worker_tail.workers, authentication.is_valid)
            overview = OverviewRoutes(
                pool, types, worker_tail.workers, pages.probes(), show_reasons=show_reasons
            )
            for routes in (
                SubmissionRoutes(settings, pool, types, objects, definitions, limiter),
                TaskRoutes(settings, pool, objects, producer, ends),
                TaskRerunRoutes(pool, types, objects),
                BacklogRoutes(pool, explainer),
                TypeRoutes(settings, pool, types),
                ConcurrencyKeyRoutes(pool),
                TargetRoutes(pool, types),
                CallbackSecretRoutes(settings, pool, types),
                CallbackRoutes(pool),
                FlowDefinitionRoutes(settings, pool, types, definitions),
                ScheduleRoutes(pool, types, definitions),
                BackfillRoutes(pool),
                operations,
                FlowViewRoutes(pool, objects, ends, explainer),
                FlowCommandRoutes(pool, reruns),
                TaskLogRoutes(pool, LogSource(settings, pool, objects, tail)),
                log_reports,
                workers,
                ListWorkersRoutes(settings, pool, workers.seen, worker_tail.workers),
                overview,
                live,
                authentication.session_routes,
                ApiKeyRoutes(pool),
                ConsoleRoutes(console_folder()),
                pages,
            ):
                app.add_routes(admitted_first(routes.routes()))
            require_rules(app.router.routes())
            app[CONNECTIONS] = request_metrics.connections

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
                    _serve(app, settings, (workers, status), (ends, tail, live), stopping, started),
                    producer.run(),
                    ends.run(),
                    tail.run(),
                    live.run(),
                    worker_tail.run(),
                    status.run(),
                    log_reports.run(),
                    keep_fresh(settings, types),
                    operations.run(),
                    authentication.run(),
                )

    return service


async def _serve(
    app: web.Application,
    settings: GatewaySettings,
    of_workers: tuple[WorkerRoutes, StatusSender],
    waits: tuple[EndListener, LogTail, LiveRoutes],
    stopping: asyncio.Event,
    started: Callable[[int], None],
) -> None:
    workers, status = of_workers
    runner = web.AppRunner(app, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        workers.undelivered.resume()
        await _accept(runner, settings, stopping, started)
    finally:
        # Before the server waits for its responses: it ends the long polls and leaves the groups.
        # Otherwise the groups would wait for the session timeout of this member.
        for each in waits:
            each.close()
        await workers.close()
        await runner.cleanup()
        await workers.undelivered.close()
        await status.say_stopped()


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
                listen(
                    runner,
                    settings.gateway_host,
                    settings.gateway_port,
                    settings.allowed_hosts,
                    settings.connection_limits,
                    runner.app[CONNECTIONS],
                )
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
