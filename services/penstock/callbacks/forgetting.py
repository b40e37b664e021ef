"""Removes the rows of targets that say nothing any more: well, charged with nothing, not limited, and long not called.

Every URL that was ever called has a row, and many have a token in them and are called once. The process that has the lock of
the releaser goes through them again and again, a few at a time, so it costs the same however many there are. One that is
called after all has its row again with the call. In doubt a row stays.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.callbacks.settings import CallbacksSettings
from penstock.core.target import TargetId
from penstock.errors import PostgresUnavailable
from penstock.postgres import targets
from penstock.postgres.session import Session

log = logging.getLogger(__name__)

# Ten million are gone through in a day and a half.
LOOKED_AT = 5_000
EVERY_S = 60.0


class Forgetting:
    """Forgets what is quiet.

    Args:
        settings: of the service.
        session: whose lock makes this process the only one.
    """

    def __init__(self, settings: CallbacksSettings, session: Session) -> None:
        self._quiet_s = settings.callback_forget_s
        self._session = session
        self._behind: TargetId | None = None
        self._at_s = 0.0
        self._clock = asyncio.get_running_loop().time

    async def step(self) -> None:
        """Looks at the next few if it is time for that.

        Raises:
            SessionLost: the right is gone with its session.
        """
        if self._clock() < self._at_s:
            return
        self._at_s = self._clock() + EVERY_S
        try:
            forgotten, behind = await targets.forget(
                self._session, self._behind, most=LOOKED_AT, quiet_s=self._quiet_s
            )
        except PostgresUnavailable as error:
            log.warning("quiet targets are not forgotten yet: %s", error)
            return
        self._behind = behind
        if forgotten:
            log.info("%d targets that nobody has called for %g s are forgotten", forgotten, self._quiet_s)
