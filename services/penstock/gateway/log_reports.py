"""`POST /logs`: lines of workers without Kafka, by a producer of their own.

Programs other than the SDK need not redact, so what has the form of a secret is removed here too.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import asyncpg
from aiohttp import web
from aiokafka import AIOKafkaProducer

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.inbound_logs import read_logs
from penstock.contracts.report_tokens import headers_of_tokens
from penstock.contracts.task_log import encode_record, partition_of
from penstock.core.log_chunk import Chunk, RawLine
from penstock.core.log_limits import cut
from penstock.core.redaction import BY_FORM
from penstock.core.report_tokens import ReportTokens
from penstock.errors import KafkaUnavailable, RecordsRefused, TooLarge
from penstock.gateway.audit import NOTHING_CHANGED
from penstock.gateway.bodies import read_json
from penstock.gateway.report_limiter import ReportLimiter
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.visibility import visible_ids
from penstock.http.server import body_bytes, respond
from penstock.kafka.client.connection import make_producer, running, translated
from penstock.kafka.topology.topics import TASK_LOGS

# Bytes of one body: it becomes one record for each partition.
MAX_BODY_BYTES = 900_000
# Bytes of bodies that Kafka does not have yet.
QUEUE_BYTES = 16 * 1024 * 1024


class LogReportRoutes:
    """The route of HTTP workers that ship lines.

    Args:
        settings: where Kafka is.
        pool: the database, which knows the types of tasks.
    """

    def __init__(self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._settings = settings
        self._tokens = ReportTokens(settings.report_keys)
        self._topic = settings.prefix + TASK_LOGS.name
        self._pool = pool
        self._limiter = ReportLimiter(QUEUE_BYTES)
        self._producer: AIOKafkaProducer | None = None

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.post("/logs", self.ship)]

    async def run(self) -> None:
        """Keeps the producer, until cancelled."""

        async def keep() -> None:
            async with running(make_producer(self._settings, compression="gzip")) as producer:
                self._producer = producer
                try:
                    await asyncio.Event().wait()
                finally:
                    self._producer = None

        await retry_until_available(keep, waiting_for="connection for task logs")

    async def ship(self, request: web.Request) -> web.Response:
        """POST /logs: answers 202 once Kafka has the lines. Repeating a request is harmless."""
        limit = min(self._settings.gateway_body_limit_bytes, MAX_BODY_BYTES)
        raw = await read_json(request, limit, unique=False)
        with self._limiter.reserve(body_bytes(request)):
            chunks = read_logs(raw)
            ids = sorted({chunk.run.task_id for chunk in chunks})
            visible = set(await visible_ids(request, self._pool, ids))
            accepted = [_without_secrets(chunk) for chunk in chunks if chunk.run.task_id in visible]
            request[NOTHING_CHANGED] = True
            await self._send(raw["worker"], accepted)
        return respond(
            {
                "accepted": len(accepted),
                "unknown": [task_id for task_id in ids if task_id not in visible],
            },
            status=202,
        )

    async def _send(self, worker: str, chunks: list[Chunk]) -> None:
        producer = self._producer
        if producer is None:
            raise KafkaUnavailable(f"Kafka at {self._settings.kafka}: not connected yet")
        with translated():
            count = len(await producer.partitions_for(self._topic))
        by_partition: defaultdict[int, list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            by_partition[partition_of(chunk.run.task_id, count)].append(chunk)
        try:
            with translated():
                sent = [
                    await producer.send(
                        self._topic,
                        encode_record(worker, some),
                        partition=partition,
                        headers=headers_of_tokens(self._tokens.of(chunk.run.attempt_id) for chunk in some),
                    )
                    for partition, some in by_partition.items()
                ]
                for future in sent:
                    await future
        except RecordsRefused as error:
            raise TooLarge(f"Kafka refuses these lines: {error.reason}: send fewer at once") from error


def _without_secrets(chunk: Chunk) -> Chunk:
    return dataclasses.replace(chunk, lines=list(_redacted(chunk)))


def _redacted(chunk: Chunk) -> Iterator[RawLine]:
    for at_ms, level, source, text, *fields in chunk.lines:
        kept = [BY_FORM.fields(each) for each in fields]
        yield (at_ms, level, BY_FORM.text(source), cut(BY_FORM.text(text)), *kept)
