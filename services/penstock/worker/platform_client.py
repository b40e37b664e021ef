"""The platform client of a worker: pulls, claims, reports, and sends heartbeats.

It runs in an event loop on its own thread, so a handler that blocks the worker's loop costs neither
partitions nor leases (W7). It exchanges only batches with the handlers' side: `start`, `drop` and
results.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from penstock import process
from penstock.concurrency.retry import LASTING_ATTEMPT_S, WORKER_BACKOFF, retry_until_available
from penstock.contracts.progress import Progress
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.core.early_start import HORIZON_S, BacklogLimit
from penstock.http.credentials import Credentials
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.member_data import MemberData
from penstock.objects import ObjectStore
from penstock.worker.contexts import ResultContexts
from penstock.worker.gateway_client import GatewayClient
from penstock.worker.heartbeat_sender import HeartbeatSender
from penstock.worker.http_transport import HttpPuller, HttpTransport
from penstock.worker.in_flight import InFlight
from penstock.worker.kafka_transport import KafkaTransport
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.log_shipper import HttpLogTransport, KafkaLogTransport, LogShipper
from penstock.worker.progress import ProgressReporter
from penstock.worker.pull import KafkaPuller
from penstock.worker.readiness import Readiness
from penstock.worker.result_sender import ResultSender
from penstock.worker.revocations import listen
from penstock.worker.settings import WorkerSettings
from penstock.worker.unclaimed import UnclaimedAttempts

log = logging.getLogger(__name__)

# Seconds that pullers get to end: leaving a group asks the broker.
LEAVE_S = 5.0
# Seconds that the last lines of task logs get.
LOGS_S = 3.0

# The transport, a factory of pullers by type, and further coroutines to run.
Platform = tuple[
    KafkaTransport | HttpTransport,
    Callable[[str], KafkaPuller | HttpPuller],
    list[Coroutine[Any, Any, None]],
]


class PlatformClient:
    """The client of one worker; made and run in its own loop.

    `add` may be called from any thread, once `start` has been called.

    Args:
        settings: of the worker.
        worker_id: of the worker.
        types: the types to pull; for each, most attempts by stage, for stages with a limit of their
            own.
        slots: handlers that run at once.
        start: called with attempts to run.
        drop: called with attempts to end without a result.
        begin: called with an announced suspect once the platform knows that it begins.
        end_turn: called with an ended suspect once its result is stored.
        waits: whether an attempt still waits for a handler.
        objects: the object store of large contexts; None leaves them inline, for a gateway to
            store.
        stages: by type, the stages that the worker has handlers for.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        types: Mapping[str, Mapping[str, int]],
        slots: int,
        start: Callable[[list[ReadyTask]], object],
        drop: Callable[[list[AttemptId]], object],
        begin: Callable[[AttemptId], object],
        end_turn: Callable[[AttemptId], object],
        waits: Callable[[AttemptId], bool],
        objects: ObjectStore | None = None,
        stages: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self._settings = settings
        self._stages = stages
        self._slots = slots
        self._worker_id = worker_id
        self._types = types
        self._start = start
        self._drop = drop
        self._begin = begin
        self._end_turn = end_turn
        self._waits = waits
        self._objects = objects
        # Suspects that begin (True) or have ended.
        self._turns: asyncio.Queue[tuple[AttemptId, bool]] = asyncio.Queue()
        self._stopping = asyncio.Event()
        self._drained = asyncio.Event()
        self._store_s = math.inf
        self._backlog = BacklogLimit(settings.backlog)
        self._in_flight = InFlight(
            slots,
            lambda: self._heartbeats.room,
            len(types),
            lambda: self._backlog.at(time.monotonic()),
        )
        self._shipper: LogShipper | None = None
        self.readiness = Readiness(settings)
        self._heartbeats: HeartbeatSender
        self._unclaimed: UnclaimedAttempts
        self._results: ResultSender
        self._progress: ProgressReporter

    def ship_logs(self, buffer: LogBuffer) -> None:
        """Ships the lines of a buffer; called before `run`."""
        self._shipper = LogShipper(buffer)

    def wake_logs(self, urgent: bool) -> None:
        """Tells that lines of task logs wait (`LogShipper.wake`)."""
        if self._shipper is not None:
            self._shipper.wake(urgent)

    def add(self, result: StageResult) -> None:
        """Adds a result to report."""
        self._results.add(result)

    def report(self, attempt_id: AttemptId, progress: Progress) -> None:
        """Adds a report of a handler; may be called from any thread."""
        self._progress.report(attempt_id, progress)

    def announce(self, attempt_id: AttemptId) -> None:
        """Tells the platform that a suspect begins."""
        self._turns.put_nowait((attempt_id, True))

    def ended(self, attempt_id: AttemptId) -> None:
        """Waits until the result of a suspect is stored."""
        self._turns.put_nowait((attempt_id, False))

    def block(self, blocked: bool) -> None:
        """Sets whether no further attempts are taken for now."""
        self._in_flight.block(blocked)

    async def _serve_suspects(self) -> None:
        while True:
            attempt_id, begins = await self._turns.get()
            if not begins:
                await self._in_flight.wait_gone([attempt_id])
                self._end_turn(attempt_id)
            elif await self._heartbeats.announce(attempt_id):
                self._begin(attempt_id)

    def stop(self) -> None:
        """Ends pulling."""
        self.readiness.stopping = True
        self._stopping.set()

    def finish(self, store_s: float) -> None:
        """Ends `run` once all results are reported; no further result will be added.

        Args:
            store_s: seconds until attempts whose results wait for the object store are handed back.
        """
        self._store_s = store_s
        self._drained.set()

    async def run(
        self,
        on_ready: Callable[[], object],
        on_not_ready: Callable[[], object],
        on_pulled: Callable[[], object],
    ) -> None:
        """Runs until `stop` and `finish` were called.

        Args:
            on_ready: called when tasks can be pulled; over HTTP once a gateway has answered, also
                again after `on_not_ready`.
            on_not_ready: called when the gateway refuses this worker's credentials.
            on_pulled: called when no further attempt will be started.

        Raises:
            KafkaUnavailable: no broker answered at the start.
            SettingsError: there is no gateway at the address, or it has refused this worker for too
                long.
        """
        clock = asyncio.get_running_loop().time

        def accepted() -> None:
            self.readiness.accept()
            on_ready()

        def refused() -> None:
            self.readiness.refuse()
            on_not_ready()

        async with self._platform(accepted, refused) as (transport, make_puller, further):
            self._heartbeats = HeartbeatSender(transport, self._worker_id, clock, self._stop_lost)
            self._progress = ProgressReporter(
                asyncio.get_running_loop(),
                self._heartbeats.report,
                self._heartbeats.keeps_alive,
                self._in_flight.__contains__,
            )
            self._unclaimed = UnclaimedAttempts(
                transport, self._heartbeats, self._worker_id, self._types, clock, self._waits
            )
            self._results = ResultSender(
                transport,
                self._worker_id,
                self._on_sent,
                self._still_in_flight,
                self._in_flight.park,
                ResultContexts(self._objects, self._in_flight.type_of).stored if self._objects else None,
            )
            pulling = process.run_all(*(make_puller(name).run() for name in sorted(self._types)))

            async def work() -> None:
                await _until(self._stopping, pulling)
                on_pulled()
                await self._drained.wait()
                await self._results.wait_sent(self._store_s)
                if self._shipper is not None:
                    await self._shipper.drain(LOGS_S)

            if not self._settings.worker_gateway:
                accepted()
            await process.run_with_background(
                work(),
                self._results.run(),
                self._heartbeats.run(),
                self._unclaimed.run(),
                self._progress.run(),
                self._serve_suspects(),
                *further,
                *([] if self._shipper is None else [self._ship(self._shipper)]),
                # Guards this loop; handlers may block theirs for any time.
                process.watch_loop(process.STALL_S),
            )

    @asynccontextmanager
    async def _platform(
        self, on_accepted: Callable[[], object], on_refused: Callable[[], object]
    ) -> AsyncIterator[Platform]:
        """Connects to Kafka, or to a gateway."""
        settings, worker_id = self._settings, self._worker_id
        if settings.worker_gateway:
            async with GatewayClient(
                settings.worker_gateway,
                Credentials(settings.api_key, settings.api_key_file),
                patience_s=settings.refused_timeout_s,
                on_accepted=on_accepted,
                on_refused=on_refused,
            ) as gateway:
                yield (
                    HttpTransport(gateway, worker_id),
                    lambda name: HttpPuller(
                        gateway,
                        name,
                        self._in_flight,
                        self._heartbeats,
                        worker_id,
                        self._start,
                        self._types[name],
                    ),
                    [],
                )
            return
        async with running(make_producer(settings)) as producer:
            self.readiness.producer = producer
            transport = KafkaTransport(producer, settings, worker_id)
            yield (
                transport,
                lambda name: KafkaPuller(
                    settings,
                    name,
                    self._in_flight,
                    self._unclaimed,
                    worker_id,
                    self._start,
                    MemberData.of_worker(self._stages.get(name, ()), self._slots),
                ),
                [listen(settings, self._on_revoked)],
            )

    async def _ship(self, shipper: LogShipper) -> None:
        """Ships task logs by a connection of its own: they delay no claim and no heartbeat."""
        await retry_until_available(
            lambda: self._ship_once(shipper),
            waiting_for="connection for task logs",
            backoff=WORKER_BACKOFF,
            restarts_after_s=LASTING_ATTEMPT_S,
        )

    async def _ship_once(self, shipper: LogShipper) -> None:
        settings = self._settings
        if settings.worker_gateway:
            credentials = Credentials(settings.api_key, settings.api_key_file)
            async with GatewayClient(
                settings.worker_gateway, credentials, patience_s=settings.refused_timeout_s
            ) as gateway:
                await shipper.run(HttpLogTransport(gateway, self._worker_id))
            return
        async with running(make_producer(settings, compression="gzip")) as producer:
            await shipper.run(KafkaLogTransport(producer, settings.prefix, self._worker_id))

    def _still_in_flight(self, attempt_ids: list[AttemptId]) -> InFlight:
        # After a stall, this may run before the heartbeat step that would drop these attempts.
        self._heartbeats.drop_cut_off(attempt_ids)
        return self._in_flight

    def _on_sent(self, results: Sequence[StageResult]) -> list[AttemptId]:
        """Removes attempts whose results are stored; returns those that have a lease."""
        attempt_ids = [result.fence.attempt_id for result in results]
        # Slots of longer attempts do not become free within the horizon.
        quick = sum(
            result.finished_ms - result.started_ms <= HORIZON_S * 1000 and not result.handed_back
            for result in results
        )
        self._backlog.add_ended(quick, time.monotonic())
        never_claimed = self._remove(attempt_ids)
        return [attempt_id for attempt_id in attempt_ids if attempt_id not in never_claimed]

    def _remove(self, attempt_ids: list[AttemptId]) -> set[AttemptId]:
        """Removes attempts that are over; returns those that were never claimed."""
        never_claimed = self._unclaimed.end(attempt_ids)
        self._heartbeats.remove(attempt_ids)
        # Last, because it gives the room to the next puller.
        self._in_flight.remove(attempt_ids)
        return never_claimed

    def _stop_lost(self, attempt_ids: list[AttemptId]) -> None:
        self._unclaimed.lose(attempt_ids)
        self._in_flight.remove(attempt_ids)
        self._drop(attempt_ids)

    def _on_revoked(self, revocation: Revocation) -> None:
        revoked = [attempt_id for attempt_id in revocation.tasks if attempt_id in self._in_flight]
        if revoked:
            log.info(
                "The platform revoked attempts; stopping them",
                extra={
                    "event": "attempts_revoked",
                    "attempts": len(revoked),
                    "reason": revocation.why,
                },
            )
            self._remove(revoked)
            self._drop(revoked)


async def _until(stopping: asyncio.Event, work: Any) -> None:
    """Runs `work` until `stopping` is set, then cancels it.

    Raises:
        Exception: `work` raised it before.
    """
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
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
