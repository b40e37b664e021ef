"""The two paths, and who waits on them: into a lane, into PostgreSQL, or begun; `handlers` makes the calls.

What is in a lane is settled by being begun, held or put back, and records are acknowledged in order. So nothing stays longer
than its turn can be waited for: what would wait too long is crowded out as it comes, and what does wait too long, because
others have all the slots, is sent back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.callbacks.hand import Record, Waiting
from penstock.callbacks.known import Target
from penstock.callbacks.lanes import Lanes
from penstock.callbacks.ledger import Ledger
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.targets import Targets
from penstock.core.acknowledgement import Partition
from penstock.core.rates import Rates
from penstock.core.target import TargetId
from penstock.kafka.topics import CALLBACKS_DIVERTED

# What was written down ahead and could not be called for so long, in seconds, is not called from here: its target is quick
# no more, and another attempt begins when the horizon of this one has passed.
STALE_S = 1.0
# How often it is looked for what waits too long, in seconds.
LOOK_EVERY_S = 1.0


class Paths:
    """Who waits, on either path.

    Args:
        settings: of the service.
        targets: whose callbacks wait.
        ledger: where it is written down.
        call: makes an attempt that is written down.
        chance: random numbers from 0 to 1, for jitter.

    Attributes:
        normal: the lanes of the one.
        diverted: the lanes of the other: retries, and targets that are abnormal.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        targets: Targets,
        ledger: Ledger,
        *,
        call: Callable[[Waiting, Lanes], None],
        chance: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._targets = targets
        self._ledger = ledger
        self._call = call
        self._chance = chance
        # One for both: a target has one rate.
        self._rates = rates = Rates(targets.rate_of)
        doubtful = targets.is_hanging
        self.normal = Lanes(settings.room, doubtful=doubtful, rates=rates)
        bound = targets.drain_rate_of
        self.diverted = Lanes(settings.diverted_room, doubtful=doubtful, rates=rates, bound=bound)
        self._both = (self.normal, self.diverted)
        self._wake: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def of(self, record: Record) -> Lanes:
        """The lanes of the path that a record came by."""
        return self.diverted if record.topic == CALLBACKS_DIVERTED.name else self.normal

    @property
    def room(self) -> int:
        """How many more of what is held may be let go now, for all targets together."""
        return self._settings.callback_waiting - self.diverted.waiting

    def have(self, which: TargetId) -> bool:
        """Whether something waits for this target, or it is called."""
        return any(lanes.waiting_for(which) or lanes.held_by(which) for lanes in self._both)

    async def run(self) -> None:
        """Sends back what waits too long, until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                self._send_back(self._loop.time())
        finally:
            if self._wake is not None:
                self._wake.cancel()

    def route(self, waiting: Waiting, target: Target) -> None:
        """Where a callback that has come is to wait."""
        aside = self.of(waiting.record) is self.diverted
        which = waiting.callback.target
        if target.disabled or (self._targets.abnormal(target) and not aside):
            self._ledger.hold(waiting)
            return
        lanes = self.diverted if aside else self.normal
        if aside and (
            (target.hanging and (lanes.waiting_for(which) or lanes.held_by(which)))
            or lanes.waiting >= self._settings.callback_waiting
        ):
            # One at a time is enough to see whether it answers again.
            self._ledger.hold(waiting)
            return
        if (
            lanes.waiting >= self._settings.callback_in_hand
            and lanes.waiting_for(which) >= self._settings.callback_target_slots
        ):
            # Those that take long must not fill the hand: reading goes on.
            self._postpone(waiting, self._settings.callback_postpone_s)
            return
        superfluous = lanes.put(waiting, self._loop.time())
        if superfluous is not None:
            superfluous.settle()
        self.crowd_out(lanes, which)

    def admit(self) -> None:
        """Has the attempts written down that may begin."""
        if self.normal.idle and self.diverted.idle:
            return  # As after most calls.
        now_s = self._loop.time()
        for lanes in self._both:
            for waiting in lanes.admit(now_s):
                self._ledger.begin(waiting)
        turns_s = [turn_s for lanes in self._both if (turn_s := lanes.next_turn_s()) is not None]
        if self._wake is not None:
            self._wake.cancel()
        self._wake = self._loop.call_at(min(turns_s), self.admit) if turns_s else None

    def begun(self, mine: Iterable[Waiting], others: Iterable[Waiting]) -> None:
        """Attempts are written down; those of the others are not to be made."""
        for waiting in mine:
            lanes = self.of(waiting.record)
            if self._is_over(waiting):
                lanes.forgo(waiting.callback.target)
                self._leave(waiting)
            else:
                waiting.begun_s = self._loop.time()
                if lanes.may_call(waiting):
                    self._call(waiting, lanes)
        for waiting in others:
            self.of(waiting.record).forgo(waiting.callback.target)
        self.admit()

    def finish(self, lanes: Lanes, which: TargetId, took_s: float) -> Waiting | None:
        """The slot of a call is free; returns who is to be called in its place.

        Args:
            lanes: of the call.
            which: whom it called.
            took_s: what it took so far, in seconds.
        """
        ready = lanes.next_ready(which)
        if ready is not None and (self._is_over(ready) or self._loop.time() - ready.begun_s > STALE_S):
            self._leave_ready(which)
        return lanes.finish(which, took_s)

    def crowd_out(self, lanes: Lanes, which: TargetId) -> None:
        """Puts back what would wait too long for its target."""
        crowded, room_in_s = lanes.crowded_out(which)
        for waiting in crowded:
            self._postpone(waiting, min(max(room_in_s, 1.0), self._settings.callback_postpone_s))

    def changed(self, which: TargetId) -> None:
        """An operator has said something of a target."""
        target = self._targets.get(which)
        if target is not None and target.disabled:
            self.hold_all_of(which)
            return
        if self._targets.rate_of(which):
            self._leave_ready(which)
        self._rates.renew(which, self._loop.time())
        for lanes in self._both:
            lanes.renew(which)
        self.admit()

    def hold_all_of(self, which: TargetId) -> None:
        """What waits for a target that may not be called (as others are) waits in PostgreSQL from now on."""
        for lanes in self._both:
            for waiting in lanes.take_out(lambda _waiting: True, which):
                self._ledger.hold(waiting)
            for waiting in lanes.take_ready(which):
                self._ledger.hold(waiting, begun=True)

    def revoked(self, partitions: frozenset[Partition]) -> None:
        """Lets go of what waits of partitions that are another process's now."""
        for lanes in self._both:
            lanes.take_out(lambda waiting: (waiting.record.topic, waiting.record.partition) in partitions)

    def close(self) -> list[Waiting]:
        """Takes out all who wait."""
        return [waiting for lanes in self._both for waiting in lanes.take_out(lambda _waiting: True)]

    def _send_back(self, now_s: float) -> None:
        for waiting in self.normal.overdue(now_s):
            self._postpone(waiting, self._settings.callback_postpone_s)
        for waiting in self.diverted.overdue(now_s):
            target = self._targets.get(waiting.callback.target)
            if target is not None and self._targets.abnormal(target):
                # It is let go again as a target is probed: less and less often.
                self._ledger.hold(waiting)
            else:
                self._postpone(waiting, self._settings.callback_postpone_s)

    def _postpone(self, waiting: Waiting, most_s: float) -> None:
        """Puts it back; spread, or all of a target's backlog would come again at one instant."""
        self._ledger.give_back(waiting, most_s * (0.25 + 0.75 * self._chance()))

    def _is_over(self, waiting: Waiting) -> bool:
        """Whether the attempt, written down already, may not be made any more."""
        target = self._targets.get(waiting.callback.target)
        if target is None:
            return False
        aside = self.of(waiting.record) is self.diverted
        return target.disabled or (not aside and self._targets.abnormal(target))

    def _leave(self, waiting: Waiting) -> None:
        """An attempt that is written down is not made: its callback waits in PostgreSQL, as the others of its target."""
        target = self._targets.get(waiting.callback.target)
        if target is not None and (target.disabled or self._targets.abnormal(target)):
            self._ledger.hold(waiting, begun=True)
        else:
            self._ledger.give_back(waiting, 0.0, begun=True)

    def _leave_ready(self, which: TargetId) -> None:
        for lanes in self._both:
            for waiting in lanes.take_ready(which):
                self._leave(waiting)
