"""Producers, consumers, administrators: the one place for aiokafka's options and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from itertools import chain
from typing import Any, TypeVar

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    CommitFailedError,
    GroupAuthorizationFailedError,
    IllegalGenerationError,
    InvalidTimestampError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    RebalanceInProgressError,
    TopicAuthorizationFailedError,
    UnknownMemberIdError,
)
from aiokafka.producer.message_accumulator import MessageAccumulator

from penstock.concurrency import cancellation
from penstock.errors import KafkaRefused, KafkaUnavailable, SessionLost
from penstock.kafka.client.compression import compress_quickly
from penstock.kafka.client.consumer import Consumer
from penstock.kafka.client.links import begin_close, guard_connections
from penstock.kafka.client.pending_writes import observe_writes, write_reason
from penstock.kafka.client.producer_epoch import ProducerEpoch
from penstock.kafka.client.record_sizes import REJECTION_BYTES
from penstock.kafka.client.refusals import REFUSALS, refusal_error
from penstock.kafka.client.security import arguments, why_refused
from penstock.settings import Kafka

# The limit of our own records, a little below the broker's.
MAX_RECORD_BYTES = 1_000_000

# How long a start that failed or was cancelled may take to end.
_ABANDON_S = 5.0

# How long a producer that stops may write what it has.
STOP_S = 5.0


@contextmanager
def translated() -> Iterator[None]:
    """Turns aiokafka's exceptions into ours.

    Raises:
        SessionLost: the member's generation is over, and its partitions belong to others now.
        KafkaRefused: an access list does not permit it.
        RecordsRefused: the broker refuses the record or the batch; the producer goes on.
        KafkaUnavailable: anything else the client library reports.
    """
    try:
        yield
    except (
        CommitFailedError,
        IllegalGenerationError,
        RebalanceInProgressError,
        UnknownMemberIdError,
    ) as error:
        raise SessionLost(f"Kafka: {error!r}") from error
    except (
        TopicAuthorizationFailedError,
        GroupAuthorizationFailedError,
        ClusterAuthorizationFailedError,
    ) as error:
        # No retry helps, and endless ones would hide the cause.
        raise KafkaRefused(
            f"Kafka does not permit this: {error!r}; `penstock topics acls` lists what each service needs"
        ) from error
    except REFUSALS as error:
        raise refusal_error({0: repr(error)}) from error
    except KafkaError as error:
        # When a cancellation meets an error, the client raises the error instead. A retry loop
        # would then never end.
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise asyncio.CancelledError from error
        if isinstance(error, InvalidTimestampError):
            # Not the record's fault: the same record is accepted once either is mended.
            raise KafkaUnavailable(
                f"Kafka: {error!r}: this process's clock differs from the broker's; set the clock, and run "
                "`penstock topics apply`, so that brokers stamp the records"
            ) from error
        raise KafkaUnavailable(f"Kafka: {_reason_of(error)}") from error


def _reason_of(error: KafkaError) -> str:
    """The cause for an operator; the texts of the client library describe the library."""
    no_metadata = type(error) is KafkaError and "cluster metadata" in str(error)
    if no_metadata or isinstance(error, (KafkaConnectionError, NodeNotReadyError, KafkaTimeoutError)):
        return "no broker answers"
    return write_reason(error) or repr(error)


def make_producer(settings: Kafka, *, compression: str | None = None) -> AIOKafkaProducer:
    """An idempotent producer with acks=all, not yet started; a refused batch does not end it.

    Args:
        settings: where.
        compression: of batches, such as `gzip`.
    """
    compress_quickly()
    producer = AIOKafkaProducer(
        **arguments(settings),
        acks="all",
        enable_idempotence=True,
        max_batch_size=256 * 1024,
        # The broker enforces each topic's limit; this one must only be above the largest of them.
        max_request_size=REJECTION_BYTES,
        compression_type=compression,
    )
    ProducerEpoch(producer)
    observe_writes(producer)
    return producer


def make_consumer(settings: Kafka, group: str | None, *topics: str, **options: Any) -> Consumer:
    """A consumer, not yet started; see `Consumer`."""
    return Consumer(settings, group, *topics, **options)


Client = TypeVar("Client", bound=AIOKafkaProducer | Consumer)


def own_cancellation() -> AbstractContextManager[None]:
    """Cancels the block if its task was cancelled, and only then.

    Raises:
        KafkaUnavailable: in the block, when the client library cancelled a part of itself.
    """
    return cancellation.own_cancellation(lambda: KafkaUnavailable("Kafka: the client has closed itself"))


async def start(client: AIOKafkaProducer | Consumer) -> None:
    """Starts a producer or consumer; closes its connections if that fails or is cancelled.

    Raises:
        KafkaUnavailable: no broker answered.
        KafkaRefused: a broker refuses this process.
    """
    await _start(client.start(), client.stop, client.client)


async def _start(
    starting: Awaitable[None], stop: Callable[[], Awaitable[None]], inner: AIOKafkaClient
) -> None:
    # Shielded, so that it ends even when cancelled: aiokafka would leak the connection that it is
    # opening.
    guard_connections(inner)
    task = asyncio.ensure_future(starting)
    try:
        with translated():
            await asyncio.shield(task)
    except BaseException as error:
        # Fails closed: raised again, or as its reason, and no connection stays open.
        try:
            await asyncio.wait({task}, timeout=_ABANDON_S)
            if task.done() and not task.cancelled():
                # Retrieved, or asyncio logs an exception that was never retrieved.
                task.exception()
        finally:
            # Also after a second cancellation.
            task.cancel()
            await stop()
        if not isinstance(error, KafkaUnavailable):
            raise
        if refused := await why_refused(inner):
            raise refused from error
        servers = ", ".join(f"{host}:{port}" for host, port, *_ in inner.hosts)
        raise KafkaUnavailable(f"{error} (at {servers})") from error


async def stop(client: AIOKafkaProducer | Consumer) -> None:
    """Stops a producer or consumer; closes its connections in any case.

    A client that cancels a part of itself meanwhile has stopped as well.

    The records that a producer cannot write within `STOP_S` fail. Otherwise it would wait for a
    broker, and hold up the end of its service for as long as an outage lasts.
    """
    timer: asyncio.TimerHandle | None = None
    if isinstance(client, AIOKafkaProducer) and client._sender.sender_task is not None:  # noqa: SLF001 (as above)
        timer = asyncio.get_running_loop().call_later(STOP_S, client._sender.sender_task.cancel)  # noqa: SLF001 (as above)
    begin_close(client.client)
    try:
        with own_cancellation():
            await client.stop()
    except BaseException as error:
        # Fails closed: after some failures `stop` raises before it has closed its connections. All
        # are raised again but a cancellation that the client made itself.
        await client.client.close()
        if not isinstance(error, KafkaUnavailable):
            raise
    finally:
        if timer is not None:
            timer.cancel()
            _fail_unwritten(client._message_accumulator)  # noqa: SLF001 (as above)


def _fail_unwritten(accumulator: MessageAccumulator) -> None:
    batches = [*accumulator._pending_batches, *chain.from_iterable(accumulator._batches.values())]  # noqa: SLF001 (it has no other way in)
    accumulator.fail_all(KafkaTimeoutError())
    for future in chain.from_iterable((b.future, *(f for f, _ in b._msg_futures)) for b in batches):  # noqa: SLF001 (as above)
        if future.done() and not future.cancelled():
            # Retrieved, or asyncio logs an exception that was never retrieved.
            future.exception()


@asynccontextmanager
async def running(client: Client) -> AsyncIterator[Client]:
    """Starts a producer or consumer and stops it at the end of the block.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    with own_cancellation():
        await start(client)
        try:
            yield client
        finally:
            await stop(client)


@asynccontextmanager
async def admin_client(settings: Kafka) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client, closed at the end of the block.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    client = AIOKafkaAdminClient(**arguments(settings))
    with own_cancellation():
        await _start(client.start(), client.close, client._client)  # noqa: SLF001 (it has no other way in)
        with translated():
            try:
                yield client
            finally:
                await client.close()
