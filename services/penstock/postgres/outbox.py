"""The outbox: events that were written with their transition and may not be on Kafka yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from penstock.contracts import subscription
from penstock.contracts.cloudevent import envelope
from penstock.contracts.event import FINAL_EVENTS, Callback, Event, OutboxEntry
from penstock.contracts.subscription import Format
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.core.target import target_of
from penstock.errors import RecordsRefused
from penstock.postgres.queries import bound, execute, fetch, query
from penstock.settings import Platform

log = logging.getLogger(__name__)

# A callback's record is written again after this time unless its outcome is recorded (see
# callback.due_at).
CALLBACK_HORIZON_S = 60.0


class PendingEvent(NamedTuple):
    """An event to enqueue, with the columns of its task that say where it goes.

    Attributes:
        event: to be published and called back.
        targets: column `callbacks`.
        subscription: column `events`.
        traceparent: of the task's trace, if it has one.
    """

    event: Event
    targets: Sequence[str] | None
    subscription: str
    traceparent: str | None


@dataclass(frozen=True, slots=True)
class OutboxEvents:
    """One row of the outbox: a batch of event records."""

    id: int
    keys: list[bytes]
    records: list[bytes]


async def delete_published(executor: Any, ids: Sequence[int]) -> None:
    """Deletes rows whose events are on Kafka.

    Raises:
        PostgresUnavailable: they stay and are published again, which their ids make harmless.
    """
    if ids:
        await execute(executor, "outbox.delete_published", list(ids))


async def unpublished(executor: Any, *, age_s: float, limit: int = 100) -> list[OutboxEvents]:
    """Rows older than `age_s` seconds, oldest first: their writer has died, or Kafka was away.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "outbox.unpublished", age_s, limit)
    return [OutboxEvents(row["id"], row["keys"], row["records"]) for row in rows]


async def refused(executor: Any, *, behind: int, limit: int) -> list[OutboxEvents]:
    """Rows behind an id whose events Kafka has refused, in order of their ids.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "outbox.refused", behind, limit)
    return [OutboxEvents(row["id"], row["keys"], row["records"]) for row in rows]


async def park(executor: Any, row: OutboxEvents, error: RecordsRefused) -> None:
    """Keeps those events of a row that Kafka refuses, with its reason; the others are published.

    Raises:
        PostgresUnavailable: the row stays and all its events are published again.
    """
    positions = sorted(error.records)
    log.error(
        "Kafka refuses events; they stay in the outbox until `penstock check --repair`",
        extra={"event": "events_parked", "outbox": row.id, "events": len(positions), "error": str(error)},
    )
    await execute(
        executor,
        "outbox.park",
        id=row.id,
        keys=[row.keys[position] for position in positions],
        records=[row.records[position] for position in positions],
        refused=error.records[positions[0]],
    )


async def enqueue(
    connection: Any, events: Sequence[PendingEvent], source: str = Platform.event_source
) -> OutboxEntry:
    """Writes events and their callbacks to the outbox, in the caller's transaction.

    The topic gets the events that the task's `events` asks for, and each target those that it asks
    for itself.

    Args:
        connection: inside the transaction of the transitions.
        events: in the order of their transitions.
        source: of CloudEvents (see `Platform`).
    """
    entry = OutboxEntry()
    for event, targets, requested, traceparent in events:
        published = requested == "all" or event.name in FINAL_EVENTS
        # Ids come from the event and the target's place in the task's list, before targets are
        # filtered: a transition that is written twice gets the same ids.
        subscribed = [
            (f"msg_{event.id}-{number}", target)
            for number, target in enumerate(map(subscription.expand, subscription.from_columns(targets)))
            if target.includes(event.name, requested)
        ]
        if not published and not subscribed:
            continue
        body = event.encode()
        if published:
            entry.record_keys.append(str(event.subject_id).encode())
            entry.events.append(body)
        entry.callbacks += [
            Callback(
                id=callback_id,
                target=target_of(event.subject_name, target.url),
                task_id=event.subject_id,
                attempt=0,
                body=envelope(event, source) if target.format is Format.CLOUDEVENTS else body,
                headers=_traced(target.request_headers(), traceparent),
                ordered=target.ordered,
            )
            for callback_id, target in subscribed
        ]
    if entry.events:
        entry.outbox_id = await connection.fetchval(
            query("outbox.enqueue_events"), entry.record_keys, entry.events
        )
    if entry.callbacks:
        await connection.execute(*bound("outbox.enqueue_callbacks", **callback_columns(entry.callbacks)))
    return entry


def _traced(headers: dict[str, str] | None, traceparent: str | None) -> dict[str, str] | None:
    """The headers of a call, with that of its trace unless the submitter has set one."""
    return headers if traceparent is None else {"traceparent": traceparent, **(headers or {})}


def callback_columns(callbacks: Sequence[Callback], due_in_s: float = CALLBACK_HORIZON_S) -> dict[str, Any]:
    """The arguments of `outbox.enqueue_callbacks`.

    Args:
        callbacks: in the order of their transitions.
        due_in_s: seconds until their records are written again unless their outcomes are recorded.
    """
    return {
        "id": [c.id for c in callbacks],
        "target": [c.target.url for c in callbacks],
        "task_id": [c.task_id for c in callbacks],
        "body": [c.body for c in callbacks],
        "due_in": due_in_s,
        "headers": sparse([orjson.dumps(c.headers).decode() if c.headers else None for c in callbacks]),
        "ordered": sparse([c.ordered or None for c in callbacks]),
        "namespace": sparse(
            [None if c.target.namespace == DEFAULT_NAMESPACE else c.target.namespace for c in callbacks]
        ),
    }


def sparse(column: list[Any]) -> list[Any] | None:
    """A column, or None when all its values are None, which saves their encoding."""
    return None if column.count(None) == len(column) else column
