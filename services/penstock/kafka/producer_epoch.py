"""Lets an idempotent producer go on after a batch that failed.

The broker expects the records of a producer's epoch in sequence, on each partition. aiokafka counts
a batch before it sends it and never takes the count back. After a failed batch, every later batch
of the partition would get OUT_OF_ORDER_SEQUENCE_NUMBER. The Java client begins a new epoch, in
which sequences begin at 0 (KIP-360), and so does this module.

A batch that is sent again belongs to its old epoch. aiokafka has one batch of a partition in
flight, so no batch of the new epoch overtakes it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka.producer.transaction_manager import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, PidAndEpoch

# The last epoch of a producer id.
MAX_EPOCH = 2**15 - 1


class ProducerEpoch:
    """Begins a new epoch of one of aiokafka's producers after each failed batch.

    Args:
        producer: idempotent, not yet started.
    """

    def __init__(self, producer: Any) -> None:
        accumulator = producer._message_accumulator  # noqa: SLF001 (the client has no hook for failed batches)
        self._manager = producer._txn_manager  # noqa: SLF001 (as above)
        self._append = accumulator._append_batch  # noqa: SLF001 (as above)
        accumulator._append_batch = self._append_batch  # noqa: SLF001 (as above)

    def _append_batch(self, builder: Any, tp: Any) -> Any:
        """Replaces the client's method, which makes each batch."""
        batch = self._append(builder, tp)
        fail = batch.failure

        def failure(exception: BaseException) -> None:
            # Not by a callback of the batch's future: the sender may take the next batch before it
            # runs.
            self._begin_epoch()
            fail(exception)

        batch.failure = failure
        return batch

    def _begin_epoch(self) -> None:
        manager = self._manager
        producer_id, epoch = manager._pid_and_epoch  # noqa: SLF001 (see `__init__`)
        if epoch < MAX_EPOCH:
            manager._pid_and_epoch = PidAndEpoch(producer_id, epoch + 1)  # noqa: SLF001 (see `__init__`)
            manager._sequence_numbers.clear()  # noqa: SLF001 (see `__init__`)
        else:
            # Later: the sender, which fetches the id, must not lose it while it takes batches. A
            # batch that it takes before fails for its sequence and is sent again.
            asyncio.get_running_loop().call_soon(self._drop_id)

    def _drop_id(self) -> None:
        manager = self._manager
        manager._pid_and_epoch = PidAndEpoch(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)  # noqa: SLF001 (see `__init__`)
        manager._pid_waiter = asyncio.get_running_loop().create_future()  # noqa: SLF001 (see `__init__`)
        manager._sequence_numbers.clear()  # noqa: SLF001 (see `__init__`)
