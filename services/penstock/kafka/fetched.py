"""Waits for records without taking them, so that a reader can reserve room before it takes any.

The client has no such call: `getmany` takes what it finds.
"""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer


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


def drop_fetched(consumer: AIOKafkaConsumer) -> None:
    """Drops the records that the client has fetched and not returned; it fetches them again.

    Args:
        consumer: subscribed and started.
    """
    subscription = consumer._subscription.subscription  # noqa: SLF001 (see the header)
    assignment = None if subscription is None else subscription.assignment
    for partition in list(consumer._fetcher._records):  # noqa: SLF001 (see the header)
        state = None if assignment is None else assignment.state_value(partition)
        if state is not None and state.has_valid_position:
            # A seek drops the client's buffer.
            consumer.seek(partition, state.position)
