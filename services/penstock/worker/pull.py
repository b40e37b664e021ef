"""Pulls tasks from Kafka. There is one puller for each task type.

A few new records are started first (`core.early_start`). They are claimed if they last, and their
offsets are committed once each of them has its result or its claim on Kafka. The records of all
other polls are claimed and committed before their handlers begin.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiokafka import TopicPartition

from penstock import process
from penstock.concurrency.cancellation import cleanup_timeout
from penstock.concurrency.retry import LASTING_ATTEMPT_S, WORKER_BACKOFF, retry_until_available
from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId
from penstock.core.going_on import GOES_ON_S
from penstock.errors import KafkaRefused, KafkaUnavailable, SessionLost
from penstock.kafka.client.connection import admin_client, running, translated
from penstock.kafka.client.group_consumer import GroupConsumer
from penstock.kafka.client.member_data import MemberData
from penstock.kafka.client.records import ready_task
from penstock.kafka.topology.topics import ready as ready_topic
from penstock.kafka.topology.topics import workers_group
from penstock.worker.in_flight import InFlight, Reservation
from penstock.worker.read_offsets import ReadOffsets
from penstock.worker.settings import WorkerSettings
from penstock.worker.unclaimed import UnclaimedAttempts

log = logging.getLogger(__name__)

# Most records of one poll, and so of one claim.
POLL_RECORDS = 1_000
# Seconds that an idle puller waits for records.
FETCH_S = 1.0
# A full worker polls this often: Kafka takes partitions from a member that does not poll.
MAX_POLL_INTERVAL_S = 30.0
TOPIC_RETRY_S = 1.0
# Seconds after which a type is tried again that Kafka refuses: an operator has to permit it.
REFUSED_S = 10.0
# Task-sync withdraws records that no worker takes. After this many seconds without room, or with a
# stalled event loop, fetched records may be withdrawn, so they are fetched again. A worker that
# takes records also fetches those again that it has held for so long, if they are old enough.
FULL_S = 0.25
# Seconds in which claims must reach Kafka before partitions are revoked. Otherwise the next member
# runs the attempts, too.
HAND_OVER_S = 2.0


class KafkaPuller:
    """Pulls tasks of one type from its ready topic.

    Args:
        settings: of the worker.
        type_name: the type.
        in_flight: the attempts in flight; bounds what is pulled.
        unclaimed: claims attempts.
        worker_id: of the worker.
        start: called with attempts to run.
        member: what the worker says of itself to those who describe the group.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        type_name: str,
        in_flight: InFlight,
        unclaimed: UnclaimedAttempts,
        worker_id: str,
        start: Callable[[list[ReadyTask]], object],
        member: MemberData,
    ) -> None:
        self._settings = settings
        self._type = type_name
        self._in_flight = in_flight
        self._unclaimed = unclaimed
        self._worker_id = worker_id
        self._start = start
        self._member = member

    async def run(self) -> None:
        """Pulls until cancelled.

        Waits for a missing topic, for an unavailable broker, and for a permission that it lacks.
        """
        topic = self._settings.prefix + ready_topic(self._type, 1).name
        group = workers_group(self._settings.prefix, self._type)

        async def pull() -> None:
            await self._wait_topic(topic)
            # Group eviction uses this name to find a worker whose leases have expired.
            consumer = GroupConsumer(self._settings, group, name=self._worker_id, member=self._member)
            member = Member(consumer, self._type, self._in_flight, self._unclaimed, self._start)
            consumer.follow(topic, member.hand_over, member.on_assigned)
            async with running(consumer):
                log.info(
                    "Waiting for tasks of a type", extra={"event": "pull_started", "task_type": self._type}
                )
                await member.run()

        while True:
            try:
                await retry_until_available(
                    pull,
                    waiting_for=f"tasks of type {self._type}",
                    backoff=WORKER_BACKOFF,
                    restarts_after_s=LASTING_ATTEMPT_S,
                )
            except KafkaRefused as error:
                log.error(  # noqa: TRY400 (the traceback says nothing about the access list)
                    "Kafka refuses this worker the tasks of a type; it runs those of its other types",
                    extra={"event": "type_refused", "task_type": self._type, "error": error},
                )
                await asyncio.sleep(REFUSED_S)

    async def _wait_topic(self, topic: str) -> None:
        logged = False
        while True:
            async with admin_client(self._settings) as admin:
                with translated():
                    if topic in await admin.list_topics():
                        return
            if not logged:
                log.warning(
                    "A type is not registered, or this user may not see its topic; `penstock types add NAME` registers it",
                    extra={"event": "topic_missing", "task_type": self._type, "topic": topic},
                )
                logged = True
            await asyncio.sleep(TOPIC_RETRY_S)


