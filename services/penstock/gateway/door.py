"""The door through which submissions come: open while PostgreSQL keeps up, else 429 with `Retry-After`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock import metrics
from penstock.core.admission import Admission, Limits, Refusal, Why
from penstock.errors import Throttled
from penstock.gateway.settings import GatewaySettings
from penstock.metrics import Sample


class Door:
    """Counts what was let in and is not answered yet.

    Args:
        settings: how much that may be.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._admission = Admission(
            Limits(
                settings.gateway_submit_rows, settings.gateway_submit_bytes, settings.gateway_submit_wait_s
            )
        )
        self._refused: Counter[Why] = Counter()

    def require_open(self) -> None:
        """Does nothing while there is room: asked before a body is read.

        Raises:
            Throttled: there is none.
        """
        self._refuse(self._admission.refusal(1, 1, _now_s()))

    @contextmanager
    def place(self, rows: int, size_bytes: int) -> Iterator[None]:
        """A place for the tasks of one body, for the time of a `with` block.

        Raises:
            Throttled: there is none; nothing of it was done.
        """
        self._refuse(self._admission.refusal(rows, size_bytes, _now_s()))
        ticket = self._admission.enter(rows, size_bytes, _now_s())
        try:
            yield
        finally:
            self._admission.leave(ticket)

    def samples(self) -> Iterator[Sample]:
        """What is to be told of it (`penstock.metrics`)."""
        yield Sample(metrics.SUBMIT_WAITING, self._admission.rows)
        yield Sample(metrics.SUBMIT_OLDEST, self._admission.oldest_s(_now_s()))
        for why in Why:
            yield Sample(metrics.SUBMIT_REFUSED, self._refused[why], (why,))

    def _refuse(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._refused[refusal.why] += 1
            raise Throttled(refusal.reason, retry_after_s=refusal.retry_after_s)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
