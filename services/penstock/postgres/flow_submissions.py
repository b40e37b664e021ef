"""Turns submissions into starts: the version of the definition, those below it, and the inputs."""

from __future__ import annotations

from penstock.contracts.context import ContentType, Context
from penstock.contracts.flow_submission import FlowSubmission
from penstock.errors import Invalid, UnknownFlow
from penstock.postgres.flow_definitions import Reached
from penstock.postgres.flow_starts import FlowStart


def start_of(submission: FlowSubmission, reached: Reached) -> tuple[FlowStart | None, list[Invalid]]:
    """The start of a submission, or all its faults.

    Args:
        submission: of a producer.
        reached: has its definition, if there is one.

    Returns:
        The start, whose inputs are inline, and no fault; or None and the faults.
    """
    outline = reached.get(submission.flow, submission.version)
    if outline is None:
        at = "/flow" if submission.version is None else "/version"
        which = "" if submission.version is None else f"version {submission.version} of "
        reason = (
            f"there is no {which}flow definition {submission.flow!r}: upload it with POST /flow-definitions"
        )
        return None, [UnknownFlow(reason, pointer=at)]
    if faults := list(outline.input_faults(submission.inputs, "/inputs")):
        return None, [*faults]
    start = FlowStart(
        name=outline.name,
        version=outline.version,
        versions=reached.versions_of(outline) or None,
        unfinished=outline.nodes,
        inputs=Context(ContentType.JSON, value=outline.with_defaults(submission.inputs)),
        priority=submission.priority,
        idempotency_key=submission.idempotency_key,
        events=submission.events,
        callbacks=submission.callbacks or None,
        labels=submission.labels or None,
        traceparent=submission.traceparent,
    )
    return start, []
