"""Events for flows: stored once, then compared with the waits of flows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contracts.flow_submission import FlowEvent
from penstock.core.access import namespace_of
from penstock.postgres.flow_starts import match_events
from penstock.postgres.ingest_positions import OffsetRange, offset_parameters, offsets_passed
from penstock.postgres.queries import fetch
from penstock.postgres.tasks import encode_ref


@dataclass(frozen=True, slots=True)
class Delivered:
    """A stored event.

    Attributes:
        id: of the sender.
        created: False when the namespace had an event with this id already.
    """

    id: str
    created: bool


async def deliver(
    executor: Any, events: Sequence[FlowEvent], source: OffsetRange | None = None
) -> list[Delivered]:
    """Stores events in one statement, all of them or none, and ends the waits for them.

    Args:
        executor: a pool, or a connection without a transaction: the waits are compared with events
            that are committed.
        events: data above the inline limit must be in the object store.
        source: where the batch was read; the same statement moves the reader's offset.

    Returns:
        The events in their order.

    Raises:
        SessionLost: the offset was not at `source.first`, because another process reads the
            partition. Nothing was stored.
        PostgresUnavailable: the events are stored or not; repeating the call is safe.
    """
    answer = await fetch(executor, "flow_events.insert", **offset_parameters(source), **_columns(events))
    if not answer:
        raise offsets_passed(source)
    new = {(row["namespace"], row["id"]) for row in answer[1:]}
    if events:
        # Also those that were there before: their sender may have ended between the two statements.
        await match_events(executor, [each.id for each in events])
    delivered = []
    for event in events:
        key = (namespace_of(event.event), event.id)
        delivered.append(Delivered(event.id, created=key in new))
        # A later event of the batch may have the same id.
        new.discard(key)
    return delivered


def _columns(events: Sequence[FlowEvent]) -> dict[str, list[Any]]:
    return {
        "namespace": [namespace_of(each.event) for each in events],
        "id": [each.id for each in events],
        "event": [each.event for each in events],
        "key": [each.key for each in events],
        "data": [each.data.data if each.data else None for each in events],
        "data_ref": [encode_ref(each.data.ref) if each.data else None for each in events],
    }
