"""Lets an idempotent producer go on after a batch that failed.

The broker expects the records of a producer's epoch in sequence, on each partition. aiokafka counts
a batch before it sends it and never takes the count back. After a failed batch, every later batch
of the partition would get OUT_OF_ORDER_SEQUENCE_NUMBER. The Java client begins a new epoch, in
which sequences begin at 0 (KIP-360), and so does this module.

A batch that is sent again belongs to its old epoch. aiokafka has one batch of a partition in
flight, so no batch of the new epoch overtakes it. Batches of an epoch that fail together begin one
new epoch.

When the broker refuses the producer itself several times in a row, the producer gets another id. If
it is refused again as often, or if aiokafka's sender has ended, each send raises `SessionLost`: the
process ends, instead of trying again for ever beside a broker that serves others.

A batch may fail while it waits to be sent again, when its producer stops or ends in an outage. Its
sender gets the error. aiokafka would also log a KeyError for each.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiokafka.producer.transaction_manager import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, PidAndEpoch

from penstock.errors import SessionLost
from penstock.kafka.client.refusals import SEQUENCE_LOST, count_refusal, count_topic

log = logging.getLogger(__name__)

# The last epoch of a producer id.
MAX_EPOCH = 2**15 - 1
# Consecutive epochs that the broker refuses, after which the producer gets another id (H6), and
# after which its process ends.
RENEW_AFTER = 3
END_AFTER = 6


class _PendingBatches(set[Any]):
    """The batches that were sent and have no answer; one that waits to be sent again has left."""

    def remove(self, batch: Any) -> None:
        """Removes a batch when it ends, wherever it is then."""
        self.discard(batch)


class ProducerEpoch:
    """Begins a new epoch of one of aiokafka's producers after a failed batch.

    Args:
        producer: idempotent, not yet started.
    """

    def __init__(self, producer: Any) -> None:
        accumulator = producer._message_accumulator  # noqa: SLF001 (the client has no hook for failed batches)
        self._manager = producer._txn_manager  # noqa: SLF001 (as above)
        self._append = accumulator._append_batch  # noqa: SLF001 (as above)
        accumulator._append_batch = self._append_batch  # noqa: SLF001 (as above)
        accumulator._pending_batches = _PendingBatches()  # noqa: SLF001 (as above)
        # The sender calls it when it ends.
        self._fail_all = accumulator.fail_all
        accumulator.fail_all = self._end
        # Refused epochs since the last batch that the broker took.
        self._refused = 0
        self._ended = False

    def _append_batch(self, builder: Any, tp: Any) -> Any:
        """Replaces the client's method, which makes each batch."""
        batch = self._append(builder, tp)
        set_producer_state, done, fail = batch.set_producer_state, batch.done, batch.failure
        of_batch: PidAndEpoch | None = None
        count_topic(tp.topic)

        def set_state(producer_id: int, producer_epoch: int, base_sequence: int) -> None:
            nonlocal of_batch
            of_batch = PidAndEpoch(producer_id, producer_epoch)
            set_producer_state(producer_id, producer_epoch, base_sequence)

        def succeed(*arguments: Any, **options: Any) -> None:
            self._refused = 0
            done(*arguments, **options)

        def failure(exception: BaseException) -> None:
            # Not by a callback of the batch's future: the sender may take the next batch before it
            # runs.
            if of_batch == self._manager._pid_and_epoch and not self._ended:  # noqa: SLF001 (see `__init__`)
                self._on_failed(exception)
            # A batch without messages of its own (`client.sending`) is divided until its records
            # are alone.
            if records := len(batch._msg_futures) or int(batch.record_count == 1):  # noqa: SLF001 (see `__init__`)
                count_refusal(tp.topic, exception, records)
            fail(exception)
            waiter = batch._drain_waiter  # noqa: SLF001 (see `__init__`)
            if waiter.done() and not waiter.cancelled():
                # Retrieved, or asyncio logs an exception that was never retrieved.
                waiter.exception()

        batch.set_producer_state, batch.done, batch.failure = set_state, succeed, failure
        return batch

    def _on_failed(self, exception: BaseException) -> None:
        of_producer = isinstance(exception, SEQUENCE_LOST)
        self._refused += of_producer
        if of_producer and self._refused == RENEW_AFTER:
            log.warning(
                "Kafka refuses the producer repeatedly; it gets another id",
                extra={"event": "producer_renewed", "failures": self._refused, "error": repr(exception)},
            )
            self._drop_id_later()
        elif self._refused >= END_AFTER:
            self._end(SessionLost(f"Kafka refuses each batch of this producer: {exception!r}"))
        else:
            self._begin_epoch()

    def _end(self, exception: BaseException) -> None:
        """Lets each send raise `SessionLost`; replaces the client's method."""
        self._ended = True
        if not isinstance(exception, SessionLost):
            exception = SessionLost(f"the sender of the Kafka producer has ended: {exception!r}")
        self._fail_all(exception)

    def _begin_epoch(self) -> None:
        manager = self._manager
        producer_id, epoch = manager._pid_and_epoch  # noqa: SLF001 (see `__init__`)
        if epoch < MAX_EPOCH:
            manager._pid_and_epoch = PidAndEpoch(producer_id, epoch + 1)  # noqa: SLF001 (see `__init__`)
            manager._sequence_numbers.clear()  # noqa: SLF001 (see `__init__`)
        else:
            self._drop_id_later()

    def _drop_id_later(self) -> None:
        # The sender, which fetches the id, must not lose it while it takes batches. A batch that it
        # takes before fails for its sequence and is sent again.
        asyncio.get_running_loop().call_soon(self._drop_id, self._manager._pid_and_epoch)  # noqa: SLF001 (see `__init__`)

    def _drop_id(self, dropped: PidAndEpoch) -> None:
        manager = self._manager
        if manager._pid_and_epoch != dropped:  # noqa: SLF001 (see `__init__`)
            return  # dropped already
        manager._pid_and_epoch = PidAndEpoch(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)  # noqa: SLF001 (see `__init__`)
        manager._pid_waiter = asyncio.get_running_loop().create_future()  # noqa: SLF001 (see `__init__`)
        manager._sequence_numbers.clear()  # noqa: SLF001 (see `__init__`)
