"""Decides the outcome of a call: delivered, retry, or dead. Pure: no I/O, no clock.

By the Standard Webhooks convention any 2xx means delivered, and 410 means that the target is gone
for good. Every other result, redirects and timeouts included, is retried.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

GONE = 410


class DeadReason(enum.StrEnum):
    """Why a callback is dead."""

    GONE = "gone"
    """The target answered 410."""
    EXHAUSTED = "exhausted"
    """Every attempt of the schedule has failed."""
    UNCALLABLE = "uncallable"
    """The target's URL cannot be called."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The target has accepted the callback."""


@dataclass(frozen=True, slots=True)
class RetryIn:
    """The callback is called again.

    Attributes:
        seconds: from now.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Dead:
    """The callback is not called again unless an operator replays it.

    Attributes:
        reason: why the callback is dead.
    """

    reason: DeadReason


Outcome = Delivered | RetryIn | Dead


@dataclass(frozen=True, slots=True)
class DeliveryPolicy:
    """How often and when a callback is attempted.

    Attributes:
        schedule_s: delays between attempts, in seconds; there is one attempt more than delays. The
            default is the schedule of the Standard Webhooks convention, about 27 hours.
        jitter: random share of a delay, from 0 (none) to 1 (the whole delay).
        retry_after_max_s: longest Retry-After that is honoured, in seconds.
    """

    schedule_s: tuple[float, ...] = (5, 300, 1800, 7200, 18_000, 36_000, 36_000)
    jitter: float = 0.2
    retry_after_max_s: float = 86_400.0

    @property
    def attempts(self) -> int:
        """Total number of attempts."""
        return len(self.schedule_s) + 1

    def decide(
        self,
        status: int | None,
        attempt: int,
        retry_after_s: float | None,
        random_share: float,
        *,
        callable_target: bool = True,
    ) -> Outcome:
        """The outcome of one call.

        Args:
            status: HTTP status of the answer; None without one.
            attempt: number of the attempt, from 1.
            retry_after_s: the target's Retry-After in seconds; None without one.
            random_share: a random number from 0 (inclusive) to 1, for the jitter.
            callable_target: False when the URL can never be called.
        """
        if not callable_target:
            return Dead(DeadReason.UNCALLABLE)
        if status is not None and 200 <= status < 300:
            return Delivered()
        if status == GONE:
            return Dead(DeadReason.GONE)
        if attempt >= self.attempts:
            return Dead(DeadReason.EXHAUSTED)
        delay_s = self.schedule_s[attempt - 1] * (1 - self.jitter * random_share)
        if retry_after_s is not None:
            # Retry-After can lengthen the delay, up to the limit, and never shortens it.
            delay_s = max(delay_s, min(retry_after_s, self.retry_after_max_s))
        return RetryIn(delay_s)


def parse_retry_after(text: str | None, now: datetime) -> float | None:
    """Seconds from `now` that a Retry-After header asks for; None without a valid header.

    Args:
        text: the header's value: whole seconds or an HTTP date (RFC 9110, section 10.2.3).
        now: the current time, with its time zone.
    """
    if text is None:
        return None
    text = text.strip()
    # A float would overflow with hundreds of digits.
    if text.isascii() and text.isdigit() and len(text) <= 12:
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())
