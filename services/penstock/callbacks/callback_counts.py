"""Counts the callbacks of all processes by state, for metrics and alerts.

The process that holds the requeuer's lock counts every 30 s, and no further than `MOST`: a scrape
costs no query, and a count costs at most some 50 ms, however many callbacks there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from penstock import metrics
from penstock.metrics import Sample
from penstock.postgres import callbacks
from penstock.postgres.callbacks import StateCounts
from penstock.postgres.session import Session

COUNT_EVERY_S = 30.0
# Most callbacks of one state that are counted.
MOST = 10_000
# Seconds that a callback may be due, or published without a claim, before it is overdue.
OVERDUE_S = 300.0


class CallbackCounts:
    """The last counts.

    Args:
        session: the session whose lock makes this process the only one that counts.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count_at_s = 0.0
        self._counts: StateCounts | None = None

    async def count(self) -> None:
        """Counts, if it is time.

        Raises:
            SessionLost: the lock is gone with its session.
            PostgresUnavailable: the next count is due as if this one had succeeded.
        """
        if time.monotonic() < self._count_at_s:
            return
        self._count_at_s = time.monotonic() + COUNT_EVERY_S
        self._counts = await callbacks.count_states(self._session, most=MOST, overdue_s=OVERDUE_S)

    def samples(self) -> Iterator[Sample]:
        """The last counts; none where another process counts."""
        if self._counts is None:
            return
        for state in ("pending", "overdue", "held", "dead"):
            yield Sample(metrics.CALLBACKS, getattr(self._counts, state), (state,))
        yield Sample(metrics.CALLBACK_HELD_OLDEST, self._counts.held_s)
