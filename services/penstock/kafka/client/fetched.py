"""Waits for records without taking them, so that a reader can reserve room before it takes any.

The client has no such call: `getmany` takes what it finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiokafka import AIOKafkaConsumer, TopicPartition


async def wait_fetched(consumer: AIOKafkaConsumer, timeout_s: float) -> bool:
    """Waits until the client has fetched records; returns whether `getmany` may have any now.

    Counts as polling, as a wait in `getmany` does.

    Args:
        consumer: subscribed and started.
        timeout_s: most seconds to wait.

    Raises:
        KafkaError: the group refuses this consumer.
    """
    fetcher, subscription = consumer._fetcher, consumer._subscription  # noqa: SLF001 (see the header)
    consumer._coordinator.check_errors()  # noqa: SLF001 (as `getmany` does)
    with subscription.fetch_context():
        if subscription.reassignment_in_progress:
            # `getmany` would wait for the assignment, with the room of other readers reserved.
            waiter = asyncio.ensure_future(subscription.wait_for_assignment())
        elif fetcher._records:  # noqa: SLF001 (see the header)
            return True
        else:
            waiter = fetcher._create_fetch_waiter()  # noqa: SLF001 (see the header)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
        finally:
            waiter.cancel()
    if done:
        # Raises the error of a group that refuses this consumer.
        waiter.result()
    return bool(fetcher._records) and not subscription.reassignment_in_progress  # noqa: SLF001 (see the header)


class FetchedSince:
    """Since when a client has had the records that it has fetched and not returned.

    Args:
        consumer: subscribed and started.
    """

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        # By partition, its buffer and when that was first seen.
        self._seen: dict[TopicPartition, tuple[object, float]] = {}

    def since(self, age_s: float, now_s: float) -> list[TopicPartition]:
        """The partitions whose records were there for `age_s`; their time begins anew.

        Only what an earlier call has seen counts, so a caller asks at each poll.
        """
        buffers = self._consumer._fetcher._records  # noqa: SLF001 (see the header)
        aged = [
            partition
            for partition, (buffer, at_s) in self._seen.items()
            if buffers.get(partition) is buffer and now_s - at_s >= age_s
        ]
        self._seen = {
            partition: self._seen[partition]
            if partition not in aged and self._seen.get(partition, (None,))[0] is buffer
            else (buffer, now_s)
            for partition, buffer in buffers.items()
        }
        return aged


def drop_fetched(consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition] | None = None) -> None:
    """Drops records that the client has fetched and not returned; it fetches them again.

    Args:
        consumer: subscribed and started.
        partitions: whose records; None for all.
    """
    subscription = consumer._subscription.subscription  # noqa: SLF001 (see the header)
    assignment = None if subscription is None else subscription.assignment
    if partitions is None:
        partitions = consumer._fetcher._records  # noqa: SLF001 (see the header)
    for partition in list(partitions):
        state = None if assignment is None else assignment.state_value(partition)
        if state is not None and state.has_valid_position:
            # A seek drops the client's buffer.
            consumer.seek(partition, state.position)
