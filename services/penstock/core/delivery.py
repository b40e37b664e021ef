"""What becomes of a call to a callback target: delivered, tried again later, or dead. Pure: no I/O, no clock.

By the Standard Webhooks convention any 2xx means delivered and 410 means that the target is gone for good.
Everything else, redirects and silence included, may be different next time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

GONE = 410


class Reason(enum.StrEnum):
    """Why a callback is dead."""

    GONE = "gone"
    """The target answered 410: it wants no more of this."""
    EXHAUSTED = "exhausted"
    """Every attempt of the schedule was made in vain."""
    UNCALLABLE = "uncallable"
    """The target is not something that can be called."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The target has it."""


@dataclass(frozen=True, slots=True)
class RetryIn:
    """To be tried again.

    Attributes:
        seconds: from now.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Dead:
    """Never to be tried again, unless a person says so.

    Attributes:
        reason: why not.
    """

    reason: Reason


Fate = Delivered | RetryIn | Dead


@dataclass(frozen=True, slots=True)
class DeliveryPolicy:
    """How often and how patiently a target is called.

    Attributes:
        schedule_s: delay after each vain attempt but the last, in seconds: one more attempt than delays is made.
            The default is the convention's own: over about 27 hours.
        jitter: share of a delay that is random, from 0 (none) to 1 (anything from nothing to the whole).
        retry_after_max_s: what a target asks for with Retry-After is honoured up to this, in seconds.
    """

    schedule_s: tuple[float, ...] = (5, 300, 1800, 7200, 18_000, 36_000, 36_000)
    jitter: float = 0.2
    retry_after_max_s: float = 86_400.0

    @property
    def attempts(self) -> int:
        """Attempts in all, the first included."""
        return len(self.schedule_s) + 1

    def problems(self) -> list[str]:
        """What makes no sense, one sentence each."""
        found = []
        # Written so that NaN is refused too.
        if not all(0 <= delay < float("inf") for delay in self.schedule_s):
            found.append(f"schedule_s={self.schedule_s} must hold seconds from 0 on")
        if not 0 <= self.jitter <= 1:
            found.append(f"jitter={self.jitter} must be from 0 to 1")
        if not 0 <= self.retry_after_max_s < float("inf"):
            found.append(f"retry_after_max_s={self.retry_after_max_s} must not be negative")
        return found

    def decide(
        self,
        status: int | None,
        attempt: int,
        retry_after_s: float | None,
        chance: float,
        *,
        callable_target: bool = True,
    ) -> Fate:
        """What becomes of a callback after a call.

        Args:
            status: what the target answered; None when it did not answer.
            attempt: which attempt this was, from 1.
            retry_after_s: seconds the target asked to be left alone; None when it did not ask.
            chance: a random number from 0 (inclusive) to 1, the caller's.
            callable_target: False when no call can ever be made to it.
        """
        if not callable_target:
            return Dead(Reason.UNCALLABLE)
        if status is not None and 200 <= status < 300:
            return Delivered()
        if status == GONE:
            return Dead(Reason.GONE)
        if attempt >= self.attempts:
            return Dead(Reason.EXHAUSTED)
        delay_s = self.schedule_s[attempt - 1] * (1 - self.jitter * chance)
        if retry_after_s is not None:
            # A floor, never a way to be called sooner or hardly ever.
            delay_s = max(delay_s, min(retry_after_s, self.retry_after_max_s))
        return RetryIn(delay_s)


def parse_retry_after(text: str | None, now: datetime) -> float | None:
    """Seconds from `now` that a Retry-After header asks for; None when there is none or it makes no sense.

    Args:
        text: the header: whole seconds or an HTTP date (RFC 9110, section 10.2.3).
        now: the present moment, with its time zone.
    """
    if text is None:
        return None
    text = text.strip()
    # Nobody means more digits than these, and a thousand of them would not fit a float.
    if text.isascii() and text.isdigit() and len(text) <= 12:
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())
