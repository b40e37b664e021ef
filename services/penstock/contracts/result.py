"""Results of attempts (`stage-results.schema.json`): a batch in one record, keyed by worker.

This module only encodes, so that the SDK stays light; `penstock.contracts.inbound` reads and
validates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Conclusion, Fence, Outcome
from penstock.core.task import State

# Larger batches are not faster and risk the broker's record limit.
RESULTS_PER_RECORD = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt failed.

    Attributes:
        kind: short name, such as the exception's class or "Timeout".
        message: one sentence.
        traceback: as Python prints it, when there is one.
    """

    kind: str
    message: str
    traceback: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of `error`."""
        wire = {"kind": self.kind, "message": self.message}
        return wire if self.traceback is None else {**wire, "traceback": self.traceback}


# Most characters of a traceback beside its whole text: the end of it, which names the line.
TRACEBACK_CHARS = 500


def traceback_end(traceback: str) -> str:
    """The end of a traceback, for people who may read the whole one elsewhere."""
    return traceback[-TRACEBACK_CHARS:]


# The kinds of the errors of attempts that are handed back: without the stage's handler, or for
# another cause. They are for people, and for `penstock tasks recover --error`.
NO_HANDLER, HANDED_BACK = "NoHandler", "HandedBack"
# Milliseconds until an attempt is tried again whose context could not be read, because the object
# store was away.
AWAY_MS = 5_000


# Not frozen: constructing a frozen dataclass is slower, and one is made for each attempt that ends.
@dataclass(slots=True, kw_only=True)
class StageResult:
    """One ended attempt.

    Attributes:
        fence: the attempt.
        outcome: how it ended: next, done, fail, retry, handed_back, spawn or wait.
        next_stage: with next, the stage to enter; with spawn and wait, the stage to enter when the
            task is woken.
        context: with next, the new context (None keeps the old one); with done, the result; with
            spawn and wait, the children and the context of the stage that follows.
        terms: with spawn and wait, the terms of waiting (`spawn` and `wait` on the wire).
        delay_ms: milliseconds until the task may be released. With next, retry and handed_back,
            None is at once; with fail, None is the back-off of the type.
        no_handler: with handed_back, whether the worker has no handler for the stage. Such delays
            add up, until they fail the task (`core.completion.conclude_unhandled`).
        permanent: with fail, rules out a retry.
        max_attempts: with fail, the stage's own limit of attempts (None is the type's).
        error: with fail, retry and handed_back, the reason.
        started_ms: when the handler began, milliseconds since 1970 on the worker's clock.
        finished_ms: when it ended.
        goes_on: with next, the number of the attempt with which the worker goes on by itself; None
            when it does not. It is in the record's header `penstock-goes-on`, which earlier
            versions do not read.
        follows: in the worker, the attempt with which it goes on.
    """

    fence: Fence
    outcome: Outcome
    next_stage: str | None = None
    context: Context | None = None
    terms: Mapping[str, Any] | None = None
    delay_ms: int | None = None
    no_handler: bool = False
    permanent: bool = False
    max_attempts: int | None = None
    error: Failure | None = None
    started_ms: int = 0
    finished_ms: int = 0
    goes_on: int | None = None
    follows: ReadyTask | None = None

    def error_of(self, conclusion: Conclusion) -> Failure | None:
        """The error that is stored of the attempt, whose task went where `conclusion` says."""
        if self.error is None or not self.no_handler or conclusion.state is not State.FAILED:
            return self.error
        seconds = f"{conclusion.unhandled_s:,.0f} s"
        message = f"no worker with a handler took it for {seconds}: {self.error.message}"
        return dataclasses.replace(self.error, message=message)

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of one entry, without defaults."""
        fence = self.fence
        wire: dict[str, Any] = {
            "id": fence.id,
            "step": fence.step,
            "stage": fence.stage,
            "attempt": fence.attempt,
            # A gateway or stage processor of 0.1.0 refuses `handed_back`, and fails the attempt. So
            # this version only reads that outcome, and sends the kind of the error in its place.
            "outcome": Outcome.RETRY if self.outcome is Outcome.HANDED_BACK else self.outcome,
            "started_ms": self.started_ms,
            "finished_ms": self.finished_ms,
        }
        if self.next_stage is not None:
            wire["next_stage"] = self.next_stage
        if self.context is not None:
            wire.update(self.context.to_wire())
        if self.terms is not None:
            wire[self.outcome.value] = dict(self.terms)
        if self.delay_ms is not None:
            wire["delay_ms"] = self.delay_ms
        if self.permanent:
            wire["permanent"] = True
        if self.max_attempts is not None:
            wire["max_attempts"] = self.max_attempts
        if self.error is not None:
            wire["error"] = self.error.to_wire()
        return wire


def unwritable(result: StageResult, why: object) -> StageResult:
    """The permanent failure that takes the place of a result which cannot be written."""
    return StageResult(
        fence=result.fence,
        outcome=Outcome.FAIL,
        permanent=True,
        error=Failure(kind="Unwritable", message=f"the handler's outcome cannot be written: {why}"),
        started_ms=result.started_ms,
        finished_ms=result.finished_ms,
    )


def handed_back(
    fence: Fence,
    reason: str,
    *,
    no_handler: bool = False,
    delay_ms: int | None = None,
    started_ms: int = 0,
    finished_ms: int = 0,
) -> StageResult:
    """The result of an attempt that was not run to an end; it is not charged.

    Args:
        fence: the attempt.
        reason: for the task's history.
        no_handler: whether the worker has no handler for the stage.
        delay_ms: milliseconds until the task may be released; None is at once.
        started_ms: when the handler began, milliseconds since 1970; 0 if it did not.
        finished_ms: when the attempt ended.
    """
    return StageResult(
        fence=fence,
        outcome=Outcome.HANDED_BACK,
        delay_ms=delay_ms,
        no_handler=no_handler,
        error=Failure(kind=NO_HANDLER if no_handler else HANDED_BACK, message=reason),
        started_ms=started_ms,
        finished_ms=finished_ms,
    )


def encode_results(worker: str, results: Sequence[StageResult]) -> bytes:
    """The value of a `stage-results` record."""
    return orjson.dumps({"worker": worker, "results": [result.to_wire() for result in results]})
