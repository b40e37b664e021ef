"""Decides the outcome of a call by `core.delivery`, and prepares its record.

In self-check mode no target pays for a failure of this process: no callback dies of its schedule,
failed calls are retried soon, and the attempt does not count. The same holds for an attempt without
a usable secret: it made no request, and only the operator can repair the secret.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import orjson

from penstock.callbacks.caller import CallResult
from penstock.callbacks.ledger import EndedAttempt
from penstock.callbacks.receiver import InFlight
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import Callback, origin_of
from penstock.core.delivery import Dead, DeadReason, Delivered, Outcome, RetryIn
from penstock.postgres.callbacks import OutcomeRow

log = logging.getLogger(__name__)

# In self-check mode a failed call is retried after this many seconds at the latest.
SELF_CHECK_RETRY_S = 10.0
# A callback without a usable secret is retried after this many seconds at the latest, so that all
# are called soon after the operator has repaired the secret.
SECRET_RETRY_S = 60.0


class Outcomes:
    """Decides for the pipeline.

    Args:
        settings: of the service.
        random_share: random numbers from 0 to 1, for jitter.
    """

    def __init__(self, settings: CallbacksSettings, random_share: Callable[[], float]) -> None:
        self._policy = settings.policy
        self._random_share = random_share

    def decide(self, in_flight: InFlight, result: CallResult) -> Outcome:
        """The outcome by the schedule, which no callback exhausts without a request."""
        if not result.called:
            return self._without_request(in_flight)
        return self._policy.decide(
            result.status,
            in_flight.callback.attempt + 1 - in_flight.uncounted,
            result.retry_after_s,
            self._random_share(),
            callable_target=result.callable_target,
        )

    def _without_request(self, in_flight: InFlight) -> RetryIn:
        share = self._random_share()
        # The delays grow by all attempts, since these do not count.
        outcome = self._policy.decide(None, in_flight.callback.attempt + 1, None, share)
        latest_s = SECRET_RETRY_S * (0.5 + share / 2)
        return RetryIn(min(outcome.seconds, latest_s) if isinstance(outcome, RetryIn) else latest_s)

    def in_self_check(self, outcome: Outcome, result: CallResult) -> Outcome:
        """The outcome of the same call in self-check mode."""
        # The target's Retry-After stands: it is not a failure of this process.
        late = (
            isinstance(outcome, RetryIn) and outcome.seconds > SELF_CHECK_RETRY_S and not result.retry_after_s
        )
        if late or outcome == Dead(DeadReason.EXHAUSTED):
            retry_after_s = min(result.retry_after_s or 0.0, self._policy.retry_after_max_s)
            return RetryIn(max(SELF_CHECK_RETRY_S * (0.5 + self._random_share() / 2), retry_after_s))
        return outcome

    def ended(
        self, in_flight: InFlight, result: CallResult, outcome: Outcome, *, counts: bool
    ) -> EndedAttempt:
        """The attempt to record.

        Args:
            in_flight: the callback that was called.
            result: of the call.
            outcome: of the call.
            counts: whether the attempt counts for the schedule.
        """
        callback, attempt = in_flight.callback, in_flight.callback.attempt + 1
        row = OutcomeRow(
            id=callback.id, attempt=attempt, state="delivered", uncounted=in_flight.uncounted + (not counts)
        )
        if isinstance(outcome, Delivered):
            return EndedAttempt(callback, row, result.took_s, result.status, None)
        error = result.to_wire()
        fields = {
            "callback": callback.id,
            "task": callback.task_id,
            "target": origin_of(callback.target.url),
            "attempt": attempt,
        }
        if isinstance(outcome, RetryIn):
            row.state, row.due_in_s = "pending", outcome.seconds
            log.info(
                "A callback failed and is retried",
                extra={
                    "event": "callback_retried",
                    "reason": result.message,
                    "delay_s": round(outcome.seconds, 1),
                    **fields,
                },
            )
        else:
            row.state = "dead"
            error["message"] = _dead_message(result, attempt, outcome.reason)
            log.warning(
                "A callback is dead", extra={"event": "callback_died", "reason": error["message"], **fields}
            )
        row.error = orjson.dumps(error).decode()
        gone = why_gone(callback, result) if outcome == Dead(DeadReason.GONE) else None
        return EndedAttempt(callback, row, result.took_s, result.status, error, gone)


def why_gone(callback: Callback, result: CallResult) -> str:
    """Why the target of a callback is disabled, for operators."""
    return f"it answered {result.status} to {callback.id}"


def _dead_message(result: CallResult, attempt: int, reason: DeadReason) -> str:
    match reason:
        case DeadReason.GONE:
            return f"{result.message}: it is gone, and its target is disabled"
        case DeadReason.EXHAUSTED:
            return f"{result.message}; attempt {attempt} was the last"
        case DeadReason.UNCALLABLE:
            return result.message
