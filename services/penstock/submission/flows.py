"""Submissions of flows, and of the events that flows wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.contracts.flow_submission import EVENT_SCHEMA, FLOW_SCHEMA, FlowEvent, FlowSubmission
from penstock.core.flow.outline import Reference
from penstock.errors import Invalid, UnknownFlow
from penstock.objects import ObjectStore
from penstock.postgres import flow_events, flow_starts
from penstock.postgres.flow_definitions import DefinitionCache, Reached
from penstock.postgres.flow_events import Delivered
from penstock.postgres.flow_starts import FlowStart, Started, inputs_of
from penstock.postgres.ingest_positions import OffsetRange
from penstock.submission.kind import SubmissionKind, everything


class FlowKind(SubmissionKind[FlowSubmission, FlowStart, Started]):
    """Flows.

    The kind of a batch looks up the newest version of a definition once, after the batch was read.
    So a version that was uploaded before an entry was sent is used for it.

    Args:
        definitions: the definitions.
        objects: stores large inputs.
    """

    schema = FLOW_SCHEMA
    name_field = "name"
    stored_field = "inputs"
    span_attribute = "flow"

    def __init__(self, definitions: DefinitionCache, objects: ObjectStore) -> None:
        super().__init__(objects)
        self._definitions = definitions
        self._reached: dict[Reference, Reached] = {}

    def open_batch(self) -> FlowKind:
        """See `SubmissionKind.open_batch`."""
        return FlowKind(self._definitions, self._objects)

    def from_wire(self, raw: Any) -> FlowSubmission:
        """See `SubmissionKind.from_wire`."""
        return FlowSubmission.from_wire(raw)

    async def admit(
        self, decoded: Sequence[FlowSubmission | Invalid], visible: Callable[[str], bool] = everything
    ) -> list[FlowStart | Invalid]:
        """See `SubmissionKind.admit`; the inputs have the defaults of the definition."""
        named = {
            (each.flow, each.version)
            for each in decoded
            if isinstance(each, FlowSubmission) and visible(each.flow)
        }
        if new := named - self._reached.keys():
            self._reached |= dict.fromkeys(new, await self._definitions.reach(new))
        return [
            each
            if isinstance(each, Invalid)
            else _start_of(each, self._reached.get((each.flow, each.version), Reached()))
            for each in decoded
        ]

    async def insert(
        self, executor: Any, items: Sequence[FlowStart], source: OffsetRange | None = None
    ) -> list[Started]:
        """See `SubmissionKind.insert`."""
        return await flow_starts.start(executor, items, source)


def _start_of(submission: FlowSubmission, reached: Reached) -> FlowStart | Invalid:
    """The start of a submission, whose inputs are inline; or all its faults."""
    outline = reached.get(submission.flow, submission.version)
    if outline is None:
        which = "" if submission.version is None else f"version {submission.version} of "
        return UnknownFlow(
            f"there is no {which}flow definition {submission.flow!r}: upload it with POST /flow-definitions",
            pointer="/flow" if submission.version is None else "/version",
        )
    try:
        inputs = inputs_of(outline, submission.inputs, "/inputs")
    except Invalid as error:
        return error
    return FlowStart(
        name=outline.name,
        version=outline.version,
        versions=reached.versions_of(outline) or None,
        unfinished=outline.nodes,
        inputs=inputs,
        priority=submission.priority,
        idempotency_key=submission.idempotency_key,
        events=submission.events,
        callbacks=submission.callbacks or None,
        labels=submission.labels or None,
    )


class EventKind(SubmissionKind[FlowEvent, FlowEvent, Delivered]):
    """Events; they name nothing that must exist.

    Args:
        objects: stores large data.
    """

    schema = EVENT_SCHEMA
    name_field = "event"
    stored_field = "data"
    span_attribute = None

    def from_wire(self, raw: Any) -> FlowEvent:
        """See `SubmissionKind.from_wire`."""
        return FlowEvent.from_wire(raw)

    async def admit(
        self,
        decoded: Sequence[FlowEvent | Invalid],
        visible: Callable[[str], bool] = everything,  # noqa: ARG002 (the route judges the name of its events)
    ) -> list[FlowEvent | Invalid]:
        """See `SubmissionKind.admit`."""
        return [*decoded]

    async def insert(
        self, executor: Any, items: Sequence[FlowEvent], source: OffsetRange | None = None
    ) -> list[Delivered]:
        """See `SubmissionKind.insert`; the executor is in no transaction."""
        return await flow_events.deliver(executor, items, source)
