"""Limits concurrent submissions; answers 429 with `Retry-After` while PostgreSQL is behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock import metrics
from penstock.core.admission import Admission, AdmissionLimits, Refusal, RefusalCause
from penstock.errors import Throttled
from penstock.gateway.settings import GatewaySettings
from penstock.metrics import Sample


class SubmissionLimiter:
    """Counts the submissions that were admitted and are not answered yet.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._admission = Admission(
            AdmissionLimits(
                settings.gateway_submit_rows, settings.gateway_submit_bytes, settings.gateway_submit_wait_s
            )
        )
        self._refused: Counter[RefusalCause] = Counter()

    def require_room(self) -> None:
        """Returns when the smallest submission would be admitted; called before the body is read.

        Raises:
            Throttled: a limit is reached.
        """
        self._refuse(self._admission.refusal(1, 1, time.monotonic()))

    @contextmanager
    def reserve(self, rows: int, size_bytes: int) -> Iterator[None]:
        """Counts the tasks of one body for the time of the block.

        Raises:
            Throttled: a limit is reached; no task of the body is inserted.
        """
        self._refuse(self._admission.refusal(rows, size_bytes, time.monotonic()))
        ticket = self._admission.enter(rows, size_bytes, time.monotonic())
        try:
            yield
        finally:
            self._admission.leave(ticket)

    def samples(self) -> Iterator[Sample]:
        """Its metrics (`penstock.metrics`)."""
        yield Sample(metrics.SUBMIT_WAITING, self._admission.rows)
        yield Sample(metrics.SUBMIT_OLDEST, self._admission.oldest_s(time.monotonic()))
        for cause in RefusalCause:
            yield Sample(metrics.SUBMIT_REFUSED, self._refused[cause], (cause,))

    def _refuse(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._refused[refusal.cause] += 1
            raise Throttled(refusal.reason, retry_after_s=refusal.retry_after_s)
