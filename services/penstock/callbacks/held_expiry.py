"""Ends callbacks that have been held for too long: each becomes a dead letter, to be replayed.

A target may be disabled or hang without end, and the callbacks that it is owed would be kept
without end as well. The process that holds the requeuer's lock ends them in small batches, as fast
as they were held. When in doubt, a callback stays held.
"""

from __future__ import annotations

import logging
import time

from penstock.callbacks.settings import CallbacksSettings
from penstock.metrics.rounds import ROUNDS
from penstock.postgres import callback_ends
from penstock.postgres.session import Session

log = logging.getLogger(__name__)

# Its name in metrics.
LOOP = "held_expiry"
# Callbacks that one pass ends: their bodies are written to the outbox.
ENDED_ROWS = 100
# Seconds between two passes that find nothing more.
EXPIRE_EVERY_S = 30.0


class HeldExpiry:
    """Ends held callbacks, a few per pass.

    Args:
        settings: of the service.
        session: the session whose lock makes this process the only one that ends them.

    Attributes:
        ended: callbacks ended since the start.
    """

    def __init__(self, settings: CallbacksSettings, session: Session) -> None:
        self._longest_s = settings.callback_held_max_s
        self._session = session
        self._expire_at_s = 0.0
        self.ended = 0
        ROUNDS.expect(LOOP, EXPIRE_EVERY_S)

    async def expire(self) -> bool:
        """Ends the next few, if a pass is due; returns whether more are left.

        Raises:
            SessionLost: the lock is gone with its session.
            PostgresUnavailable: the next pass is due as if this one had succeeded.
        """
        if time.monotonic() < self._expire_at_s:
            return False
        self._expire_at_s = time.monotonic() + EXPIRE_EVERY_S
        ended = await callback_ends.end_held(self._session, limit=ENDED_ROWS, longest_s=self._longest_s)
        self.ended += ended
        ROUNDS.complete(LOOP)
        if ended:
            log.warning(
                "Callbacks were held for too long and are dead",
                extra={"event": "held_callbacks_ended", "count": ended, "held_s": self._longest_s},
            )
        if ended < ENDED_ROWS:
            return False
        self._expire_at_s = 0.0
        return True
