"""The attempts in flight of one worker: their room, their claims and their heartbeats.

Each way in which an attempt ends passes here, so that it ends in all three.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from penstock.contracts.result import StageResult
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.core.completion import Outcome
from penstock.core.early_start import BacklogLimit
from penstock.worker.heartbeat_sender import HeartbeatSender, HeartbeatTransport
from penstock.worker.held_tokens import HeldTokens
from penstock.worker.in_flight import InFlight
from penstock.worker.ports import Handlers
from penstock.worker.registered import Registered
from penstock.worker.unclaimed import UnclaimedAttempts

log = logging.getLogger(__name__)


class Attempts:
    """The attempts that a worker has taken and not ended.

    Args:
        registered: of the worker.
        worker_id: of the worker.
        transport: sends claims and heartbeats.
        handlers: run the attempts.
        clock: seconds on a monotonic clock.
        tokens: of the attempts, for the transport.

    Attributes:
        in_flight: bounds what is pulled.
        heartbeats: keeps claimed attempts alive.
        unclaimed: those without a claim.
    """

    def __init__(
        self,
        registered: Registered,
        worker_id: str,
        transport: HeartbeatTransport,
        handlers: Handlers,
        clock: Callable[[], float],
        tokens: HeldTokens,
    ) -> None:
        limits, early_start = registered.limits, registered.early_start
        backlog = BacklogLimit(registered.settings.backlog, early_start.horizon_s)
        heartbeats = HeartbeatSender(transport, worker_id, clock, self._stop_lost)
        self._handlers = handlers
        self._tokens = tokens
        self._backlog = backlog
        self._horizon_s = early_start.horizon_s
        self.heartbeats = heartbeats
        self.in_flight = InFlight(
            registered.slots,
            lambda: heartbeats.room,
            len(limits),
            lambda: backlog.at(time.monotonic()),
            tokens,
        )
        self.unclaimed = UnclaimedAttempts(
            transport, heartbeats, worker_id, limits, clock, handlers.waits, early_start
        )

    def still_in_flight(self, attempt_ids: list[AttemptId]) -> InFlight:
        """The attempts in flight, without those of `attempt_ids` that are cut off.

        After a stall, this may run before the heartbeat step that would drop these attempts.
        """
        self.heartbeats.drop_cut_off(attempt_ids)
        return self.in_flight

    def on_sent(self, results: Sequence[StageResult]) -> list[AttemptId]:
        """Removes attempts whose results are stored, and adds those that follow them.

        Returns the attempts that have a lease.
        """
        attempt_ids = [result.fence.attempt_id for result in results]
        # Slots of longer attempts do not become free within the horizon.
        quick = sum(
            result.finished_ms - result.started_ms <= self._horizon_s * 1000
            and result.outcome is not Outcome.HANDED_BACK
            for result in results
        )
        self._backlog.add_ended(quick, time.monotonic())
        for result in results:
            if result.fence.attempt_id not in self.in_flight:
                # It was revoked, or its lease lost, while its result was sent.
                result.follows = None
        follows = [result.follows for result in results if result.follows is not None]
        # Before the attempts that they follow leave their room to others.
        self.in_flight.add(follows)
        self.unclaimed.add(follows)
        never_claimed = self._remove(attempt_ids)
        # The others have a lease, whose end needs the token.
        self._tokens.drop(never_claimed)
        return [attempt_id for attempt_id in attempt_ids if attempt_id not in never_claimed]

    def on_revoked(self, revocation: Revocation) -> None:
        """Stops the attempts of a revocation, and all attempts of tasks that were cancelled."""
        if revocation.why == "cancelled":
            # A cancelled task never runs again. Its row may be a stage behind the worker, and its
            # event has a count in place of a number that the worker chose.
            task_ids = {attempt_id.task_id for attempt_id in revocation.tasks}
            revoked = [attempt_id for attempt_id in self.in_flight if attempt_id.task_id in task_ids]
        else:
            revoked = [attempt_id for attempt_id in revocation.tasks if attempt_id in self.in_flight]
        if revoked:
            log.info(
                "The platform revoked attempts; stopping them",
                extra={
                    "event": "attempts_revoked",
                    "attempts": len(revoked),
                    "reason": revocation.why,
                },
            )
            self._remove(revoked)
            self._tokens.drop(revoked)
            self._handlers.drop(revoked)

    def _remove(self, attempt_ids: list[AttemptId]) -> set[AttemptId]:
        """Removes attempts that are over; returns those that were never claimed."""
        never_claimed = self.unclaimed.end(attempt_ids)
        self.heartbeats.remove(attempt_ids)
        # Last, because it gives the room to the next puller.
        self.in_flight.remove(attempt_ids)
        return never_claimed

    def _stop_lost(self, attempt_ids: list[AttemptId]) -> None:
        self.unclaimed.lose(attempt_ids)
        self.in_flight.remove(attempt_ids)
        self._tokens.drop(attempt_ids)
        self._handlers.drop(attempt_ids)
