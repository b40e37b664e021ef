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
from penstock.worker.metrics import AttemptCounts, Counts, serving
from penstock.worker.platform_client import PlatformClient
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
        client = PlatformClient(
            settings,
            worker_id,
            registered.limits,
            slots,
            lambda claimed: loop.call_soon_threadsafe(pool.start_all, claimed),
            lambda attempt_ids: loop.call_soon_threadsafe(pool.drop, attempt_ids),
            lambda attempt_id: loop.call_soon_threadsafe(pool.begin, attempt_id),
            lambda attempt_id: loop.call_soon_threadsafe(pool.end_turn, attempt_id),
            lambda attempt_id: pool.waits(attempt_id),  # noqa: PLW0108 (the pool follows)
            objects,
            registered.stages_by_type,
        )
        counts = AttemptCounts(registered.stages) if settings.metrics_port else None
        logs = None
        if settings.task_logs != "off":
            logs = LogBuffer(
                worker_id,
                registered.redactor,
                lambda urgent: platform.call_soon(client.wake_logs, urgent),
            )
            client.ship_logs(logs)
        pool = HandlerPool(
            registered.execution(objects, logs, client.report),
            client.add,
            slots,
            lambda attempt_id: platform.call_soon(client.announce, attempt_id),
            lambda attempt_id: platform.call_soon(client.ended, attempt_id),
            lambda blocked: platform.call_soon(client.block, blocked),
            registered.concurrency,
            counts,
        )
        detector = BlockDetector(loop, lambda: pool.is_busy, pool.attempt_of)

        def count() -> Counts:
            dropped = logs.dropped if logs is not None else {}
            return Counts(
                registered.stages,
                slots,
                counts.ended if counts is not None else {},
                pool.running_attempts,
                pool.waiting,
                dropped,
                detector.blocked,
            )

        pulled = asyncio.Event()

        async def work() -> None:
            await stopping.wait()
            platform.call_soon(client.stop)
            await pulled.wait()
            drained_by_s = loop.time() + settings.drain_timeout_s
            await pool.drain(settings.drain_timeout_s, hurry)
            platform.call_soon(client.finish, max(drained_by_s - loop.time(), STORE_S))
            # The client ends the service once all results are reported.
            await asyncio.Event().wait()

        # Ends the process when a handler blocks this loop, which then cannot receive the
        # client's failure.
        exit_timer = process.ExitTimer(FAILURE_GRACE_S)

        async def run_client() -> None:
            try:
                async with serving(settings, count, client.readiness.probe):
                    await client.run(
                        lambda: loop.call_soon_threadsafe(ready),
                        lambda: loop.call_soon_threadsafe(process.withdraw_ready, "worker"),
                        lambda: loop.call_soon_threadsafe(pulled.set),
                    )
            except Exception:
                exit_timer.start()
                raise

        try:
            await process.run_with_background(
                platform.run(run_client()), work(), pool.watch(), platform.run(detector.run()), background
            )
        finally:
            exit_timer.cancel()
