"""The gateway as a member of one type's group of workers, while HTTP workers ask for that type.

One loop fetches records into a bounded buffer and hands them out: claim on Kafka, commit of the offsets, answer.
Since only this loop claims, offsets are committed in order and never past a record that nobody has claimed.
What is buffered but not handed out when the loop ends, or when its partitions move, was not committed and is
fetched again by whoever gets them.

No more is fetched than those who wait have asked for. Records that nobody here asks for are given back to the other members of
the group, if there are any (`core.giving_back`): a worker of theirs may be idle.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition

from penstock.contracts.context import Context
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import MARK, ReadyTask
from penstock.contracts.result import Failure, StageResult, encode_results
from penstock.core.completion import Outcome
from penstock.core.giving_back import Patience
from penstock.errors import (
    CorruptObject,
    InvalidRecord,
    KafkaRefused,
    KafkaUnavailable,
    SessionLost,
    Unavailable,
)
from penstock.gateway.broker import Broker
from penstock.gateway.settings import GatewaySettings
from penstock.kafka import membership
from penstock.kafka.connection import create_topics, make_consumer, start, translated
from penstock.kafka.topics import HEARTBEATS, STAGE_RESULTS, ready, workers_group
from penstock.objects import ObjectStore
from penstock.postgres.types import TaskType

log = logging.getLogger(__name__)

# Contexts in one answer; the first task is handed out however large it is.
ANSWER_BYTES = 8 * 1024 * 1024

# How long one look for records may take when nothing is there; a stop waits for it.
FETCH_MS = 500

# How soon a gateway hears that another has given partitions back, or asks for some.
NOTICE_S = 1.0


@dataclass(slots=True)
class _Record:
    """A fetched record; `task` is None when it cannot be read, and then it is only committed."""

    partition: TopicPartition
    offset: int
    task: ReadyTask | None


@dataclass(frozen=True, slots=True)
class Held:
    """What was claimed for one request.

    Attributes:
        tasks: their contexts inline.
        claimed_s: when the claim was sent, on the loop's clock; leases count from then on.
    """

    tasks: list[ReadyTask]
    claimed_s: float


@dataclass(slots=True)
class _Waiter:
    """A request that waits for tasks; while `served` its answer is on the way, and once `late` it must get one."""

    worker: str
    most: int
    here: Callable[[], bool]
    limits: Mapping[str, int]
    answer: asyncio.Future[Held]
    served: bool = False
    late: bool = False
    records: list[_Record] = field(default_factory=list)


class Intake(ConsumerRebalanceListener):  # type: ignore[misc] # aiokafka has no types
    """Hands out the tasks of one type.

    Args:
        settings: limits and times.
        broker: for claims.
        objects: resolves large contexts, which HTTP workers cannot reach.
        task_type: which type.
        patience: how long records that nobody asks for stay here while the group has others.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        broker: Broker,
        objects: ObjectStore,
        task_type: TaskType,
        patience: Patience,
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._objects = objects
        self._type = task_type
        self._patience = patience
        self._group = workers_group(settings.prefix, task_type.name)
        self._waiters: deque[_Waiter] = deque()
        self._buffer: deque[_Record] = deque()
        self._asked = asyncio.Event()
        # Held while tasks are handed out: partitions are given back only between two rounds.
        self._round = asyncio.Lock()
        self.closed = False

    async def hold(
        self, worker: str, most: int, wait_s: float, here: Callable[[], bool], limits: Mapping[str, int]
    ) -> Held:
        """Up to `most` claimed tasks as soon as there are any; none after `wait_s` seconds.

        Args:
            worker: for whom they are claimed.
            most: how many.
            wait_s: how long to wait for the first, in seconds.
            here: whether the worker still waits.
            limits: tries, the first included, by stage, where a stage has its own limit.

        Raises:
            Unavailable: nothing was handed out.
        """
        waiter = _Waiter(worker, most, here, limits, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._asked.set()
        done, _ = await asyncio.wait({waiter.answer}, timeout=wait_s)
        if not done and not waiter.served:
            self._waiters.remove(waiter)
            return _nothing()
        waiter.late = True
        return await waiter.answer

    def close(self) -> None:
        """Answers who waits with nothing; `run` ends after the round under way."""
        self.closed = True
        self._asked.set()
        while self._waiters:
            _answer(self._waiters.popleft(), _nothing())

    async def run(self) -> None:
        """Joins the group, hands out, and leaves once nobody has asked for `gateway_linger_s` seconds.

        Sooner while records wait here that other members could take.

        Raises:
            Unavailable: Kafka or the object store is away; who waits has been told.
            SessionLost: the partitions were given to others.
            KafkaRefused: this gateway may not read that topic.
        """
        topic = ready(self._type.name, self._type.partitions)
        consumer = make_consumer(self._settings, self._group, notice_s=NOTICE_S)
        consumer.subscribe([self._settings.prefix + topic.name], listener=self)
        try:
            # Task-sync creates it with the first release, which may be yet to come.
            await create_topics(self._settings, [topic])
            await start(consumer)
            while await self._somebody_asks(consumer):
                await self._fetch(consumer)
                await self._hand_out(consumer)
        except (Unavailable, SessionLost) as error:
            self._tell(error)
            raise
        except KafkaRefused as error:
            # To whoever asks it is no more than that: another gateway may be allowed what this one is not.
            self._tell(KafkaUnavailable(str(error)))
            raise
        finally:
            self.close()
            await consumer.stop()

    async def on_partitions_revoked(self, _revoked: Iterable[TopicPartition]) -> None:
        """What was not handed out is fetched again, by us or by others."""
        async with self._round:
            self._buffer.clear()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Nothing to restore: the group's offsets say where to go on."""

    async def _somebody_asks(self, consumer: AIOKafkaConsumer) -> bool:
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        while not self._waiters and not self.closed:
            left_s = since_s + self._settings.gateway_linger_s - loop.time()
            self._asked.clear()
            try:
                await asyncio.wait_for(self._asked.wait(), min(self._patience.seconds, left_s))
            except TimeoutError:
                unwanted = left_s > 0 and await self._wanted_elsewhere(consumer)
                # Decided without a pause: whoever asks from now on is told to find another.
                if not self._waiters and (unwanted or left_s <= 0):
                    if unwanted:
                        log.info("ready.%s: nobody asks here: given back to others", self._type.name)
                        self._patience.give_back(loop.time())
                    self.closed = True
        return not self.closed

    async def _wanted_elsewhere(self, consumer: AIOKafkaConsumer) -> bool:
        """Whether records wait here that another member of the group could hand out; in doubt not."""
        try:
            with translated():
                unread = bool(self._buffer) or any(
                    [
                        (consumer.highwater(tp) or 0) > await consumer.position(tp)
                        for tp in consumer.assignment()
                    ]
                )
            return unread and await membership.count(self._settings, self._group) > 1
        except (Unavailable, SessionLost) as error:
            log.info("ready.%s: it is not known who else is in the group: %s", self._type.name, error)
            return False

    async def _fetch(self, consumer: AIOKafkaConsumer) -> None:
        wanted = sum(waiter.most for waiter in self._waiters)
        room = min(self._settings.gateway_buffer, wanted) - len(self._buffer)
        if room <= 0:
            return
        with translated():
            fetched = await consumer.getmany(timeout_ms=0 if self._buffer else FETCH_MS, max_records=room)
        for partition, records in fetched.items():
            for record in records:
                self._buffer.append(_Record(partition, record.offset, _read(partition, record)))

    async def _hand_out(self, consumer: AIOKafkaConsumer) -> None:
        async with self._round:
            served = self._match()
            if not served:
                return
            taken = [record for waiter in served for record in waiter.records]
            try:
                contexts = await asyncio.gather(*(self._resolve(r.task) for r in taken if r.task))
                # Before it is sent: the platform may take them for silent from then on.
                claimed_s = asyncio.get_running_loop().time()
                await self._claim(served)
                with translated():
                    await consumer.commit(_next_offsets(taken))
            except (Unavailable, SessionLost) as error:
                # Claimed or not, nobody was told: the next to get these records claims them again.
                self._buffer.extendleft(reversed(taken))
                for waiter in served:
                    _fail(waiter, error)
                if isinstance(error, SessionLost):
                    raise
                return
            resolved = iter(contexts)
            empty_handed = []
            for waiter in served:
                outcomes = [next(resolved) for record in waiter.records if record.task]
                try:
                    await self._report_corrupt(
                        waiter.worker, [o for o in outcomes if isinstance(o, StageResult)]
                    )
                except Unavailable as error:
                    # Its lease runs out, and the next to get it says so again.
                    log.warning("a context that cannot be read was not reported: %s", error)
                tasks = [task for task in outcomes if isinstance(task, ReadyTask)]
                if tasks or waiter.late or self.closed:
                    _answer(waiter, Held(tasks, claimed_s))
                else:
                    empty_handed.append(waiter)
            self._wait_on(empty_handed)

    def _wait_on(self, waiters: list[_Waiter]) -> None:
        """Who got only records that hold nothing for a worker waits on, as the first, until its time is over."""
        for waiter in waiters:
            waiter.served = False
            waiter.records = []
        self._waiters.extendleft(reversed(waiters))

    def _match(self) -> list[_Waiter]:
        """Gives buffered records to waiters, first come first served."""
        served = []
        while self._waiters and self._buffer:
            waiter = self._waiters.popleft()
            waiter.served = True
            if not waiter.here():
                _answer(waiter, _nothing())
                continue
            size = count = 0
            while self._buffer and count < waiter.most:
                task = self._buffer[0].task
                if task is not None:
                    if count and size + task.context.size > ANSWER_BYTES:
                        break
                    size += task.context.size
                    count += 1
                waiter.records.append(self._buffer.popleft())
            served.append(waiter)
        return served

    async def _resolve(self, task: ReadyTask) -> ReadyTask | StageResult:
        if task.context.ref is None:
            return task
        try:
            context: Context = await self._objects.check_out(task.context)
        except CorruptObject as error:
            # No worker could do anything with it; the reason belongs to the task's history.
            failure = Failure(kind="CorruptObject", message=str(error))
            return StageResult(fence=task.fence, outcome=Outcome.FAIL, permanent=True, error=failure)
        return dataclasses.replace(task, context=context)

    async def _claim(self, served: Iterable[_Waiter]) -> None:
        records: list[tuple[bytes | None, bytes]] = []
        for waiter in served:
            alike: defaultdict[tuple[int, int | None], list[tuple[int, int, int]]] = defaultdict(list)
            for record in waiter.records:
                if record.task is not None:
                    fence = record.task.fence
                    terms = record.task.lease_ms, waiter.limits.get(fence.stage)
                    alike[terms].append((fence.id, fence.step, fence.attempt))
            claims = [
                Heartbeat(Kind.CLAIM, waiter.worker, lease_ms, keys, limit)
                for (lease_ms, limit), keys in alike.items()
            ]
            records += [(waiter.worker.encode(), claim.encode()) for claim in claims]
        await self._broker.send(HEARTBEATS, records)

    async def _report_corrupt(self, worker: str, results: list[StageResult]) -> None:
        if results:
            record = (worker.encode(), encode_results(worker, results))
            await self._broker.send(STAGE_RESULTS, [record])

    def _tell(self, error: Exception) -> None:
        while self._waiters:
            _fail(self._waiters.popleft(), error)


def _read(partition: TopicPartition, record: object) -> ReadyTask | None:
    value: bytes = record.value or b""  # type: ignore[attr-defined] # aiokafka has no types
    if value == MARK:
        return None
    try:
        return ReadyTask.decode(value)
    except InvalidRecord as error:
        # Only task-sync writes here; whoever else did cannot be told, and what is behind it must go on.
        log.error("%s/%s: skipped: %s", partition.topic, partition.partition, error)  # noqa: TRY400 (no bug of ours)
        return None


def _next_offsets(records: Iterable[_Record]) -> dict[TopicPartition, int]:
    offsets: dict[TopicPartition, int] = {}
    for record in records:
        offsets[record.partition] = record.offset + 1
    return offsets


def _nothing() -> Held:
    return Held([], asyncio.get_running_loop().time())


def _answer(waiter: _Waiter, held: Held) -> None:
    waiter.served = True
    if not waiter.answer.done():
        waiter.answer.set_result(held)


def _fail(waiter: _Waiter, error: Exception) -> None:
    waiter.served = True
    if not waiter.answer.done():
        told = error if isinstance(error, Unavailable) else KafkaUnavailable(f"{error}: ask again")
        waiter.answer.set_exception(told)
