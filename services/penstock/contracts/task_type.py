"""A task type (`task-type.schema.json`): its settings, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.contracts import subscription
from penstock.contracts.subscription import Entry
from penstock.contracts.validation import conform
from penstock.core.retry import RetryPolicy
from penstock.errors import InvalidRecord

_INTEGER_FIELDS = (
    "partitions",
    "lease_ms",
    "max_attempts",
    "retry_base_ms",
    "retry_max_ms",
    "max_losses",
    "max_in_flight",
    "max_per_key",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskType:
    """One row of `task_type`, and the body of `POST /types`; see `task-type.schema.json`."""

    name: str
    first_stage: str = "start"
    partitions: int = 8
    lease_ms: int = 300_000
    max_attempts: int = 3
    retry_base_ms: int = 1_000
    retry_factor: float = 2.0
    retry_max_ms: int = 300_000
    retry_jitter: float = 0.5
    events: str = "final"
    max_losses: int = 3
    late_results: str = "accept"
    callbacks: tuple[Entry, ...] = ()
    # None keeps the state of the registered type; a type that was read is never None.
    paused: bool | None = None
    max_in_flight: int | None = None
    starts_per_s: float | None = None
    max_per_key: int | None = None
    fair: bool = False
    ageing_s: float | None = None
    finish_first: bool = False
    idempotency: str = "lenient"
    no_handler_s: float | None = 3_600.0

    @property
    def ordered(self) -> bool:
        """Whether the type has its own release order."""
        return self.ageing_s is not None or self.finish_first

    @property
    def is_strict(self) -> bool:
        """Whether an idempotency key with another context is refused."""
        return self.idempotency == "strict"

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy of its stages."""
        return policy_of(self._fields())

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> TaskType:
        """Reads a document that conforms to `task-type.schema.json`.

        Raises:
            InvalidRecord: fields contradict each other, or a target can never be called.
        """
        task_type = cls(**{**raw, "callbacks": subscription.read(raw.get("callbacks") or ())})
        problems = task_type.policy.problems()
        if problems:
            raise InvalidRecord("; ".join(problems), pointer="/retry_max_ms")
        if task_type.finish_first and (task_type.fair or task_type.max_per_key is not None):
            raise InvalidRecord("cannot be combined with fair or max_per_key", pointer="/finish_first")
        return task_type

    def to_wire(self) -> dict[str, Any]:
        """The JSON object, with the secrets of callbacks."""
        return {**self._fields(), "callbacks": subscription.to_wire(self.callbacks)}

    def masked(self) -> dict[str, Any]:
        """The JSON object in answers, without the values of headers."""
        return {**self._fields(), "callbacks": subscription.masked(self.callbacks)}

    def columns(self) -> dict[str, Any]:
        """The values of its row, by column."""
        return {**self._fields(), "callbacks": subscription.to_columns(self.callbacks) or None}

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def policy_of(row: Mapping[str, Any]) -> RetryPolicy:
    """The retry policy in the columns of a row."""
    return RetryPolicy(
        max_attempts=row["max_attempts"],
        base_s=row["retry_base_ms"] / 1000,
        factor=row["retry_factor"],
        max_s=row["retry_max_ms"] / 1000,
        jitter=row["retry_jitter"],
    )


def read_task_type(raw: Any) -> TaskType:
    """Reads the body of `POST /types`.

    Raises:
        InvalidRecord: it breaks `task-type.schema.json` or contradicts itself; `pointer` is the
            field at fault.
    """
    conform(raw, "task-type")
    # To JSON Schema 8.0 is an integer.
    return TaskType.from_wire(
        {**raw, **{name: int(raw[name]) for name in _INTEGER_FIELDS if raw.get(name) is not None}}
    )
