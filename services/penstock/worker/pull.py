"""Pulling: poll, claim, commit, hand over. One puller a task type."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer

from penstock.contracts.ready import MARK, ReadyTask
from penstock.core.leases import Key
from penstock.core.retry import RetryPolicy
from penstock.errors import InvalidRecord, SessionLost, Unavailable
from penstock.kafka.connection import admin_client, make_consumer, running, translated
from penstock.kafka.topics import ready as ready_topic
from penstock.kafka.topics import workers_group
from penstock.worker.hand import Hand, claims_of, key_of
from penstock.worker.heart import Heart, wait_room
from penstock.worker.link import Link
from penstock.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# Most records of one poll, and so of one claim.
POLL_RECORDS = 1_000
# Kafka takes partitions from a member that does not poll; a full worker polls nothing, but this often.
POLL_AT_LEAST_EVERY_S = 30.0
TOPIC_RETRY_S = 1.0
WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.2, factor=2, max_s=5.0, jitter=0)


class Puller:
    """Takes tasks of one type from its ready topic.

    Args:
        settings: of the worker.
        type_name: whose tasks.
        link: the way to Kafka.
        hand: what is in hand; decides whether there is room.
        heart: keeps alive what is in hand; decides, too.
        worker_id: who claims.
        start: begins attempts that were claimed.
        limits: tries, the first included, by stage, where a stage has its own limit.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        type_name: str,
        link: Link,
        hand: Hand,
        heart: Heart,
        worker_id: str,
        start: Callable[[list[ReadyTask]], object],
        limits: Mapping[str, int],
    ) -> None:
        self._settings = settings
        self._type = type_name
        self._link = link
        self._hand = hand
        self._heart = heart
        self._worker_id = worker_id
        self._start = start
        self._limits = limits

    async def run(self) -> None:
        """Pulls until cancelled; waits for a topic that does not exist yet, and for a broker that is away."""
        topic = self._settings.prefix + ready_topic(self._type, 1).name
        group = workers_group(self._settings.prefix, self._type)
        tries = 0
        while True:
            try:
                await self._wait_topic(topic)
                # By its name the platform takes a worker out of the group whose leases have run out.
                consumer = make_consumer(self._settings, group, topic, name=self._worker_id)
                async with running(consumer):
                    log.info("waiting for tasks of type %s", self._type)
                    tries = 0
                    while True:
                        await self._pull(consumer)
            except Unavailable as error:
                tries += 1
                log.warning("%s: pulling again soon: %s", self._type, error)
                await asyncio.sleep(WHILE_AWAY.delay_s(tries, 0.0))

    async def _wait_topic(self, topic: str) -> None:
        told = False
        while True:
            async with admin_client(self._settings) as admin:
                with translated():
                    if topic in await admin.list_topics():
                        return
            if not told:
                log.info(
                    "type %s is not registered yet (no topic %s, or one this user may not see): waiting",
                    self._type,
                    topic,
                )
                told = True
            await asyncio.sleep(TOPIC_RETRY_S)

    async def _pull(self, consumer: AIOKafkaConsumer) -> None:
        if not await wait_room(self._hand, self._heart, POLL_AT_LEAST_EVERY_S):
            # Full for long: show Kafka that somebody is there, and take nothing.
            paused = consumer.assignment()
            consumer.pause(*paused)
            with translated():
                await consumer.getmany(timeout_ms=0)
            consumer.resume(*(paused & consumer.assignment()))
            return
        most = int(min(self._hand.room, self._heart.room, POLL_RECORDS))
        with translated():
            fetched = await consumer.getmany(timeout_ms=1000, max_records=most)
        if not fetched:
            return
        claimed = self._read(record for records in fetched.values() for record in records)
        if claimed:
            # As of before it was sent: the platform may take it for silent from then on.
            heard_s = asyncio.get_running_loop().time()
            claims = claims_of(self._worker_id, claimed, self._limits)
            # Together: a poll must not wait for one limit after the other.
            await asyncio.gather(*map(self._link.send_heartbeat, claims))
            self._hand.take(claimed)
            self._heart.take(claims, heard_s)
        try:
            with translated():
                await consumer.commit()
        except SessionLost as lost:
            # Partitions moved meanwhile: others may claim these too, and the fence lets one result count.
            log.info("%s: claimed while partitions moved: %s", self._type, lost)
        finally:
            # Also when Kafka is away or the worker stops just now: what is claimed is run, or handed back.
            # But not what was taken back, or given up, meanwhile.
            if wanted := [found for found in claimed if key_of(found) in self._hand]:
                self._start(wanted)

    def _read(self, records: Iterable[Any]) -> list[ReadyTask]:
        found: dict[Key, ReadyTask] = {}
        for record in records:
            if record.value == MARK:
                continue
            try:
                ready = ReadyTask.decode(record.value or b"")
            except InvalidRecord as invalid:
                # Only task-sync writes here, so this is a foreign record: it stands for no task.
                log.error("skipped %s/%d@%d: %s", record.topic, record.partition, record.offset, invalid)  # noqa: TRY400
                continue
            # After a rebalance a record may come again, and after a crash it may be there twice.
            if key_of(ready) not in self._hand:
                found[key_of(ready)] = ready
        return list(found.values())
