"""The platform client of a worker: pulls, claims, reports, and sends heartbeats.

It runs in an event loop on its own thread, so a handler that blocks the worker's loop costs neither
partitions nor leases (W7). The two loops know each other by their ports (`ports`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any

from penstock import process
from penstock.contracts.progress import Progress
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.kafka.processing.worker_status import StatusSender
from penstock.objects import ObjectStore
from penstock.worker.attempts import Attempts
from penstock.worker.connections import connected
from penstock.worker.contexts import ResultContexts
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.log_shipper import LogShipper, ship
from penstock.worker.loop_thread import LoopThread
from penstock.worker.ports import Handlers
from penstock.worker.progress import ProgressReporter
from penstock.worker.readiness import Readiness
from penstock.worker.registered import Registered
from penstock.worker.result_sender import ResultSender

log = logging.getLogger(__name__)

# Seconds that pullers get to end: leaving a group asks the broker.
LEAVE_S = 5.0
# Seconds that the last lines of task logs get.
LOGS_S = 3.0


class PlatformClient:
    """The client of one worker, and its port `ports.Platform` for the loop of handlers.

    Made in that loop, and run in its own. The port may be used from any thread, for attempts that
    `run` has started.

    Args:
        registered: what was registered with the worker, after its start.
        worker_id: of the worker.
        objects: the object store of large contexts; None leaves them inline, for a gateway to
            store.
        thread: the loop in which it runs.

    Attributes:
        readiness: whether the worker takes tasks.
    """

    def __init__(
        self, registered: Registered, worker_id: str, objects: ObjectStore | None, thread: LoopThread
    ) -> None:
        self._registered = registered
        self._worker_id = worker_id
        self._objects = objects
        self._call_soon = thread.call_soon
        # Suspects that begin (True) or have ended.
        self._turns: asyncio.Queue[tuple[AttemptId, bool]] = asyncio.Queue()
        self._stopping = asyncio.Event()
        self._drained = asyncio.Event()
        self._store_s = math.inf
        self._shipper: LogShipper | None = None
        self.readiness = Readiness(registered.settings)
        self._attempts: Attempts
        self._results: ResultSender
        self._progress: ProgressReporter

    def add(self, result: StageResult) -> None:
        """See `Platform.add`."""
        self._results.add(result)

    def report(self, attempt_id: AttemptId, progress: Progress) -> None:
        """See `Platform.report`."""
        self._progress.report(attempt_id, progress)

    def announce(self, attempt_id: AttemptId) -> None:
        """See `Platform.announce`."""
        self._call_soon(self._turns.put_nowait, (attempt_id, True))

    def ended(self, attempt_id: AttemptId) -> None:
        """See `Platform.ended`."""
        self._call_soon(self._turns.put_nowait, (attempt_id, False))

    def block(self, blocked: bool) -> None:
        """See `Platform.block`."""
        self._call_soon(self._attempts.in_flight.block, blocked)

    def wake_logs(self, urgent: bool) -> None:
        """Tells that lines of task logs wait (`LogShipper.wake`)."""
        if self._shipper is not None:
            self._call_soon(self._shipper.wake, urgent)

    def stop(self) -> None:
        """Ends pulling."""
        self.readiness.stopping = True
        self._call_soon(self._stopping.set)

    def finish(self, store_s: float) -> None:
        """Ends `run` once all results are reported; no further result will be added.

        Args:
            store_s: seconds until attempts whose results wait for the object store are handed back.
        """
        self._store_s = store_s
        self._call_soon(self._drained.set)

    async def run(self, handlers: Handlers, logs: LogBuffer | None) -> None:
        """Runs until `stop` and `finish` were called.

        Args:
            handlers: run the attempts.
            logs: whose lines are shipped; None ships none.

        Raises:
            KafkaUnavailable: no broker answered at the start.
            SettingsError: there is no gateway at the address, or it has refused this worker for too
                long.
        """
        registered, worker_id = self._registered, self._worker_id
        loop = asyncio.get_running_loop()
        shipping: list[Coroutine[Any, Any, None]] = []
        if logs is not None:
            self._shipper = LogShipper(logs)

        def accepted() -> None:
            self.readiness.accept()
            handlers.set_ready()

        def refused() -> None:
            self.readiness.refuse()
            handlers.withdraw_ready()

        async with connected(registered, worker_id, self.readiness, accepted, refused) as connection:
            attempts = Attempts(
                registered, worker_id, connection.transport, handlers, loop.time, connection.tokens
            )
            in_flight, heartbeats = attempts.in_flight, attempts.heartbeats
            self._attempts = attempts
            self._progress = ProgressReporter(
                loop, heartbeats.report, heartbeats.keeps_alive, in_flight.__contains__
            )
            self._results = ResultSender(
                connection.transport,
                worker_id,
                attempts.on_sent,
                attempts.still_in_flight,
                handlers.start,
                in_flight.park,
                ResultContexts(self._objects, in_flight.type_of).stored if self._objects else None,
            )
            pullers = [connection.puller(name, attempts, handlers) for name in sorted(registered.limits)]
            if self._shipper is not None:
                shipping = [ship(self._shipper, registered.settings, worker_id)]
            status = connection.status(attempts) if connection.status else None
            await process.run_with_background(
                self._work(handlers, process.run_all(*(puller.run() for puller in pullers)), status),
                self._results.run(),
                heartbeats.run(),
                attempts.unclaimed.run(),
                self._progress.run(),
                self._serve_suspects(handlers),
                *connection.readers(attempts),
                *shipping,
                *([status.run()] if status else []),
                # Guards this loop; handlers may block theirs for any time.
                process.watch_loop(process.STALL_S),
            )

    async def _work(
        self, handlers: Handlers, pulling: Coroutine[Any, Any, None], status: StatusSender | None
    ) -> None:
        await until(self._stopping, pulling)
        self._results.begin_end()
        handlers.end_pulling()
        await self._drained.wait()
        await self._results.wait_sent(self._store_s)
        if self._shipper is not None:
            await self._shipper.drain(LOGS_S)
        if status is not None:
            await status.say_stopped()

    async def _serve_suspects(self, handlers: Handlers) -> None:
        while True:
            attempt_id, begins = await self._turns.get()
            if not begins:
                await self._attempts.in_flight.wait_gone([attempt_id])
                handlers.end_turn(attempt_id)
            elif await self._attempts.heartbeats.announce(attempt_id):
                handlers.begin(attempt_id)


async def until(stopping: asyncio.Event, work: Any) -> None:
    """Runs `work` until `stopping` is set, then cancels it.

    Raises:
        Exception: `work` raised it before.
    """
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, waiting):
            task.cancel()
    await asyncio.wait({working, waiting}, timeout=LEAVE_S)
    if not working.done():
        # A client that waits for an unavailable broker; it ends with this loop.
        log.warning(
            "Pulling did not end in time; continuing without waiting for it",
            extra={"event": "pulling_abandoned", "timeout_s": LEAVE_S},
        )
    elif not working.cancelled() and (error := working.exception()) is not None:
        raise error
