"""Wires the parts of a worker: those of the loop of handlers, and those of the platform's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from penstock import process
from penstock.objects import ObjectStore
from penstock.worker.block_detector import BlockDetector
from penstock.worker.handler_pool import HandlerPool
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.loop_thread import loop_thread
from penstock.worker.metrics import samples, serving
from penstock.worker.platform_client import PlatformClient
from penstock.worker.ports import Handlers
from penstock.worker.registered import Registered

# Seconds that the handlers' loop gets to end after the platform client has failed.
FAILURE_GRACE_S = 15.0
# Seconds after the drain, at least, in which the object store can take the last results.
STORE_S = 5.0


async def run_attempts(
    worker_id: str,
    registered: Registered,
    objects: ObjectStore | None,
    hurry: asyncio.Event,
    stopping: asyncio.Event,
    ready: process.Ready,
    background: Awaitable[None],
) -> None:
    """Pulls tasks and runs their handlers until `stopping` is set, then drains.

    Args:
        worker_id: of the worker.
        registered: what was registered with it, after its start.
        objects: the object store of large contexts; None leaves them to a gateway.
        hurry: ends the drain when it is set.
        stopping: ends the pulling when it is set.
        ready: called when tasks can be pulled.
        background: runs beside the handlers, in their loop.

    Raises:
        SettingsError: there is no gateway, or it has refused this worker for too long.
        KafkaUnavailable: no broker answered at the start.
    """
    loop = asyncio.get_running_loop()
    settings, slots = registered.settings, registered.slots
    async with loop_thread("penstock platform") as platform:
        client = PlatformClient(registered, worker_id, objects, platform)
        logs = None
        if settings.task_logs != "off":
            logs = LogBuffer(worker_id, registered.redactor, client.wake_logs)
        pool = HandlerPool(
            registered.execution(objects, logs, client.report), client, slots, registered.concurrency
        )
        handlers = Handlers(pool, ready)
        detector = BlockDetector(loop, lambda: pool.is_busy)

        async def work() -> None:
            await stopping.wait()
            client.stop()
            await handlers.pulled.wait()
            drained_by_s = loop.time() + settings.drain_timeout_s
            await pool.drain(settings.drain_timeout_s, hurry)
            client.finish(max(drained_by_s - loop.time(), STORE_S))
            # The client ends the service once all results are reported.
            await asyncio.Event().wait()

        # Ends the process when a handler blocks this loop, which then cannot receive the
        # client's failure.
        exit_timer = process.ExitTimer(FAILURE_GRACE_S)

        async def run_client() -> None:
            try:
                async with serving(
                    settings, lambda: samples(pool, slots, logs, detector.blocked), client.readiness.probe
                ):
                    await client.run(handlers, logs)
            except Exception:
                exit_timer.start()
                raise

        try:
            await process.run_with_background(
                platform.run(run_client()), work(), pool.watch(), platform.run(detector.run()), background
            )
        finally:
            exit_timer.cancel()