class Member:
    """One membership of a puller in its group.

    Args:
        consumer: of the group.
        type_name: the type.
        in_flight: the attempts in flight; bounds what is pulled.
        unclaimed: claims attempts.
        start: called with attempts to run.
    """

    def __init__(
        self,
        consumer: GroupConsumer,
        type_name: str,
        in_flight: InFlight,
        unclaimed: UnclaimedAttempts,
        start: Callable[[list[ReadyTask]], object],
    ) -> None:
        self._consumer = consumer
        self._type = type_name
        self._in_flight = in_flight
        self._unclaimed = unclaimed
        self._start = start
        self._offsets = ReadOffsets(unclaimed)
        # By partition, the timestamp of the last record that was taken.
        self._taken_ms: dict[TopicPartition, float] = {}
        # Records that were taken since some were found to be held for long.
        self._taken = 0
        self._assigned_s = time.monotonic()

    async def run(self) -> None:
        """Pulls and commits until cancelled.

        Raises:
            KafkaUnavailable: no broker answers, or records must be read again.
        """
        try:
            await process.run_all(self._pull_all(), self._commit_settled())
        finally:
            await self.hand_over()

    def on_assigned(self) -> None:
        """Begins the period in which records are claimed before they start."""
        self._assigned_s = time.monotonic()

    async def hand_over(self) -> None:
        """Claims running attempts and commits, so that the next members begin after them."""
        unsettled = self._offsets.unsettled
        try:
            async with cleanup_timeout(HAND_OVER_S):
                await self._unclaimed.claim(unsettled)
                await self._commit()
        except (TimeoutError, KafkaUnavailable, KafkaRefused) as error:
            # The next members read the records again; the fence accepts one result of each attempt.
            log.info(
                "Records are given to other members without a claim",
                extra={"event": "handed_over_unclaimed", "task_type": self._type, "error": repr(error)},
            )
        # Lost attempts start again when their records are read again.
        self._unclaimed.end(self._unclaimed.lost(unsettled))
        self._offsets.clear()

    async def _commit_settled(self) -> None:
        while True:
            await self._offsets.wait_due()
            if lost := self._unclaimed.lost(self._offsets.unsettled):
                raise KafkaUnavailable(f"the claims of {len(lost)} attempts did not reach Kafka")
            await self._commit()

    async def _commit(self) -> None:
        offsets = self._offsets.committable()
        if not offsets:
            return
        try:
            with translated():
                await self._consumer.commit(offsets)
        except SessionLost as error:
            # Other workers may claim these records, too; the fence accepts one result.
            log.info(
                "Partitions moved before the commit of their offsets",
                extra={"event": "commit_fenced", "task_type": self._type, "error": error},
            )
        self._offsets.committed(offsets)

    async def _pull_all(self) -> None:
        while True:
            if await self._consumer.ensure(FETCH_S):
                await self._pull()

    async def _pull(self) -> None:
        consumer = self._consumer
        began_s = time.monotonic()
        with translated():
            # Wait before the reservation, so that an idle type reserves no room.
            if not await consumer.wait_fetched(FETCH_S):
                return
        waiting_s = time.monotonic()
        # A handler may hold the interpreter, and with it this loop.
        stalled = waiting_s - began_s > FETCH_S + FULL_S
        async with self._in_flight.reserve(self._type, POLL_RECORDS, MAX_POLL_INTERVAL_S) as reservation:
            now_s = time.monotonic()
            late = stalled or now_s - waiting_s > FULL_S
            held = self._withdrawable(now_s)
            if late or held:
                consumer.drop_fetched(None if late else held)
            if reservation.size:
                # Keep the reservation: otherwise another type takes the room.
                with translated():
                    fetched = not (late or held) or await consumer.wait_fetched(FULL_S)
                if fetched:
                    await self._take(reservation)
                return
        # The worker has been full for long: poll with paused partitions, so that Kafka keeps this
        # member and no record is taken.
        paused = consumer.assignment()
        consumer.pause(*paused)
        with translated():
            await consumer.getmany(timeout_ms=0)
        consumer.resume(*(paused & consumer.assignment()))

    def _withdrawable(self, now_s: float) -> list[TopicPartition]:
        """Partitions whose fetched records may have been withdrawn meanwhile.

        Not while many are taken: no other worker is idle then, and a fetch costs some of them.
        """
        if not (held := self._consumer.fetched_since(FULL_S, now_s)):
            return []
        taken, self._taken = self._taken, 0
        policy = self._unclaimed.early_start
        old_ms = (time.time() - policy.old_s) * 1000
        return [tp for tp in held if taken < policy.many_records and self._taken_ms.get(tp, 0.0) <= old_ms]

    async def _take(self, reservation: Reservation) -> None:
        with translated():
            fetched = await self._consumer.getmany(timeout_ms=0, max_records=reservation.size)
        if not fetched:
            return
        # No await from here until the tasks are started or claimed: the partitions may be revoked.
        tasks, oldest_ms = self._add(fetched, reservation)
        if not tasks:
            return
        first = self._unclaimed.early_start.claims_first(
            records=len(tasks),
            oldest_s=time.time() - oldest_ms / 1000,
            assigned_s=time.monotonic() - self._assigned_s,
            suspects=any(ready.isolation is not None for ready in tasks),
        )
        try:
            if first:
                # An unclaimed attempt before these would keep their offsets from being committed.
                await self._unclaimed.claim(self._offsets.unsettled)
                await self._commit()
        finally:
            # Start them also when Kafka is unavailable or the worker stops: claimed attempts are
            # run or handed back. Attempts that were revoked or lost meanwhile are left out.
            if wanted := [ready for ready in tasks if ready.attempt_id in self._in_flight]:
                self._start(wanted)

    def _add(
        self, fetched: Mapping[TopicPartition, Sequence[Any]], reservation: Reservation
    ) -> tuple[list[ReadyTask], float]:
        """Adds what was fetched; returns its new tasks, and the timestamp of the oldest."""
        tasks: dict[AttemptId, ReadyTask] = {}
        read: list[tuple[TopicPartition, int, AttemptId | None]] = []
        oldest_ms, go_on_until_s = float("inf"), time.monotonic() + GOES_ON_S
        for partition, records in fetched.items():
            if records:
                self._taken_ms[partition] = records[-1].timestamp
                self._taken += len(records)
            for record in records:
                ready = ready_task(record, self._type)
                attempt_id = None if ready is None else ready.attempt_id
                read.append((partition, record.offset, attempt_id))
                # A rebalance repeats records, and after a crash a record may be there twice.
                if ready is not None and ready.attempt_id not in self._in_flight:
                    tasks[ready.attempt_id] = ready
                    ready.goes_on_until_s = go_on_until_s if ready.goes_on else 0.0
                    oldest_ms = min(oldest_ms, record.timestamp)
        self._in_flight.add(tasks.values(), reservation)
        self._unclaimed.add(tasks.values())
        for partition, offset, attempt_id in read:
            self._offsets.add(partition, offset, attempt_id)
        return list(tasks.values()), oldest_ms
