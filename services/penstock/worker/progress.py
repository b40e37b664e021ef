"""Reports of progress: what a handler may say, and how often it is sent.

A report is a dictionary entry until the worker's next round, which sends the last one of each
attempt. So a handler may report each of its million items, and no report waits for a server.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.contracts.progress import MAX_MESSAGE, Progress
from penstock.core.attempt import AttemptId
from penstock.core.early_start import EARLY_START

# Seconds between two rounds; a round without a claimed attempt is followed by one a little after
# the next claim.
REPORT_EVERY_S = 1.0
UNCLAIMED_AGAIN_S = 2 * EARLY_START.claim_after_s


def progress_of(fraction: Any, message: Any, redact: Callable[[str], str] | None = None) -> Progress:
    """Checks the arguments of `Task.progress`.

    The message is one line: control characters become spaces, and a long one is cut. The text of a
    message often depends on data, which must not fail an attempt.

    Args:
        fraction: as the handler gave it.
        message: as the handler gave it.
        redact: removes secrets, before the message is cut; None leaves them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the fraction is not from 0 to 1.
    """
    if fraction is not None:
        # A number of another library, such as numpy's, converts itself.
        if isinstance(fraction, bool | str) or not hasattr(fraction, "__float__"):
            raise TypeError(
                f"progress(fraction=…) is a number from 0 to 1 or None, not {type(fraction).__name__}"
            )
        fraction = float(fraction)
        # In this form the comparison also refuses NaN.
        if not 0 <= fraction <= 1:
            raise ValueError(f"progress(fraction={fraction}): a fraction is from 0 to 1, so 40 % is 0.4")
    if not isinstance(message, str):
        raise TypeError(f"progress(message=…) is text, not {type(message).__name__}")
    if fraction is None and not message:
        raise TypeError("progress() needs a fraction, a message or both")
    return Progress(fraction, one_line(message if redact is None else redact(message)))


def one_line(text: str) -> str:
    """Text on one line that UTF-8 and PostgreSQL accept, of at most `MAX_MESSAGE` characters."""
    text = str.__str__(text)
    if not (text.isascii() and text.isprintable()):
        # Control characters, lines and paragraphs would be written to terminals; surrogates cannot.
        text = "".join(
            " "
            if (kind := unicodedata.category(each)) in ("Cc", "Zl", "Zp")
            else "�"
            if kind == "Cs"
            else each
            for each in text[: 4 * MAX_MESSAGE]
        )
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


class ProgressReporter:
    """The last reports of attempts that are not sent yet.

    Args:
        loop: in which `run` runs.
        send: sends reports of claimed attempts; returns those that must be sent again.
        claimed: whether an attempt has a claim. A report of an attempt without one waits: the claim
            follows within `claim_after_s`, or the attempt ends.
        in_flight: whether this worker runs an attempt; reports of others are dropped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Mapping[AttemptId, Progress]], Awaitable[Mapping[AttemptId, Progress]]],
        claimed: Callable[[AttemptId], bool],
        in_flight: Callable[[AttemptId], bool],
    ) -> None:
        self._loop = loop
        self._send = send
        self._claimed = claimed
        self._in_flight = in_flight
        self._reports: dict[AttemptId, Progress] = {}
        self._woken = False
        self._wake = asyncio.Event()

    def report(self, attempt_id: AttemptId, progress: Progress) -> None:
        """Adds a report in place of the attempt's last one; may be called from any thread."""
        self._reports[attempt_id] = progress
        # One call a round. A thread that sees the flag set has added its report before the round.
        if not self._woken:
            self._woken = True
            # An abandoned handler may outlive the loop.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        """Sends reports until cancelled.

        Raises:
            Fatal: none can be sent any more.
        """
        while True:
            await self._wake.wait()
            sent = await self.round()
            await asyncio.sleep(REPORT_EVERY_S if sent else UNCLAIMED_AGAIN_S)

    async def round(self) -> bool:
        """Sends the last report of each claimed attempt; returns whether there was one."""
        self._wake.clear()
        self._woken = False
        # A copy of the keys: handlers' threads add reports meanwhile.
        reports = {
            attempt_id: report
            for attempt_id in list(self._reports)
            if (report := self._reports.pop(attempt_id, None)) is not None and self._in_flight(attempt_id)
        }
        ready = {attempt_id: report for attempt_id, report in reports.items() if self._claimed(attempt_id)}
        again = {attempt_id: report for attempt_id, report in reports.items() if attempt_id not in ready}
        if ready:
            again.update(await self._send(ready))
        for attempt_id, report in again.items():
            # A newer report has precedence.
            self._reports.setdefault(attempt_id, report)
        if again:
            self._wake.set()
        return bool(ready)
