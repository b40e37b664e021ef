"""Submissions of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from penstock.contracts.context_digest import with_digest
from penstock.contracts.submission import Submission
from penstock.contracts.task_type import TaskType
from penstock.errors import IdempotencyConflict, Invalid, UnknownType
from penstock.objects import ObjectStore
from penstock.postgres import tasks
from penstock.postgres.ingest_positions import OffsetRange
from penstock.postgres.tasks import Submitted
from penstock.submission.kind import SubmissionKind, everything


class TypeSource(Protocol):
    """The registered types (`penstock.postgres.types.TypeCache`)."""

    async def require(self, names: Iterable[str]) -> None:
        """Looks up names, so that `get` has their types.

        Raises:
            PostgresUnavailable: the database is unavailable.
        """
        ...

    def get(self, name: str, /) -> TaskType | None:
        """A type; None if there is none with this name."""
        ...


class TaskKind(SubmissionKind[Submission, Submission, Submitted | IdempotencyConflict]):
    """Tasks.

    Args:
        types: the registered types.
        objects: stores large contexts.
    """

    schema = "submitted"
    name_field = "type"
    stored_field = "context"
    span_attribute = "type"

    def __init__(self, types: TypeSource, objects: ObjectStore) -> None:
        super().__init__(objects)
        self._types = types

    def from_wire(self, raw: Any) -> Submission:
        """See `SubmissionKind.from_wire`."""
        return Submission.from_wire(raw)

    async def admit(
        self, decoded: Sequence[Submission | Invalid], visible: Callable[[str], bool] = everything
    ) -> list[Submission | Invalid]:
        """See `SubmissionKind.admit`; a strict type compares the digests of contexts."""
        if names := {each.type for each in decoded if isinstance(each, Submission)}:
            await self._types.require(names)
        return [each if isinstance(each, Invalid) else self._admitted(each, visible) for each in decoded]

    def _admitted(self, submission: Submission, visible: Callable[[str], bool]) -> Submission | UnknownType:
        task_type = self._types.get(submission.type)
        if task_type is None or not visible(submission.type):
            return UnknownType(
                f"no task type {submission.type!r} is registered: register it with POST /types",
                pointer="/type",
            )
        return with_digest(submission) if task_type.is_strict else submission

    async def insert(
        self, executor: Any, items: Sequence[Submission], source: OffsetRange | None = None
    ) -> list[Submitted | IdempotencyConflict]:
        """See `SubmissionKind.insert`; a submission with another context becomes its refusal."""
        return await tasks.submit(executor, items, source)
