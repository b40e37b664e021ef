"""The Kafka transport: writes batches of claims, heartbeats, results and ends of leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiokafka import AIOKafkaProducer

from penstock.concurrency.retry import WORKER_BACKOFF, retry_until_available
from penstock.contracts.going_on import headers_of_going_on
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.core.heartbeat_queue import Answer
from penstock.errors import KafkaUnavailable, RecordsRefused
from penstock.kafka.client.connection import translated
from penstock.kafka.processing.results import write_results
from penstock.kafka.processing.worker_status import require_topic
from penstock.kafka.topology.topics import HEARTBEATS, STAGE_RESULTS, WORKERS
from penstock.settings import Kafka
from penstock.worker.held_tokens import HeldTokens


class KafkaTransport:
    """Writes the records of a worker, in order.

    Args:
        producer: started, acks=all.
        settings: for the prefix of the topics.
        worker_id: the key of every record; records with one key stay in order.
        tokens: of the attempts that the worker holds.
    """

    def __init__(
        self, producer: AIOKafkaProducer, settings: Kafka, worker_id: str, tokens: HeldTokens
    ) -> None:
        self._producer = producer
        self._heartbeats = settings.prefix + HEARTBEATS.name
        self._results = settings.prefix + STAGE_RESULTS.name
        self._workers = settings.prefix + WORKERS.name
        self._worker_id = worker_id
        self._tokens = tokens
        self._record_key = worker_id.encode()

    async def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Returns once Kafka has it; tries again while Kafka is unavailable."""
        await retry_until_available(
            lambda: self._write_heartbeat(heartbeat),
            waiting_for=f"write to {self._heartbeats}",
            backoff=WORKER_BACKOFF,
        )

    async def try_heartbeat(self, heartbeat: Heartbeat) -> Mapping[AttemptId, Answer]:
        """Sends once, because the next heartbeat makes up for a lost one.

        Raises:
            KafkaUnavailable: it is not on Kafka.
        """
        await self._write_heartbeat(heartbeat)
        return dict.fromkeys(heartbeat.tasks, Answer.CONFIRMED)

    async def send_results(self, results: Sequence[StageResult]) -> None:
        """Returns once Kafka has them; tries again while Kafka is unavailable.

        The attempt of a result that Kafka refuses fails.

        Raises:
            TypeError, ValueError: one of them cannot be encoded; none is sent.
        """
        # Before the first try: an attempt that is lost meanwhile has no token any more, and its
        # result may count.
        tokens = self._tokens.copy(result.fence.attempt_id for result in results)

        async def write(value: bytes, results: Sequence[StageResult]) -> None:
            headers = tokens.headers(result.fence.attempt_id for result in results)
            headers += headers_of_going_on(results)
            with translated():
                await self._producer.send_and_wait(
                    self._results, value, key=self._record_key, headers=headers
                )

        await retry_until_available(
            lambda: write_results(write, self._worker_id, results),
            waiting_for=f"write to {self._results}",
            backoff=WORKER_BACKOFF,
        )

    async def send_status(self, value: bytes) -> None:
        """Writes a record about this worker once, because the next one makes up for a lost one.

        Raises:
            KafkaUnavailable: it is not on Kafka.
            KafkaRefused: this worker may not write to the topic, or there is none.
        """
        await require_topic(self._producer, self._workers)
        with translated():
            await self._producer.send_and_wait(self._workers, value, key=self._record_key)

    async def _write_heartbeat(self, heartbeat: Heartbeat) -> None:
        headers = heartbeat.headers() + self._tokens.headers(heartbeat.tasks)
        try:
            with translated():
                await self._producer.send_and_wait(
                    self._heartbeats, heartbeat.encode(), key=self._record_key, headers=headers
                )
        except RecordsRefused as error:
            # Heartbeats are small: the topic takes none at all, until an operator changes it. The
            # worker stops its attempts when their leases run out (`HeartbeatSender`).
            raise KafkaUnavailable(str(error)) from error
        if heartbeat.kind is Kind.RELEASE:
            self._tokens.drop(heartbeat.tasks)
