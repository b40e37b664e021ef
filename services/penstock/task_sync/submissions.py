"""Reads a record of the topic `submitted`: validates it, and stores its context if it is large."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock import tracing
from penstock.contracts.parsing import parse
from penstock.contracts.submission import Submission
from penstock.core.access import namespace_of
from penstock.errors import InvalidRecord, UnknownType
from penstock.objects import ObjectStore
from penstock.postgres.types import TypeCache


class SubmissionReader:
    """Reads submissions.

    Args:
        types: the registered types.
        objects: the object store for large contexts.
    """

    def __init__(self, types: TypeCache, objects: ObjectStore) -> None:
        self._types = types
        self._objects = objects

    async def read(self, record: Any) -> Submission:
        """The submission of a record.

        Raises:
            Invalid: the record is none, or its type is not registered.
            ObjectsUnavailable: its context is large, and the store is away.
            PostgresUnavailable: the types could not be read.
        """
        return _traced(record, await self._parse(record.value or b""))

    async def _parse(self, value: bytes) -> Submission:
        try:
            submission = Submission.from_wire(parse(value, exact=True))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Validation did not foresee this content; without the translation it would stop the
            # partition.
            raise InvalidRecord(f"cannot be read: {error!r}") from error
        await self._types.require([submission.type])
        if self._types.get(submission.type) is None:
            raise UnknownType(f"no task type {submission.type!r} is registered", pointer="/type")
        context = await self._objects.check_in(submission.context, namespace_of(submission.type))
        return (
            submission if context is submission.context else dataclasses.replace(submission, context=context)
        )


def _traced(record: Any, submission: Submission) -> Submission:
    """The submission with the trace of its record's header, or with a new one."""
    if not tracing.is_on():
        return submission
    header = dict(record.headers).get(tracing.TRACEPARENT)
    parent = header.decode("ascii", "replace") if header else None
    with tracing.span("submit", parent, kind="consumer", root=True, type=submission.type) as span:
        return dataclasses.replace(submission, traceparent=span.traceparent if span else None)
