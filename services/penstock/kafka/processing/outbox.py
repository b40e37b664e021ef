"""Publishes the outbox: events, callbacks and revocations, after commit and at least once.

A crash between commit and publication leaves the outbox row and the callback's `due_at`, from which
the sweepers publish again. Consumers recognise repeats by the event's id, the callbacks service by
the attempt number.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import DefaultPartitioner

from penstock.concurrency.batcher import Batcher
from penstock.concurrency.retry import retry_until_available
from penstock.contracts.event import Callback, OutboxEntry, encode_callbacks
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.errors import RecordsRefused, Unavailable
from penstock.kafka.client.connection import own_cancellation, translated
from penstock.kafka.client.pending_writes import require_writable
from penstock.kafka.client.refusals import refusal_error
from penstock.kafka.client.sending import Record, refusals, send_in_batches
from penstock.kafka.topology.topics import CALLBACKS, CALLBACKS_DIVERTED, EVENTS, REVOKED
from penstock.settings import Kafka

log = logging.getLogger(__name__)

# The Java client's algorithm: all clients put a record key's records on the same partition.
_PARTITIONER = DefaultPartitioner()

# Seconds for which events wait for those of the next transactions. No task waits for them: after a
# crash the sweeper publishes them. Callbacks and revocations do not wait.
LINGER_S = 0.03
# Rows that are published within this time are deleted by one statement.
DELETE_EVERY_S = 0.1
# Leases revoked by one record, well below what a record may hold.
REVOKED_PER_RECORD = 10_000
# Most revoked attempts that a process keeps while Kafka is away, some 20 MB. The sweeper and the
# heartbeat processor revoke the others.
MAX_UNREVOKED = 100_000


@functools.lru_cache(maxsize=4096)
def partition_of(record_key: bytes, partitions: int) -> int:
    """The partition of a record key on a topic with so many partitions."""
    numbers = list(range(partitions))
    return int(_PARTITIONER(record_key, numbers, numbers))


async def send_all(producer: AIOKafkaProducer, topic: str, records: Iterable[Record]) -> None:
    """Writes records to a topic and returns once Kafka has them all.

    Each goes to the partition of its key, as every Kafka client would choose it; keyless ones go to
    the first.

    Raises:
        KafkaUnavailable: some may not be there; send all of them again.
        RecordsRefused: Kafka refuses some, and has the others.
    """
    records = list(records)
    if not records:
        return
    require_writable(producer, topic)
    with own_cancellation(), translated():
        partitions = sorted(await producer.partitions_for(topic))
    # By partition: the positions of its records.
    by_partition: dict[int, list[int]] = {}
    for position, (record_key, *_rest) in enumerate(records):
        partition = partitions[0] if record_key is None else _PARTITIONER(record_key, partitions, partitions)
        by_partition.setdefault(partition, []).append(position)
    sent = [
        (positions, await send_in_batches(producer, topic, partition, map(records.__getitem__, positions)))
        for partition, positions in by_partition.items()
    ]
    found = {
        positions[index]: why
        for positions, batches in sent
        for index, why in (await refusals(batches)).items()
    }
    if found:
        raise refusal_error(found)


async def publish(
    producer: AIOKafkaProducer,
    settings: Kafka,
    record_keys: Sequence[bytes],
    events: Sequence[bytes],
    callbacks: Sequence[Callback] = (),
) -> None:
    """Writes events (keyed by task) and callbacks (keyed by their targets' URLs) to their topics.

    Raises:
        KafkaUnavailable: publish all of them again.
        RecordsRefused: Kafka refuses some events, and has all others. A callback that it refuses
            stays pending, and the requeuer ends it (`redeliver`).
    """
    # At once, because a topic that takes no records must not hold up the other one.
    outcomes = await asyncio.gather(
        send_all(producer, settings.prefix + EVENTS.name, zip(record_keys, events, strict=True)),
        send_callbacks(producer, settings.prefix + CALLBACKS.name, callbacks),
        return_exceptions=True,
    )
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        # A refusal says that all others are there.
        raise min(errors, key=lambda error: isinstance(error, RecordsRefused))


async def send_callbacks(
    producer: AIOKafkaProducer, topic: str, callbacks: Iterable[Callback]
) -> dict[str, str]:
    """Writes callbacks to a topic, many in a record, and waits until Kafka has them all.

    Returns Kafka's reason for each callback that it refuses, by id.

    Each goes to the partition of its target, in the given order. The key of a record with one
    callback is the target's URL, so all namespaces that call a URL are on one partition.

    Raises:
        KafkaUnavailable: some may not be there; send all of them again.
    """
    callbacks = list(callbacks)
    if not callbacks:
        return {}
    require_writable(producer, topic)
    with own_cancellation(), translated():
        partitions = sorted(await producer.partitions_for(topic))
    by_partition: dict[int, list[Callback]] = {}
    # A URL often has many callbacks, and computing its partition takes half the time of this
    # function.
    partition_by_url: dict[str, int] = {}
    for callback in callbacks:
        url = callback.target.url
        partition = partition_by_url.get(url)
        if partition is None:
            partition = partition_by_url[url] = _PARTITIONER(url.encode(), partitions, partitions)
        by_partition.setdefault(partition, []).append(callback)
    sent = [
        (partition, await send_in_batches(producer, topic, partition, encode_callbacks(of_partition)))
        for partition, of_partition in by_partition.items()
    ]
    refused: dict[str, str] = {}
    for partition, batches in sent:
        if await refusals(batches):
            # Each alone; a callback that is written twice is called once, because its attempt is
            # claimed once.
            alone = by_partition[partition]
            records = [(callback.target.url.encode(), callback.encode()) for callback in alone]
            found = await refusals(await send_in_batches(producer, topic, partition, records))
            refused |= {alone[position].id: why for position, why in found.items()}
    for callback_id, why in refused.items():
        log.error(
            "Kafka refuses the record of a callback",
            extra={"event": "callback_refused", "callback": callback_id, "topic": topic, "error": why},
        )
    return refused


async def redeliver(
    producer: AIOKafkaProducer, settings: Kafka, due: Sequence[tuple[Callback, bool]]
) -> dict[str, str]:
    """Writes due callbacks, each with whether it is diverted, to the topic of its path.

    Returns Kafka's reason for each callback that it refuses, by id: no attempt of it can follow.

    Raises:
        KafkaUnavailable: write all of them again.
    """
    refused: dict[str, str] = {}
    for topic, path in ((CALLBACKS, False), (CALLBACKS_DIVERTED, True)):
        on_path = [callback for callback, diverted in due if diverted is path]
        refused |= await send_callbacks(producer, settings.prefix + topic.name, on_path)
    return refused


async def revoke(producer: AIOKafkaProducer, settings: Kafka, revocation: Revocation) -> None:
    """Publishes a revocation for all workers.

    When the topic refuses it, the handlers run to their ends, and the fence rejects their results.

    Raises:
        KafkaUnavailable: some workers may not receive it.
    """
    attempt_ids = revocation.tasks
    records = [
        (None, Revocation(revocation.why, attempt_ids[begin : begin + REVOKED_PER_RECORD]).encode())
        for begin in range(0, len(attempt_ids), REVOKED_PER_RECORD)
    ]
    try:
        await send_all(producer, settings.prefix + REVOKED.name, records)
    except RecordsRefused as error:
        log.error(  # noqa: TRY400 (the traceback says nothing about the attempts)
            "Kafka refuses revocations; the handlers of these attempts run to their ends",
            extra={"event": "revocations_refused", "attempts": len(attempt_ids), "error": str(error)},
        )


class Publisher:
    """Publishes committed outbox entries in the background, then deletes their rows.

    One batch is on its way at a time: many concurrent writes to one partition wait for each other's
    batches, and aiokafka's producer gives up on one that was overtaken some hundred times.

    When a publication fails the row stays, and the sweeper publishes it again. This process tries
    its revocations again: handlers run on until their workers receive them.

    Args:
        producer: acks=all.
        settings: for the topics' prefix.
        delete_published: deletes outbox rows by id.
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        settings: Kafka,
        delete_published: Callable[[Sequence[int]], Awaitable[None]],
    ) -> None:
        self._producer = producer
        self._settings = settings
        self._delete_published = delete_published
        self._entries: Batcher[OutboxEntry] = Batcher(
            self._publish, max_size=math.inf, linger_s=lambda _previous: LINGER_S
        )
        self._published_ids: Batcher[int] = Batcher(
            self._delete, max_size=math.inf, linger_s=lambda _previous: DELETE_EVERY_S
        )
        # Revocations that Kafka did not get, and how many attempts they have.
        self._unrevoked: Batcher[Revocation] = Batcher(self._revoke_again, max_size=math.inf)
        self._unrevoked_attempts = 0
        self._draining = False
        self._error: BaseException | None = None
        self._failed = asyncio.Event()

    def enqueue(self, entry: OutboxEntry) -> None:
        """Takes over what a committed transaction wrote to the outbox."""
        if entry.events or entry.callbacks or entry.revocation:
            self._entries.add(entry, urgent=bool(entry.callbacks or entry.revocation))

    @property
    def in_flight(self) -> int:
        """Transactions whose outbox entries are on their way to Kafka."""
        return len(self._entries)

    def fail(self, error: BaseException) -> None:
        """Ends `run` with an error: the producer is broken for good, or the publisher is."""
        self._error = self._error or error
        self._failed.set()

    async def run(self) -> None:
        """Waits until cancelled, or until publishing is impossible.

        Raises:
            Fatal: this producer is broken for good.
        """
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    async def drain(self) -> None:
        """Waits until all enqueued entries are published and deleted, or left to the sweeper.

        When it is cancelled, it ends what is under way, so that the producer can be closed.
        """
        self._draining = True
        try:
            await self._entries.wait_idle()
            await self._unrevoked.wait_idle()
            await self._published_ids.wait_idle()
        finally:
            await self._entries.stop()
            await self._unrevoked.stop()
            await self._published_ids.stop()

    async def _publish(self, entries: Sequence[OutboxEntry]) -> None:
        record_keys = [record_key for entry in entries for record_key in entry.record_keys]
        events = [event for entry in entries for event in entry.events]
        callbacks = [callback for entry in entries for callback in entry.callbacks]
        revoked: dict[str, list[AttemptId]] = {}
        for entry in entries:
            if entry.revocation:
                revoked.setdefault(entry.revocation.why, []).extend(entry.revocation.tasks)
        refused: frozenset[int] = frozenset()
        revoking = asyncio.ensure_future(self._revoke_all(revoked))
        try:
            try:
                await publish(self._producer, self._settings, record_keys, events, callbacks)
            except RecordsRefused as error:
                refused = frozenset(error.records)
                log.error(  # noqa: TRY400 (the traceback says nothing about the events)
                    "Kafka refuses events; the sweeper parks them",
                    extra={"event": "events_refused", "events": len(refused), "error": str(error)},
                )
        except Unavailable as error:
            log.warning(
                "Kafka is unavailable; the sweeper publishes these events",
                extra={"event": "publication_left_to_sweeper", "events": len(events), "error": str(error)},
            )
        except Exception as error:  # noqa: BLE001 (raised by `run`)
            self.fail(error)
        else:
            begin = 0
            for entry in entries:
                end = begin + len(entry.events)
                done = entry.revocation is None or await revoking
                if done and entry.outbox_id is not None and refused.isdisjoint(range(begin, end)):
                    self._published_ids.add(entry.outbox_id)
                begin = end
        finally:
            await revoking

    async def _revoke_all(self, revoked: Mapping[str, Sequence[AttemptId]]) -> bool:
        """Revokes attempts, by reason; keeps those that Kafka does not take, and is False then."""
        done = True
        try:
            for why, attempt_ids in revoked.items():
                try:
                    await revoke(self._producer, self._settings, Revocation(why, attempt_ids))
                except Unavailable:
                    done = False
                    if kept := attempt_ids[: MAX_UNREVOKED - self._unrevoked_attempts]:
                        self._unrevoked_attempts += len(kept)
                        self._unrevoked.add(Revocation(why, kept))
        except Exception as error:  # noqa: BLE001 (raised by `run`)
            self.fail(error)
        return done

    async def _revoke_again(self, revocations: Sequence[Revocation]) -> None:
        for revocation in revocations:

            async def attempt(revocation: Revocation = revocation) -> None:
                try:
                    await revoke(self._producer, self._settings, revocation)
                except Unavailable:
                    # The sweeper revokes what was cancelled, and the heartbeat processor the rest.
                    if not self._draining:
                        raise

            try:
                await retry_until_available(attempt, waiting_for="revocation of attempts")
            except Exception as error:  # noqa: BLE001 (raised by `run`)
                self.fail(error)
            self._unrevoked_attempts -= len(revocation.tasks)

    async def _delete(self, ids: Sequence[int]) -> None:
        try:
            await self._delete_published(ids)
        except Unavailable as error:
            # The sweeper publishes them a second time, which their ids make harmless.
            log.warning(
                "PostgreSQL is unavailable; published outbox rows are not deleted",
                extra={"event": "published_rows_kept", "rows": len(ids), "error": str(error)},
            )
        except Exception as error:  # noqa: BLE001 (raised by `run`)
            self.fail(error)
