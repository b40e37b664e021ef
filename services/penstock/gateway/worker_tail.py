"""Keeps the list of workers: writes what this gateway knows, and reads what all processes write.

Each gateway has the whole list, by a consumer without a group. At its start it reads the last hour.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from aiokafka import TopicPartition
from aiokafka.errors import UnknownTopicOrPartitionError

import penstock
from penstock.concurrency.retry import LASTING_ATTEMPT_S, retry_until_available
from penstock.contracts.inbound_workers import decode_statuses
from penstock.contracts.worker_status import encode_statuses
from penstock.core.position import Position
from penstock.core.worker_list import HOLD_S, INTERVAL_S, KEEP_S, OfType, WorkerList, WorkerStatus
from penstock.errors import Invalid, KafkaRefused, KafkaUnavailable
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.hold import WorkerRoutes
from penstock.gateway.ready_consumer import THIS_GATEWAY
from penstock.kafka.client import positions
from penstock.kafka.client.connection import make_consumer, running, translated
from penstock.kafka.client.consumer import Consumer
from penstock.kafka.processing.worker_status import StatusSender
from penstock.kafka.topology.topics import WORKERS
from penstock.settings import Kafka

log = logging.getLogger(__name__)

# How long one fetch waits for records, which end it: an idle gateway sends few. After it, the guard
# is asked whether the log is the same.
FETCH_S = HOLD_S
# Records that are read at a time, so that requests are answered between them.
MOST_RECORDS = 50
# Records that are read at the start: the last hour of 130 workers.
MOST_AT_START = 100_000
# Seconds until the topic is read again after a refusal, or while it does not exist.
REFUSED_S = 60.0


class WorkerTail:
    """Reads the topic of signs of life.

    Args:
        settings: where Kafka is.

    Attributes:
        workers: the list; its clock is that of the event loop.
    """

    def __init__(self, settings: Kafka) -> None:
        self._settings = settings
        self._partition = TopicPartition(settings.prefix + WORKERS.name, 0)
        self._position: Position | None = None
        self.workers = WorkerList()

    async def run(self) -> None:
        """Reads until cancelled."""
        while True:
            try:
                await retry_until_available(
                    self._read, waiting_for="signs of life of workers", restarts_after_s=LASTING_ATTEMPT_S
                )
            except KafkaRefused as error:
                # A gateway whose access list is older than this topic works on.
                log.warning(
                    "Signs of life of workers cannot be read; workers are listed by their groups only",
                    extra={"event": "workers_unreadable", "error": error},
                )
                await asyncio.sleep(REFUSED_S)

    async def _read(self) -> None:
        tp, loop = self._partition, asyncio.get_running_loop()
        rests = ((0.0, FETCH_S),)
        consumer = make_consumer(self._settings, None, name="penstock workers", rests=rests)
        async with running(consumer):
            try:
                position = await self._start(consumer)
            except KafkaUnavailable as error:
                if isinstance(error.__cause__, UnknownTopicOrPartitionError):
                    # It is no outage, and must not count as one.
                    raise KafkaRefused(f"there is no topic {tp.topic}: `penstock topics apply`") from error
                raise
            consumer.assign([tp])
            consumer.guard.start({tp: position})
            consumer.seek(tp, position.offset)
            while True:
                with translated():
                    fetched = await consumer.getmany(timeout_ms=int(FETCH_S * 1000), max_records=MOST_RECORDS)
                consumer.guard.ensure()
                for record in fetched.get(tp, ()):
                    self._add(record.value or b"", record.timestamp, loop.time())
                    self._position = consumer.guard.position(tp, record.offset + 1)
                    # A large record takes milliseconds, and requests are answered between two.
                    await asyncio.sleep(0)
                # Records that were fetched before are returned without a turn of the loop.
                await asyncio.sleep(0)

    async def _start(self, consumer: Consumer) -> Position:
        """The checked position; at first that of an hour ago."""
        tp = self._partition
        starts = await positions.check(consumer, {tp: self._position})
        start = starts[tp].position
        if self._position is not None:
            positions.report(starts)
            return start
        since_ms = round((time.time() - KEEP_S) * 1000)
        with translated():
            end = (await consumer.end_offsets([tp]))[tp]
            found = (await consumer.offsets_for_times({tp: since_ms}))[tp]
        since = end if found is None else found.offset
        return Position(max(since, end - MOST_AT_START), start.topic_id)

    def _add(self, value: bytes, at_ms: int, now_s: float) -> None:
        try:
            self.workers.add(decode_statuses(value), at_ms, now_s, len(value))
        except Invalid as error:
            # Workers write to this topic, and a faulty one must not hide the others.
            log.warning(
                "A sign of life of a worker cannot be read; skipping it",
                extra={"event": "worker_status_skipped", "error": str(error)},
            )


def status_sender(producer: BackgroundProducer, routes: WorkerRoutes) -> StatusSender:
    """Writes the status of this gateway and of the workers over HTTP that it has seen.

    Args:
        producer: writes the records.
        routes: of workers over HTTP.
    """
    written_at = datetime.min.replace(tzinfo=UTC)

    def values(stopped: bool) -> Iterator[bytes]:
        nonlocal written_at
        now = datetime.now(UTC)
        # After a long outage, those that the list would forget at once are left out.
        since = max(written_at, now - timedelta(seconds=KEEP_S))
        seen = [found.status(worker, now) for worker, found in routes.seen.since(since)]
        status = WorkerStatus(
            id=THIS_GATEWAY,
            kind="gateway",
            host=socket.gethostname(),
            interval_s=INTERVAL_S,
            types={name: OfType() for name in routes.reading},
            version=penstock.__version__,
            stopped=stopped,
        )
        yield from encode_statuses(status, seen)
        # The sender asks for the next value only once Kafka has the last one.
        written_at = now

    async def write(value: bytes) -> None:
        await producer.try_status(THIS_GATEWAY, value)

    return StatusSender(values, write, HOLD_S)
