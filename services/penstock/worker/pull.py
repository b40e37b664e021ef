"""Pulls tasks from Kafka: poll, claim, commit, start. There is one puller for each task type."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer

from penstock.concurrency.retry import LASTING_ATTEMPT_S, WORKER_BACKOFF, retry_until_available
from penstock.contracts.heartbeat import claims_of
from penstock.contracts.ready import MARK, ReadyTask
from penstock.core.attempt import AttemptId
from penstock.errors import InvalidRecord, SessionLost
from penstock.kafka.connection import admin_client, make_consumer, running, translated
from penstock.kafka.group_positions import GroupPositions
from penstock.kafka.topics import ready as ready_topic
from penstock.kafka.topics import workers_group
from penstock.worker.heartbeat_sender import HeartbeatSender, wait_room
from penstock.worker.in_flight import InFlight
from penstock.worker.kafka_transport import KafkaTransport
from penstock.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# Most records of one poll, and so of one claim.
POLL_RECORDS = 1_000
# A full worker polls this often: Kafka takes partitions from a member that does not poll.
MAX_POLL_INTERVAL_S = 30.0
TOPIC_RETRY_S = 1.0


class KafkaPuller:
    """Pulls tasks of one type from its ready topic.

    Args:
        settings: of the worker.
        type_name: the type.
        transport: writes claims.
        in_flight: the attempts in flight; bounds what is pulled.
        heartbeats: keeps attempts alive; bounds what is pulled, too.
        worker_id: of the worker.
        start: called with claimed attempts to run.
        limits: most attempts by stage, for stages with a limit of their own.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        type_name: str,
        transport: KafkaTransport,
        in_flight: InFlight,
        heartbeats: HeartbeatSender,
        worker_id: str,
        start: Callable[[list[ReadyTask]], object],
        limits: Mapping[str, int],
    ) -> None:
        self._settings = settings
        self._type = type_name
        self._transport = transport
        self._in_flight = in_flight
        self._heartbeats = heartbeats
        self._worker_id = worker_id
        self._start = start
        self._limits = limits

    async def run(self) -> None:
        """Pulls until cancelled; waits for a missing topic and for an unavailable broker."""
        topic = self._settings.prefix + ready_topic(self._type, 1).name
        group = workers_group(self._settings.prefix, self._type)

        async def pull() -> None:
            await self._wait_topic(topic)
            # Group eviction finds a worker whose leases have expired by this name.
            consumer = make_consumer(self._settings, group, name=self._worker_id)
            consumer.subscribe([topic], listener=GroupPositions(consumer))
            async with running(consumer):
                log.info(
                    "Waiting for tasks of a type", extra={"event": "pull_started", "task_type": self._type}
                )
                while True:
                    await self._pull(consumer)

        await retry_until_available(
            pull,
            waiting_for=f"tasks of type {self._type}",
            backoff=WORKER_BACKOFF,
            restarts_after_s=LASTING_ATTEMPT_S,
        )

    async def _wait_topic(self, topic: str) -> None:
        logged = False
        while True:
            async with admin_client(self._settings) as admin:
                with translated():
                    if topic in await admin.list_topics():
                        return
            if not logged:
                log.info(
                    "A type is not registered yet, or this user may not see its topic; waiting",
                    extra={"event": "topic_missing", "task_type": self._type, "topic": topic},
                )
                logged = True
            await asyncio.sleep(TOPIC_RETRY_S)

    async def _pull(self, consumer: AIOKafkaConsumer) -> None:
        if not await wait_room(self._in_flight, self._heartbeats, MAX_POLL_INTERVAL_S):
            # Full for a long time: poll with paused partitions, so that Kafka keeps this member and
            # no record is taken.
            paused = consumer.assignment()
            consumer.pause(*paused)
            with translated():
                await consumer.getmany(timeout_ms=0)
            consumer.resume(*(paused & consumer.assignment()))
            return
        max_records = int(min(self._in_flight.room, self._heartbeats.room, POLL_RECORDS))
        with translated():
            fetched = await consumer.getmany(timeout_ms=1000, max_records=max_records)
        if not fetched:
            return
        claimed = self._decode(record for records in fetched.values() for record in records)
        if claimed:
            # Before sending: the platform may count the lease from this moment.
            claimed_s = asyncio.get_running_loop().time()
            claims = claims_of(self._worker_id, claimed, self._limits)
            # Together: one after the other, each would cost the poll a round trip.
            await asyncio.gather(*map(self._transport.send_heartbeat, claims))
            self._in_flight.add(claimed)
            self._heartbeats.add(claims, claimed_s)
        try:
            with translated():
                await consumer.commit()
        except SessionLost as error:
            # Other workers may claim these records, too; the fence accepts one result.
            log.info(
                "Partitions moved between claim and commit",
                extra={"event": "commit_fenced", "task_type": self._type, "error": error},
            )
        finally:
            # Also when Kafka is unavailable or the worker stops: claimed attempts are run or handed
            # back. Attempts that were revoked or lost meanwhile are left out.
            if wanted := [ready for ready in claimed if ready.fence.attempt_id in self._in_flight]:
                self._start(wanted)

    def _decode(self, records: Iterable[Any]) -> list[ReadyTask]:
        """The tasks of records, without duplicates and attempts in flight."""
        tasks: dict[AttemptId, ReadyTask] = {}
        for record in records:
            if record.value == MARK:
                continue
            try:
                ready = ReadyTask.decode(record.value or b"", self._type)
            except InvalidRecord as invalid:
                # Only task-sync writes here: a foreign record stands for no task.
                log.error(  # noqa: TRY400 (the error is a field)
                    "Skipped an invalid record of a ready topic",
                    extra={
                        "event": "ready_record_skipped",
                        "topic": record.topic,
                        "partition": record.partition,
                        "offset": record.offset,
                        "error": str(invalid),
                    },
                )
                continue
            # A rebalance repeats records, and after a crash a record may be there twice.
            if ready.fence.attempt_id not in self._in_flight:
                tasks[ready.fence.attempt_id] = ready
        return list(tasks.values())
