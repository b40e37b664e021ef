"""Starts flows, a batch at a time, and brings events to the flows that wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from penstock.contracts import subscription
from penstock.contracts.context import ContentType, Context
from penstock.contracts.subscription import Entry
from penstock.core.flow.outline import Outline
from penstock.core.task import Priority
from penstock.errors import one_or_all
from penstock.postgres.connection import translated
from penstock.postgres.ingest_positions import OffsetRange, offset_parameters, offsets_passed
from penstock.postgres.queries import fetch, fetchval, query
from penstock.postgres.tasks import encode_ref

# Notified with a shard when a flow of it has a message.
CHANNEL = "penstock_flows"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStart:
    """A root flow to insert.

    Attributes:
        name: of its definition.
        version: of its definition.
        versions: the version of each definition below it, by name.
        unfinished: number of nodes of its definition.
        inputs: a JSON object with a value for each declared input; above the inline limit it must
            be in the object store.
        priority: order of release of its tasks.
        idempotency_key: a second start of the definition with this key returns the first flow.
        events: `final` or `all`; None is `final`.
        callbacks: targets of its callbacks.
        labels: by name.
        traceparent: the span of the start, if it is sampled.
        rerun_of: the flow that it repeats.
        schedule: with `tick`: the schedule that starts it. A tick has one flow, and any number of
            reruns.
        tick: nominal time.
        backfill: the backfill that starts it.
    """

    name: str
    version: int
    unfinished: int
    inputs: Context
    versions: Mapping[str, int] | None = None
    priority: Priority = Priority.MEDIUM
    idempotency_key: str | None = None
    events: str | None = None
    callbacks: tuple[Entry, ...] | None = None
    labels: Mapping[str, str] | None = None
    traceparent: str | None = None
    rerun_of: int | None = None
    schedule: str | None = None
    tick: datetime | None = None
    backfill: int | None = None

    @property
    def unique_key(self) -> tuple[str, Any] | None:
        """The field that an earlier start may have had; None without one."""
        if self.idempotency_key is not None:
            return self.name, self.idempotency_key
        if self.schedule is None or self.rerun_of is not None:
            return None
        return self.schedule, self.tick


@dataclass(frozen=True, slots=True)
class Started:
    """The flow of a start.

    Attributes:
        id: flow id.
        created: False when an earlier start with the same idempotency key, or tick, created it.
    """

    id: int
    created: bool


def inputs_of(outline: Outline, given: Mapping[str, Any], pointer: str) -> Context:
    """The inputs of a start, with the defaults of its definition.

    Args:
        outline: of the definition.
        given: inputs by name.
        pointer: JSON Pointer to them.

    Raises:
        InvalidRecord, Faults: they do not fit the definition.
    """
    if faults := list(outline.input_faults(given, pointer)):
        raise one_or_all(faults)
    return Context(ContentType.JSON, value=outline.with_defaults(given))


async def start(
    executor: Any, starts: Sequence[FlowStart], source: OffsetRange | None = None
) -> list[Started]:
    """Inserts root flows in one statement, all of them or none.

    Args:
        executor: a pool, or a connection whose transaction the statement joins.
        starts: their definitions must exist.
        source: where the batch was read; the same statement moves the reader's offset.

    Returns:
        The flows in the order of `starts`.

    Raises:
        SessionLost: the offset was not at `source.first`, because another process reads the
            partition. Nothing was inserted.
        PostgresUnavailable: nothing was inserted.
    """
    with translated():
        answer = await fetch(executor, "flows.start", **offset_parameters(source), **_columns(starts))
        if not answer:
            raise offsets_passed(source)
        rows = answer[1:]
        created = {key: row["id"] for row in rows if (key := _key_of(row)) is not None}
        keys = [each.unique_key for each in starts]
        existing = await _existing(executor, [key for key in keys if key is not None and key not in created])
    known = created.keys() | existing.keys()
    if gone := [each for each in starts if each.unique_key is not None and each.unique_key not in known]:
        # These flows moved to history between the two statements, which frees their keys.
        for each, started in zip(gone, await start(executor, gone), strict=True):
            assert each.unique_key is not None
            (created if started.created else existing)[each.unique_key] = started.id
    ids_without_key = deque(row["id"] for row in rows if _key_of(row) is None)
    result = []
    for key in keys:
        if key is None:
            result.append(Started(ids_without_key.popleft(), created=True))
        elif (new_id := created.pop(key, None)) is not None:
            # A later start of the batch may have the same key.
            existing[key] = new_id
            result.append(Started(new_id, created=True))
        else:
            result.append(Started(existing[key], created=False))
    return result


async def match_events(
    executor: Any, event_ids: Sequence[str] | None = None, flow_ids: Sequence[int] | None = None
) -> int:
    """Brings events to the waits of flows; returns how many waits ended.

    Args:
        executor: a pool or a connection, after the commit of the events or waits.
        event_ids: only events with these ids; None is all.
        flow_ids: only waits of these flows; None is all.

    Raises:
        PostgresUnavailable: the owner's sweep compares them later.
    """
    matched: int = await fetchval(executor, "flows.match_events", event_ids, flow_ids)
    return matched


async def match_runs(executor: Any, flow_ids: Sequence[int] | None = None) -> int:
    """Ends waits for runs of other flows that have ended; returns how many waits ended.

    Args:
        executor: a pool or a connection, after the commit of the ends or waits.
        flow_ids: only waits of these flows, and waits for them; None is all.

    Raises:
        PostgresUnavailable: the owner's sweep compares them later.
    """
    matched: int = await fetchval(executor, "flows.match_runs", flow_ids)
    return matched


def _key_of(row: Any) -> tuple[str, Any] | None:
    if row["idempotency_key"] is not None:
        return row["name"], row["idempotency_key"]
    return (row["schedule"], row["tick"]) if row["schedule"] is not None else None


async def _existing(executor: Any, keys: Sequence[tuple[str, Any]]) -> dict[tuple[str, Any], int]:
    found: dict[tuple[str, Any], int] = {}
    by_key = [key for key in keys if isinstance(key[1], str)]
    by_tick = [key for key in keys if not isinstance(key[1], str)]
    for name, wanted in (("flows.by_idempotency_keys", by_key), ("flows.by_ticks", by_tick)):
        if wanted:
            names, values = zip(*wanted, strict=True)
            rows = await executor.fetch(query(name), list(names), list(values))
            found |= {(row[1], row[2]): row["id"] for row in rows}
    return found


def _columns(starts: Sequence[FlowStart]) -> dict[str, list[Any]]:
    return {
        "name": [each.name for each in starts],
        "version": [each.version for each in starts],
        "versions": [orjson.dumps(each.versions).decode() if each.versions else None for each in starts],
        "unfinished": [each.unfinished for each in starts],
        "priority": [int(each.priority) for each in starts],
        "inputs": [each.inputs.data for each in starts],
        "inputs_ref": [encode_ref(each.inputs.ref) for each in starts],
        "idempotency_key": [each.idempotency_key for each in starts],
        "events": [each.events for each in starts],
        "callbacks": [
            None if each.callbacks is None else orjson.dumps(subscription.to_wire(each.callbacks)).decode()
            for each in starts
        ],
        "labels": [orjson.dumps(each.labels).decode() if each.labels else None for each in starts],
        "traceparent": [each.traceparent for each in starts],
        "rerun_of": [each.rerun_of for each in starts],
        "schedule": [each.schedule for each in starts],
        "tick": [each.tick for each in starts],
        "backfill": [each.backfill for each in starts],
    }
