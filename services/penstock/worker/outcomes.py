"""The argument and the outcomes of a handler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


class _Keep:
    """Marks a context that stays as it is."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = _Keep()


# Not frozen, for speed: a frozen instance takes several times as long to create.
@dataclass(slots=True)
class Task:
    """One attempt of one stage.

    Attributes:
        id: task id.
        type: task type.
        stage: the stage to run.
        step: number of this stage in the task's sequence of stages; 0 is the first.
        attempt: number of the attempt of this stage; 0 is the first.
        tries: failed and lost attempts of this stage so far.
        context: of the submission or the stage before: any JSON value, `str` for text and URL,
            `bytes` for bytes.
        cancelled: True once the attempt was cancelled, was lost, or is out of time. A synchronous
            handler should check it regularly and return early. An async handler is cancelled
            instead.
    """

    id: int
    type: str
    stage: str
    step: int
    attempt: int
    tries: int
    context: Any
    cancelled: bool = False

    @property
    def token(self) -> str:
        """Identifies this attempt on every worker: an idempotency key for side effects."""
        return f"{self.id}-{self.step}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class Next:
    """The task continues with another stage.

    Attributes:
        stage: name of the stage; the same stage is allowed.
        context: its context; by default the context stays as it is.
        delay_s: seconds until the stage may start.
    """

    stage: str
    context: Any = KEEP
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The task has succeeded with a result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Fail:
    """This attempt has failed.

    Attributes:
        reason: one sentence.
        permanent: the stage is not tried again.
    """

    reason: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """This stage runs again later, without counting as a failure.

    Attributes:
        delay_s: seconds until it may start.
        reason: for the task's history.
    """

    delay_s: float
    reason: str = ""


Outcome = Next | Done | Fail | RetryAfter
