"""A member of one type's group of workers, while HTTP workers request tasks of that type.

One loop fetches records into a bounded buffer, sends their claims to Kafka, commits the offsets and
answers the requests. Only this loop claims, so offsets are committed in order and never past an
unclaimed record. Records that are still in the buffer when the loop ends, or when their partitions
move, are not committed: the next owner of the partition fetches them again.

The loop fetches at most what the waiting requests ask for. When no worker requests the records, the
gateway leaves the group, provided that it has other members (`core.idle_backoff`): one of them may
have an idle worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from penstock.contracts.heartbeat import Heartbeat, claims_of
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.contracts.task_type import TaskType
from penstock.core.idle_backoff import IdleBackoff
from penstock.errors import (
    KafkaRefused,
    KafkaUnavailable,
    SessionLost,
    Unavailable,
)
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.hold_requests import ClaimedTasks, FetchedRecord, PendingRequest
from penstock.gateway.inline_contexts import with_inline_context
from penstock.gateway.settings import GatewaySettings
from penstock.kafka.client.connection import start, stop, translated
from penstock.kafka.client.fetch_wait import RESTS
from penstock.kafka.client.group_consumer import GroupConsumer
from penstock.kafka.client.member_data import MemberData
from penstock.kafka.client.records import ready_task
from penstock.kafka.topology import group_members
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready, workers_group
from penstock.objects import ObjectStore

log = logging.getLogger(__name__)

# Most bytes of contexts in one response; the first task is included however large it is.
MAX_RESPONSE_BYTES = 8 * 1024 * 1024

# How long one fetch waits for records. A stop waits for the fetch.
FETCH_MS = 500

# Seconds without a request after which fetched records are fetched again: task-sync withdraws
# records that wait for longer.
REFETCH_AFTER_S = 0.5

# `GET /workers` shows this name of the gateway.
THIS_GATEWAY = f"{socket.gethostname()}-{os.getpid()}"

# Makes the member of a group. It notices a rebalance within a second, unless it is alone.
# Its fetches are short: records that are fetched again wait for a fetch that is under way.
_make_member = partial(GroupConsumer, notice_s=1.0, member=MemberData(gateway=THIS_GATEWAY), rests=RESTS[1:])


class ReadyConsumer:
    """Claims tasks of one type for HTTP workers.

    Args:
        settings: limits and times.
        producer: sends the claims.
        objects: resolves large contexts, since HTTP workers cannot reach the object store.
        task_type: the type.
        backoff: how long unread records wait for a request before the gateway leaves the group.
        give_back: called with a worker and tasks whose claim may be on Kafka, and which nobody has.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        producer: BackgroundProducer,
        objects: ObjectStore,
        task_type: TaskType,
        backoff: IdleBackoff,
        give_back: Callable[[str, Sequence[ReadyTask]], None],
    ) -> None:
        self._settings = settings
        self._producer = producer
        self._objects = objects
        self._type = task_type
        self._backoff = backoff
        self._give_back = give_back
        self._group = workers_group(settings.prefix, task_type.name)
        self._requests: deque[PendingRequest] = deque()
        self._buffer: deque[FetchedRecord] = deque()
        self._request_added = asyncio.Event()
        # Held while records are claimed: partitions are revoked only between two rounds.
        self._round = asyncio.Lock()
        self.closed = False

    async def hold(
        self,
        worker: str,
        max_tasks: int,
        wait_s: float,
        is_connected: Callable[[], bool],
        max_attempts: Mapping[str, int],
    ) -> ClaimedTasks:
        """Returns up to `max_tasks` claimed tasks once there are any; none after `wait_s` seconds.

        Args:
            worker: id of the worker that claims them.
            max_tasks: most tasks.
            wait_s: how long to wait for the first task, in seconds.
            is_connected: whether the client is still connected.
            max_attempts: attempts, the first included, by stage, for stages with a limit of their
                own.

        Raises:
            Unavailable: no task was returned.
        """
        request = PendingRequest(worker, max_tasks, is_connected, max_attempts)
        self._requests.append(request)
        self._request_added.set()
        done, _ = await asyncio.wait({request.answer}, timeout=wait_s)
        if not done and not request.served:
            self._requests.remove(request)
            return ClaimedTasks.none()
        request.overdue = True
        return await request.answer

    def close(self) -> None:
        """Answers all waiting requests without tasks; `run` returns after the current round."""
        self.closed = True
        self._request_added.set()
        while self._requests:
            self._requests.popleft().succeed(ClaimedTasks.none())

    async def run(self) -> None:
        """Joins the group and serves requests, until none has come for `gateway_linger_s` seconds.

        Leaves sooner when unread records wait that other members of the group could take.

        Raises:
            Unavailable: Kafka or the object store is unavailable; all waiting requests received the
                error.
            SessionLost: the partitions moved to other members.
            KafkaRefused: this gateway is not allowed to read the topic.
        """
        topic = ready(self._type.name, self._type.partitions)
        consumer = _make_member(self._settings, self._group)
        consumer.follow(self._settings.prefix + topic.name, self._discard)
        try:
            # Task-sync creates the topic with its first release, which may not have happened yet.
            await create_topics(self._settings, [topic])
            await start(consumer)
            while await self._wait_for_request(consumer):
                await self._fetch(consumer)
                await self._serve(consumer)
        except (Unavailable, SessionLost) as error:
            _fail_all(self._requests, error)
            raise
        except KafkaRefused as error:
            # Unavailable for the client: another gateway may be allowed to read the topic.
            _fail_all(self._requests, KafkaUnavailable(str(error)))
            raise
        finally:
            self.close()
            await stop(consumer)

    async def _discard(self) -> None:
        """Discards the buffer; the next owners of the partitions fetch its records again."""
        async with self._round:
            self._buffer.clear()

    async def _wait_for_request(self, consumer: GroupConsumer) -> bool:
        """Waits for the next request; returns False when the consumer is to leave the group."""
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        while not self._requests and not self.closed:
            left_s = since_s + self._settings.gateway_linger_s - loop.time()
            self._request_added.clear()
            try:
                async with asyncio.timeout(min(self._backoff.delay_s, left_s)):
                    await self._request_added.wait()
            except TimeoutError:
                idle_release = left_s > 0 and await self._others_can_take(consumer)
                # No await between the check and `closed`: a request that comes later starts another
                # consumer.
                if not self._requests and (idle_release or left_s <= 0):
                    if idle_release:
                        log.info(
                            "No worker requests the records of a type; leaving its group to other members",
                            extra={"event": "idle_records_returned", "task_type": self._type.name},
                        )
                        self._backoff.left(loop.time())
                    self.closed = True
        if not self.closed and loop.time() - since_s >= REFETCH_AFTER_S:
            await self._fetch_again(consumer)
        return not self.closed

    async def _others_can_take(self, consumer: GroupConsumer) -> bool:
        """Whether there are unread records and other members; False when that is unknown."""
        try:
            with translated():
                unread = bool(self._buffer) or any(
                    [
                        (consumer.highwater(tp) or 0) > await consumer.position(tp)
                        for tp in consumer.assignment()
                    ]
                )
            return unread and await group_members.count(self._settings, self._group) > 1
        except (Unavailable, SessionLost) as error:
            log.info(
                "The members of a group are unknown; staying in it",
                extra={"event": "group_lookup_failed", "task_type": self._type.name, "error": error},
            )
            return False

    async def _fetch_again(self, consumer: GroupConsumer) -> None:
        """Drops records that were fetched and that no worker has received.

        Task-sync may have withdrawn their tasks meanwhile, and the fence would refuse their
        results.
        """
        async with self._round:
            consumer.drop_fetched()
            assigned = consumer.assignment()
            # From the last one: each partition continues with its first record.
            while self._buffer:
                record = self._buffer.pop()
                if record.partition in assigned:
                    consumer.seek(record.partition, record.offset)

    async def _fetch(self, consumer: GroupConsumer) -> None:
        requested = sum(request.max_tasks for request in self._requests)
        room = min(self._settings.gateway_buffer, requested) - len(self._buffer)
        if room <= 0:
            return
        with translated():
            fetched = await consumer.getmany(timeout_ms=0 if self._buffer else FETCH_MS, max_records=room)
        for partition, records in fetched.items():
            for record in records:
                task = ready_task(record, self._type.name)
                self._buffer.append(FetchedRecord(partition, record.offset, task))

    async def _serve(self, consumer: GroupConsumer) -> None:
        """One round: assigns records to requests, claims and commits them, and answers."""
        async with self._round:
            served = self._assign_records()
            if not served:
                return
            taken = [record for request in served for record in request.records]
            try:
                resolved = await asyncio.gather(
                    *(with_inline_context(self._objects, r.task) for r in taken if r.task)
                )
                # Before the claim is sent, since the lease starts when Kafka has the claim.
                claimed_s = asyncio.get_running_loop().time()
                if not await self._claim(served):
                    return
                lost = await _commit(consumer, taken)
            except Exception as error:
                # Requests in service are in no queue that `close` answers: without this they would
                # wait without end.
                for request in served:
                    request.fail(error)
                raise
            await self._answer_served(served, resolved, claimed_s)
            if isinstance(lost, SessionLost):
                raise lost

    async def _answer_served(
        self,
        served: list[PendingRequest],
        resolved: Iterable[ReadyTask | StageResult],
        claimed_s: float,
    ) -> None:
        remaining = iter(resolved)
        without_tasks = []
        for request in served:
            outcomes = [next(remaining) for record in request.records if record.task]
            unreadable = [outcome for outcome in outcomes if isinstance(outcome, StageResult)]
            try:
                if unreadable:
                    await self._producer.send_results(request.worker, unreadable)
            except Unavailable as error:
                # The lease expires, and the next claim reports the task.
                log.warning(
                    "Cannot report a task whose context cannot be read",
                    extra={"event": "unreadable_context_unreported", "error": error},
                )
            tasks = [outcome for outcome in outcomes if isinstance(outcome, ReadyTask)]
            if tasks or request.overdue or self.closed:
                request.succeed(ClaimedTasks(tasks, claimed_s))
            else:
                request.reset()
                without_tasks.append(request)
        # They wait again, before all others.
        self._requests.extendleft(reversed(without_tasks))

    def _assign_records(self) -> list[PendingRequest]:
        """Assigns buffered records to requests in the order of their arrival."""
        served = []
        while self._requests and self._buffer:
            request = self._requests.popleft()
            request.served = True
            if not request.is_connected():
                request.succeed(ClaimedTasks.none())
                continue
            size = count = 0
            suspected = False
            while self._buffer and count < request.max_tasks:
                task = self._buffer[0].task
                if task is not None:
                    if count and size + task.context.size > MAX_RESPONSE_BYTES:
                        break
                    # One suspect at a time, also for workers that do not isolate them.
                    if suspected and task.isolation is not None:
                        break
                    suspected = suspected or task.isolation is not None
                    size += task.context.size
                    count += 1
                request.records.append(self._buffer.popleft())
            served.append(request)
        return served

    async def _claim(self, served: Sequence[PendingRequest]) -> bool:
        """Claims the tasks of requests; False when that failed, and the requests with it.

        Such a claim may be on Kafka, or come there when a frozen broker goes on: the tasks would
        wait for their leases. They are given back, and their records are only committed.
        """
        try:
            await self._producer.send_heartbeats(_claims(served))
        except Unavailable as error:
            self._buffer.extendleft(reversed([r.without_task() for each in served for r in each.records]))
            for request in served:
                self._give_back(request.worker, request.tasks)
                request.fail(error)
            return False
        return True


def _fail_all(requests: deque[PendingRequest], error: Exception) -> None:
    while requests:
        requests.popleft().fail(error)


def _claims(served: Iterable[PendingRequest]) -> list[Heartbeat]:
    return [
        claim
        for request in served
        for claim in claims_of(request.worker, request.tasks, request.max_attempts, isolates=False)
    ]


async def _commit(
    consumer: GroupConsumer, taken: Sequence[FetchedRecord]
) -> Unavailable | SessionLost | None:
    """Commits claimed records; returns the error of a commit whose outcome is not known.

    Their workers get the tasks in any case. If the offsets are committed, no other member reads the
    records. If they are not, another member claims the tasks again, and the fence accepts one
    result.
    """
    try:
        with translated():
            await consumer.commit({record.partition: record.offset + 1 for record in taken})
    except (Unavailable, SessionLost) as error:
        return error
    return None
