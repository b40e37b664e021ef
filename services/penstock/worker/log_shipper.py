"""Ships the lines of handlers, on the platform client's loop, by a connection of its own.

Lines are sent 200 ms after the first one, or at once when 64 KiB wait, an error is logged or an
attempt ends. Claims, heartbeats and results never wait for them. While Kafka is away the lines stay
in the buffer, which drops the oldest ones of the noisiest run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

import orjson
from aiokafka import AIOKafkaProducer

from penstock.concurrency.cancellation import cleanup_timeout
from penstock.concurrency.retry import LASTING_ATTEMPT_S, WORKER_BACKOFF, retry_until_available
from penstock.contracts.report_tokens import headers_of_tokens
from penstock.contracts.task_log import (
    MAX_CHUNKS,
    MAX_LINES,
    RECORD_BYTES,
    encode_record,
    partition_of,
)
from penstock.core.log_chunk import Chunk
from penstock.errors import Invalid, PenstockError
from penstock.kafka.client.connection import make_producer, running, translated
from penstock.kafka.topology.topics import TASK_LOGS
from penstock.worker.gateway_client import LOGS_ROUTE, GatewayClient
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

FLUSH_S = 0.2
# Ends of attempts that come together are sent together.
GATHER_S = 0.01
# Bytes of one flush.
FLUSH_MOST_BYTES = 2 * 1024 * 1024
# Seconds until lines are sent again after a refusal that no repetition helps.
REFUSED_S = 60.0
# Bytes of a record as it is sent, below the broker's limit also without compression.
ENCODED_BYTES = 900_000


class LogTransport(Protocol):
    """Sends chunks."""

    async def send(self, chunks: Sequence[Chunk]) -> None:
        """Returns once Kafka has them.

        Raises:
            Unavailable: some may not be there; sending all of them again is harmless.
            PenstockError: they are refused, and would be refused again.
        """
        ...


class LogShipper:
    """Ships what a buffer has. Its methods are called in the loop of `run`.

    Args:
        buffer: of the worker.
    """

    def __init__(self, buffer: LogBuffer) -> None:
        self._buffer = buffer
        self._waiting = asyncio.Event()
        self._urgent = asyncio.Event()
        self._idle = asyncio.Event()

    def wake(self, urgent: bool) -> None:
        """Tells that lines wait, and whether they must be shipped at once."""
        self._idle.clear()
        self._waiting.set()
        if urgent:
            self._urgent.set()

    async def run(self, transport: LogTransport) -> None:
        """Ships until cancelled."""
        while True:
            if not self._buffer:
                self._idle.set()
                await self._waiting.wait()
            if not self._urgent.is_set():
                await self._linger()
            await asyncio.sleep(GATHER_S)
            self._waiting.clear()
            self._urgent.clear()
            await self._ship(transport, self._buffer.take(FLUSH_MOST_BYTES))

    async def drain(self, within_s: float) -> None:
        """Ships all that waits, for at most so many seconds."""
        self.wake(urgent=True)
        try:
            async with cleanup_timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning(
                "Lines of task logs were not shipped before the worker ended",
                extra={
                    "event": "task_logs_lost",
                    "bytes": self._buffer.waiting_bytes,
                },
            )

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._urgent.wait()
        except TimeoutError:
            return

    async def _ship(self, transport: LogTransport, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        while True:
            try:
                await retry_until_available(
                    lambda: transport.send(chunks),
                    waiting_for="task logs",
                    backoff=WORKER_BACKOFF,
                )
            except Invalid as error:
                # All further lines would wait behind them. Readers find a gap, because lines have
                # numbers.
                log.error(  # noqa: TRY400 (the error is a field)
                    "Lines of task logs are refused for good, and are missing from their logs",
                    extra={
                        "event": "task_logs_invalid",
                        "lines": sum(len(chunk.lines) for chunk in chunks),
                        "error": str(error),
                    },
                )
                return
            except PenstockError as error:
                # Also a fatal one: the worker works without task logs.
                log.error(  # noqa: TRY400 (the error is a field)
                    "Task logs are refused; trying again later",
                    extra={"event": "task_logs_refused", "error": str(error)},
                )
                await asyncio.sleep(REFUSED_S)
            else:
                return


class KafkaLogTransport:
    """Writes chunks to the topic, each to the partition of its task.

    Args:
        producer: started, acks=all, of its own.
        prefix: of topics.
        worker_id: of the worker.
    """

    def __init__(self, producer: AIOKafkaProducer, prefix: str, worker_id: str) -> None:
        self._producer = producer
        self._topic = prefix + TASK_LOGS.name
        self._worker_id = worker_id

    async def send(self, chunks: Sequence[Chunk]) -> None:
        """See `LogTransport.send`."""
        with translated():
            count = len(await self._producer.partitions_for(self._topic))
            by_partition: defaultdict[int, list[Chunk]] = defaultdict(list)
            for chunk in chunks:
                by_partition[partition_of(chunk.run.task_id, count)].append(chunk)
            # In the order of each partition.
            sent = [
                await self._producer.send(
                    self._topic,
                    value,
                    partition=partition,
                    headers=headers_of_tokens(chunk.token for chunk in some),
                )
                for partition, some in by_partition.items()
                for value in records_of(self._worker_id, some)
            ]
            await asyncio.gather(*sent)


class HttpLogTransport:
    """Sends chunks to a gateway.

    Args:
        gateway: of its own.
        worker_id: of the worker.
    """

    def __init__(self, gateway: GatewayClient, worker_id: str) -> None:
        self._gateway = gateway
        self._worker_id = worker_id

    async def send(self, chunks: Sequence[Chunk]) -> None:
        """See `LogTransport.send`."""
        # A gateway takes no more bytes than a record has. A handler may log what JSON lacks, which
        # only the encoding of records replaces.
        for value in records_of(self._worker_id, chunks):
            await self._gateway.post(LOGS_ROUTE, orjson.loads(value))


async def ship(shipper: LogShipper, settings: WorkerSettings, worker_id: str) -> None:
    """Ships task logs by a connection of its own: they delay no claim and no heartbeat."""

    async def connect() -> None:
        if settings.worker_gateway:
            async with GatewayClient.of(settings) as gateway:
                await shipper.run(HttpLogTransport(gateway, worker_id))
            return
        async with running(make_producer(settings, compression="gzip")) as producer:
            await shipper.run(KafkaLogTransport(producer, settings.prefix, worker_id))

    await retry_until_available(
        connect,
        waiting_for="connection for task logs",
        backoff=WORKER_BACKOFF,
        restarts_after_s=LASTING_ATTEMPT_S,
    )


def records_of(worker_id: str, chunks: Sequence[Chunk]) -> Iterator[bytes]:
    """The values of records with these chunks, in their order and within the bounds of a record."""
    lines = [len(chunk.lines) for chunk in chunks]
    texts = (len(line[3]) + 60 for chunk in chunks for line in chunk.lines)
    if (
        len(chunks) <= MAX_CHUNKS
        and max(lines) <= MAX_LINES
        and 200 * len(chunks) + sum(texts) <= RECORD_BYTES
    ):
        value = encode_record(worker_id, chunks)
        # A character takes up to six bytes, and fields are not estimated.
        if len(value) <= ENCODED_BYTES:
            yield value
            return
    for half in _halves(chunks):
        yield from records_of(worker_id, half)


def _halves(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    if len(chunks) > 1:
        yield chunks[: len(chunks) // 2]
        yield chunks[len(chunks) // 2 :]
        return
    [chunk] = chunks
    middle = len(chunk.lines) // 2
    yield [Chunk(chunk.run, chunk.worker, chunk.first, chunk.lines[:middle])]
    yield [Chunk(chunk.run, chunk.worker, chunk.first + middle, chunk.lines[middle:], chunk.end)]
