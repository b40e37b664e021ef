"""What a handler is given and what it may return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


class _Keep:
    """Says: the context stays as it is."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = _Keep()


# Not frozen: at the rate of stages the guard costs more than it guards.
@dataclass(slots=True)
class Task:
    """One attempt of one stage.

    Attributes:
        id: task id.
        type: task type.
        stage: the stage to run.
        step: how many stages the task has been through.
        attempt: which run of this stage; 0 is the first.
        tries: vain tries of this stage so far.
        context: what was submitted or handed on: any JSON value, `str` for text and URL, `bytes` for bytes.
        cancelled: True once nobody wants the attempt any more (cancelled, lost, or out of time): a synchronous
            handler that looks at it now and then and returns ends early. An async one is cancelled instead.
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
        """The same for this attempt wherever it runs: an idempotency key for the handler's own side effects."""
        return f"{self.id}-{self.step}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class Next:
    """Go on with another stage.

    Attributes:
        stage: its name; the same stage again is allowed.
        context: what it is given; left out, the context stays as it is.
        delay_s: not before this many seconds.
    """

    stage: str
    context: Any = KEEP
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The task has succeeded, with this result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Fail:
    """This try was in vain.

    Attributes:
        reason: one sentence.
        permanent: trying again is useless.
    """

    reason: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Run this stage again later; not counted as a vain try.

    Attributes:
        delay_s: in this many seconds.
        reason: for the task's history.
    """

    delay_s: float
    reason: str = ""


Outcome = Next | Done | Fail | RetryAfter
