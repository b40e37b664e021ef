"""What becomes of a callback after a call: `core.delivery` decides, and the decision is written down.

While this process suspects itself no target pays for it: nothing dies of its schedule, what failed is tried again soon,
and the attempt does not count. So an outage of our own leaves every schedule as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import orjson

from penstock.callbacks.calling import Met
from penstock.callbacks.hand import Waiting
from penstock.callbacks.ledger import Ended, Ledger
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.targets import Targets
from penstock.contracts.event import Callback, origin_of
from penstock.core.delivery import Dead, Delivered, Fate, Reason, RetryIn
from penstock.core.target import TargetId
from penstock.postgres.callbacks import Settled

log = logging.getLogger(__name__)

# While this process suspects itself: how soon what failed is tried again, at the latest, in seconds.
WHILE_SUSPICIOUS_S = 10.0


class Fates:
    """Decides for a `Deliverer`.

    Args:
        settings: of the service.
        targets: told when one asks for nothing more.
        ledger: where it is written down.
        stop: holds what waits for a target.
        chance: random numbers from 0 to 1, for jitter.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        targets: Targets,
        ledger: Ledger,
        *,
        stop: Callable[[TargetId], None],
        chance: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._targets = targets
        self._ledger = ledger
        self._stop = stop
        self._chance = chance

    def decide(self, waiting: Waiting, met: Met) -> Fate:
        """By the schedule, which counts only some of the attempts."""
        return self._settings.policy.decide(
            met.status,
            waiting.callback.attempt + 1 - waiting.spent,
            met.retry_after_s,
            self._chance(),
            callable_target=met.callable_target,
        )

    def patient(self, fate: Fate, met: Met) -> Fate:
        """The fate of an attempt that was made while this process suspected itself."""
        # What a target asks for is no failure of ours.
        long = isinstance(fate, RetryIn) and fate.seconds > WHILE_SUSPICIOUS_S and not met.retry_after_s
        if long or fate == Dead(Reason.EXHAUSTED):
            asked_s = min(met.retry_after_s or 0.0, self._settings.policy.retry_after_max_s)
            return RetryIn(max(WHILE_SUSPICIOUS_S * (0.5 + self._chance() / 2), asked_s))
        return fate

    def settle(self, waiting: Waiting, met: Met, fate: Delivered | RetryIn, *, counts: bool) -> None:
        """Has it written down.

        Args:
            waiting: what was begun.
            met: by its call.
            fate: what becomes of it.
            counts: whether the attempt counts for the schedule.
        """
        callback, attempt = waiting.callback, waiting.callback.attempt + 1
        spent = waiting.spent + (not counts)
        if isinstance(fate, Delivered):
            settled = Settled(id=callback.id, attempt=attempt, state="delivered", spent=spent)
            self._ledger.settle(Ended(callback, settled, met.took_s, met.status, None))
            return
        log.info(
            "%s: attempt %d: %s; again in %.1f s",
            callback.id,
            attempt,
            met.message,
            fate.seconds,
            extra=_ids(callback, attempt),
        )
        error = met.to_wire()
        settled = Settled(
            id=callback.id,
            attempt=attempt,
            state="pending",
            error=orjson.dumps(error).decode(),
            due_in_s=fate.seconds,
            spent=spent,
        )
        self._ledger.settle(Ended(callback, settled, met.took_s, met.status, error))

    async def bury(self, waiting: Waiting, met: Met, fate: Dead, *, counts: bool) -> None:
        """As `settle`, once the dead-letter topic has it."""
        callback, attempt = waiting.callback, waiting.callback.attempt + 1
        error = {**met.to_wire(), "message": _last_words(met, attempt, fate.reason)}
        log.warning("%s is dead: %s", callback.id, error["message"], extra=_ids(callback, attempt))
        if fate.reason is Reason.GONE:
            self._stop(callback.target)
            await self._targets.gone(callback.target, f"it answered {met.status} to {callback.id}")
        await self._ledger.bury(callback, attempt, error)
        settled = Settled(
            id=callback.id,
            attempt=attempt,
            state="dead",
            error=orjson.dumps(error).decode(),
            spent=waiting.spent + (not counts),
        )
        self._ledger.settle(Ended(callback, settled, met.took_s, met.status, error))


def _last_words(met: Met, attempt: int, reason: Reason) -> str:
    match reason:
        case Reason.GONE:
            return f"{met.message}: it is gone, and its target is disabled"
        case Reason.EXHAUSTED:
            return f"{met.message}; attempt {attempt} was the last"
        case Reason.UNCALLABLE:
            return met.message


def _ids(callback: Callback, attempt: int) -> dict[str, object]:
    """By which an entry of the log can be found."""
    return {
        "callback": callback.id,
        "task": callback.task_id,
        "target": origin_of(callback.target.url),
        "attempt": attempt,
    }
