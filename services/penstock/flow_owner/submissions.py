"""Flows and events from the records of their topics (`penstock.ingest.RecordHandler`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import asyncpg

from penstock.contracts.flow_submission import FlowEvent, FlowSubmission
from penstock.contracts.parsing import parse
from penstock.core.access import namespace_of
from penstock.core.flow.outline import Reference
from penstock.errors import InvalidRecord
from penstock.ingest.spans import submission_traceparent
from penstock.kafka.topology.topics import (
    FLOW_EVENTS_SUBMITTED,
    FLOW_EVENTS_SUBMITTED_REJECTED,
    FLOWS_SUBMITTED,
    FLOWS_SUBMITTED_REJECTED,
)
from penstock.objects import ObjectStore
from penstock.postgres import flow_events, flow_starts
from penstock.postgres.flow_definitions import DefinitionCache, Reached
from penstock.postgres.flow_starts import FlowStart
from penstock.postgres.flow_submissions import start_of
from penstock.postgres.ingest_positions import OffsetRange

T = TypeVar("T")


class FlowHandler:
    """Handles the records of the topic `flows.submitted`: each starts a flow.

    Args:
        pool: of the database.
        objects: the object store for large inputs.
    """

    topic = FLOWS_SUBMITTED
    rejected_topic = FLOWS_SUBMITTED_REJECTED

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], objects: ObjectStore) -> None:
        self._pool = pool
        self._objects = objects
        self._definitions = DefinitionCache(pool)

    def open_batch(self) -> FlowReader:
        """A reader that looks up the newest versions once."""
        return FlowReader(self._definitions, self._objects)

    async def insert(self, starts: Sequence[FlowStart], source: OffsetRange) -> None:
        """See `RecordHandler.insert`."""
        await flow_starts.start(self._pool, starts, source)


class FlowReader:
    """Reads the records of a batch.

    The newest version of a definition is looked up after the batch was fetched. So a version that
    was uploaded before a record was written is used for it.

    Args:
        definitions: the definitions.
        objects: the object store for large inputs.
    """

    def __init__(self, definitions: DefinitionCache, objects: ObjectStore) -> None:
        self._definitions = definitions
        self._objects = objects
        self._reached: dict[Reference, Reached] = {}

    async def read(self, record: Any) -> FlowStart:
        """See `RecordReader.read`."""
        submission = _decoded(FlowSubmission.from_wire, record)
        reference = (submission.flow, submission.version)
        if reference not in self._reached:
            self._reached[reference] = await self._definitions.reach([reference])
        start, faults = start_of(submission, self._reached[reference])
        if start is None:
            if len(faults) == 1:
                raise faults[0]
            raise InvalidRecord(f"{faults[0].reason} (and {len(faults) - 1} more)", pointer=faults[0].pointer)
        return dataclasses.replace(
            start,
            inputs=await self._objects.check_in(start.inputs, namespace_of(start.name)),
            traceparent=submission_traceparent(record, flow=start.name),
        )


class EventHandler:
    """Handles the records of the topic `flow-events.submitted`.

    Args:
        pool: of the database.
        objects: the object store for large data.
    """

    topic = FLOW_EVENTS_SUBMITTED
    rejected_topic = FLOW_EVENTS_SUBMITTED_REJECTED

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], objects: ObjectStore) -> None:
        self._pool = pool
        self._objects = objects

    def open_batch(self) -> EventHandler:
        """Itself: events need no look-up."""
        return self

    async def read(self, record: Any) -> FlowEvent:
        """See `RecordReader.read`."""
        event = _decoded(FlowEvent.from_wire, record)
        if event.data is None:
            return event
        data = await self._objects.check_in(event.data, namespace_of(event.event))
        return dataclasses.replace(event, data=data)

    async def insert(self, events: Sequence[FlowEvent], source: OffsetRange) -> None:
        """See `RecordHandler.insert`."""
        await flow_events.deliver(self._pool, events, source)


def _decoded(decode: Callable[[Any], T], record: Any) -> T:
    try:
        return decode(parse(record.value or b"", exact=True))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Validation did not foresee this content; without the translation it would stop the
        # partition.
        raise InvalidRecord(f"cannot be read: {error!r}") from error
