"""A record's way: to its target's judge, into a lane or into PostgreSQL, begun, called; `fates` has the rest of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.callbacks.call import Call
from penstock.callbacks.calling import Caller
from penstock.callbacks.fates import Fates
from penstock.callbacks.figures import Figures
from penstock.callbacks.hand import Record, Waiting
from penstock.callbacks.intake import Intake
from penstock.callbacks.known import Attempt, Target
from penstock.callbacks.lanes import Lanes, SlowPool
from penstock.callbacks.ledger import Ledger
from penstock.callbacks.patience import Patience
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.targets import Targets
from penstock.core.acknowledgement import Partition
from penstock.core.delivery import Dead, Delivered, Reason
from penstock.core.rates import Rates
from penstock.core.target import TargetId
from penstock.errors import Fatal, Invalid
from penstock.kafka.processor import Delivery
from penstock.kafka.topics import CALLBACKS, CALLBACKS_DIVERTED
from penstock.process import together

# A timer that is later than this, in seconds, tells of this process and not of the target; but only so many times.
STOOD_STILL_S = 0.25
# What was written down ahead and could not be called for so long, in seconds, is not called from here: its target is quick
# no more, and another attempt begins when the horizon of this one has passed.
STALE_S = 1.0
MOST_SPARED = 2


class Deliverer:
    """Delivers what it is handed.

    Args:
        settings: of the service.
        pool: of the database.
        caller: makes the calls.
        producer: acks=all; for results and the dead.
        owner: this process, unlike any other.
        partition_of: the partition of the records of an address.
        scheduled: told the seconds until the earliest of some callbacks is due.
        reject: parks an entry of a record that breaks its contract.
        fail: ends the service with an error.
        chance: random numbers from 0 to 1, for jitter.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        caller: Caller,
        producer: AIOKafkaProducer,
        *,
        owner: str,
        partition_of: Callable[[str], int],
        scheduled: Callable[[float], Awaitable[None]],
        reject: Callable[[Delivery, Invalid, bytes], Awaitable[None]],
        fail: Callable[[BaseException], None],
        chance: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._caller = caller
        self._scheduled = scheduled
        self._fail = fail
        self._chance = chance
        self.targets = Targets(
            settings,
            pool,
            owner,
            partition_of=partition_of,
            room=self._room,
            waiting=lambda which: self._diverted.waiting_for(which),  # noqa: PLW0108 (made below)
            changed=self._changed,
            in_hand=self._in_hand,
        )
        # One for both paths: a target has one rate.
        rates, doubtful = Rates(self.targets.rate_of), self.targets.is_hanging
        self._lanes = Lanes(settings.room, doubtful=doubtful, rates=rates)
        bound = self.targets.drain_rate_of
        self._diverted = Lanes(settings.diverted_room, doubtful=doubtful, rates=rates, bound=bound)
        self._paths = (self._lanes, self._diverted)
        self._slow = SlowPool(settings.callback_slow_slots, settings.callback_slow_target_slots)
        self._ledger = Ledger(
            settings,
            pool,
            producer,
            scheduled=scheduled,
            begun=self._begun,
            held=self.targets.holding,
        )
        self._fates = Fates(settings, self.targets, self._ledger, stop=self._hold_all_of, chance=chance)
        self.figures = Figures(
            settings,
            normal=self._lanes,
            diverted=self._diverted,
            slow=self._slow,
            ledger=self._ledger,
            targets=self.targets,
        )
        self._intake = Intake(
            settings,
            self.targets,
            reject=reject,
            route=self._route,
            taken=self._taken,
            loaded=self._admit,
        )
        self._calls: set[asyncio.Task[None]] = set()
        self._patience: Patience[Call] = Patience(settings.callback_slow_s, self._turned_slow)
        self._wake: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._closing = False

    @property
    def under_way(self) -> int:
        """Calls whose end, or what came of it, is still to be written down."""
        return len(self._calls) + self._ledger.unwritten

    async def take(self, delivery: Delivery) -> None:
        """Takes a record in; it is settled once PostgreSQL holds all in it as held, put back or begun.

        Raises:
            InvalidRecord: it breaks its contract, as a whole.
            KafkaUnavailable: what does so in part is not parked; nothing was taken in.
        """
        for waiting in await self._intake.take(delivery):
            self._ledger.give_back(waiting, 0.0)
        self._admit()

    async def assigned(self, partitions: frozenset[Partition]) -> None:
        """These partitions come here now.

        Raises:
            Fatal: a target's two paths do not come to the same process, which could not judge it.
        """
        paths = {
            topic: {number for name, number in partitions if name == topic.name}
            for topic in (CALLBACKS, CALLBACKS_DIVERTED)
        }
        if paths[CALLBACKS] != paths[CALLBACKS_DIVERTED]:
            raise Fatal(
                f"{CALLBACKS.name} and {CALLBACKS_DIVERTED.name} must have the same number of partitions: "
                f"{sorted(paths[CALLBACKS])} and {sorted(paths[CALLBACKS_DIVERTED])} came here"
            )
        self.targets.assigned(paths[CALLBACKS])

    async def revoked(self, partitions: frozenset[Partition]) -> None:
        """Lets go what has not begun of partitions that are another process's now; calls under way go on."""
        for lanes in self._paths:
            lanes.take_out(lambda waiting: (waiting.record.topic, waiting.record.partition) in partitions)
        numbers = frozenset(number for _topic, number in partitions)
        self._intake.revoked(numbers)
        self.targets.revoked(numbers)

    async def run(self, stopping: asyncio.Event) -> None:
        """Calls and writes until cancelled; begins nothing new once `stopping` is set, and calls what is begun.

        Raises:
            Exception: what neither a target nor an absent server explains.
        """
        try:
            await together(
                self._ledger.run(),
                self._intake.run(),
                self.targets.run(self._scheduled),
                self._close_on(stopping),
            )
        finally:
            if self._wake is not None:
                self._wake.cancel()
            # Their attempts are written down: whoever is next makes another after the horizon.
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def _close_on(self, stopping: asyncio.Event) -> None:
        """What waits in lanes could outlast any grace: it goes back, for another process to find at once."""
        await stopping.wait()
        self._closing = True
        waiting = self._intake.close()
        for lanes in self._paths:
            waiting += lanes.take_out(lambda _waiting: True)
        for one in waiting:
            self._ledger.give_back(one, 0.0)

    def _taken(self, delivery: Delivery, count: int) -> None:
        self.figures.of(self._lanes_of(delivery)).taken += count

    def _route(self, waiting: Waiting, target: Target) -> None:
        aside = waiting.record.topic == CALLBACKS_DIVERTED.name
        which = waiting.callback.target
        if target.disabled or (self.targets.abnormal(target) and not aside):
            self._ledger.hold(waiting)
            return
        lanes = self._diverted if aside else self._lanes
        if aside and (
            (target.hanging and self._is_busy(which)) or lanes.waiting >= self._settings.callback_waiting
        ):
            # One at a time is enough to see whether it answers again.
            self._ledger.hold(waiting)
            return
        if (
            lanes.waiting >= self._settings.callback_in_hand
            and lanes.waiting_for(which) >= self._settings.callback_target_slots
        ):
            # Those that take long must not fill the hand: reading goes on.
            self._ledger.give_back(waiting, self._postponed_s(self._settings.callback_postpone_s))
            return
        superfluous = lanes.put(waiting)
        if superfluous is not None:
            superfluous.settle()
        self._crowd_out(lanes, which)

    def _is_busy(self, which: TargetId) -> bool:
        return bool(self._diverted.waiting_for(which) or self._diverted.held_by(which))

    def _in_hand(self, which: TargetId) -> bool:
        """Whether it is called, or something here waits for it."""
        waits = any(lanes.waiting_for(which) or lanes.held_by(which) for lanes in self._paths)
        return waits or self._intake.waits_for(which) or self._slow.calling_to(which) > 0

    def _room(self) -> int:
        return self._settings.callback_waiting - self._diverted.waiting

    def _admit(self) -> None:
        if self._lanes.idle and self._diverted.idle:
            return  # As after most calls.
        now_s = self._loop.time()
        for lanes in self._paths:
            for waiting in lanes.admit(now_s):
                self._ledger.begin(waiting)
        turns_s = [turn_s for lanes in self._paths if (turn_s := lanes.next_turn_s()) is not None]
        if self._wake is not None:
            self._wake.cancel()
        self._wake = self._loop.call_at(min(turns_s), self._admit) if turns_s else None

    def _crowd_out(self, lanes: Lanes, which: TargetId) -> None:
        crowded, room_in_s = lanes.crowded_out(which)
        for waiting in crowded:
            due_in_s = min(max(room_in_s, 1.0), self._settings.callback_postpone_s)
            self._ledger.give_back(waiting, self._postponed_s(due_in_s))

    def _postponed_s(self, most_s: float) -> float:
        """Spread, or all of a target's backlog would come back at one instant."""
        return most_s * (0.25 + 0.75 * self._chance())

    def _lanes_of(self, record: Record) -> Lanes:
        return self._diverted if record.topic == CALLBACKS_DIVERTED.name else self._lanes

    def _begun(self, mine: Iterable[Waiting], others: Iterable[Waiting]) -> None:
        for waiting in mine:
            lanes = self._lanes_of(waiting.record)
            if self._is_over(waiting):
                lanes.forgo(waiting.callback.target)
                self._leave(waiting)
            else:
                waiting.begun_s = self._loop.time()
                if lanes.may_call(waiting):
                    self._call(waiting, lanes)
        for waiting in others:
            self._lanes_of(waiting.record).forgo(waiting.callback.target)
        self._admit()

    def _call(self, waiting: Waiting, lanes: Lanes) -> None:
        call = asyncio.create_task(self._deliver(waiting, lanes))
        self._calls.add(call)
        call.add_done_callback(self._ended)

    def _finish(self, call: Call, took_s: float) -> Waiting | None:
        """The slot of a call is free; returns who is to be called in its place."""
        which = call.waiting.callback.target
        ready = call.lanes.next_ready(which)
        if ready is not None and (self._is_over(ready) or self._loop.time() - ready.begun_s > STALE_S):
            self._leave_ready(which)
        return call.lanes.finish(which, took_s)

    def _is_over(self, waiting: Waiting) -> bool:
        """Whether the attempt, written down already, may not be made any more."""
        target = self.targets.get(waiting.callback.target)
        if target is None:
            return False
        aside = waiting.record.topic == CALLBACKS_DIVERTED.name
        return target.disabled or (not aside and self.targets.abnormal(target))

    def _leave(self, waiting: Waiting) -> None:
        """An attempt that is written down is not made: its callback waits in PostgreSQL, as the others of its target."""
        target = self.targets.get(waiting.callback.target)
        if target is not None and (target.disabled or self.targets.abnormal(target)):
            self._ledger.hold(waiting, begun=True)
        else:
            self._ledger.give_back(waiting, 0.0, begun=True)

    def _changed(self, which: TargetId) -> None:
        """An operator has said something of a target."""
        target = self.targets.get(which)
        if target is not None and target.disabled:
            self._hold_all_of(which)
        elif self.targets.rate_of(which):
            self._leave_ready(which)

    def _leave_ready(self, which: TargetId) -> None:
        for lanes in self._paths:
            for waiting in lanes.take_ready(which):
                self._leave(waiting)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            self._fail(error)

    async def _deliver(self, waiting: Waiting, lanes: Lanes) -> None:
        """Calls one target, and then whoever has waited for this call to end: one task for many short calls."""
        following: Waiting | None = waiting
        while following is not None:
            following = await self._make(Call(following, lanes, self.targets.suspicious))

    async def _make(self, call: Call) -> Waiting | None:
        callback = call.waiting.callback
        self._patience.begin(call)
        try:
            met = await self._caller.call(callback)
        finally:
            self._patience.end(call)
            if call.timer is not None:
                call.timer.cancel()
        fate = self._fates.decide(call.waiting, met)
        if fate == Dead(Reason.GONE):
            # Before anything else is called there.
            self.targets.stop(callback.target)
            self._hold_all_of(callback.target)
        following = None
        if call.moved:
            self._slow.leave(callback.target)
        else:
            following = self._finish(call, met.took_s)
        if not (call.slow and self._settings.callback_count_early):
            self._charge(callback.target, slow=call.slow, failed=not isinstance(fate, Delivered))
        self._crowd_out(call.lanes, callback.target)
        self._admit()
        self.targets.attempted(callback.target, Attempt.of(callback, met, time.time()))
        suspicious = call.suspicious or self.targets.suspicious
        if suspicious:
            fate = self._fates.patient(fate, met)
        self.figures.of(call.lanes).ended(fate, met.took_s, slow=call.slow)
        if isinstance(fate, Dead):
            if following is not None:
                # Not after what is waited for here.
                self._call(following, call.lanes)
            await self._fates.bury(call.waiting, met, fate, counts=not suspicious)
            return None
        self._fates.settle(call.waiting, met, fate, counts=not suspicious)
        return following

    def _turned_slow(self, call: Call, since_s: float) -> None:
        """A call has taken so long that it is slow: it is charged now, and goes on elsewhere if there is room."""
        now_s = self._loop.time()
        late_s = now_s - since_s
        if late_s > STOOD_STILL_S and call.spared < MOST_SPARED:
            # It was this process that stood still, and the answer may be waiting to be read.
            call.spared += 1
            again_s = now_s + min(late_s, self._settings.callback_slow_s)
            call.timer = self._loop.call_at(again_s, self._turned_slow, call, again_s)
            return
        call.slow = True
        target = call.waiting.callback.target
        if self._settings.callback_count_early:
            self._charge(target, slow=True)
        if self._slow.enter(target):
            call.moved = True
            following = self._finish(call, self._settings.callback_slow_s)
            if following is not None:
                self._call(following, call.lanes)
        self._crowd_out(call.lanes, target)
        self._admit()

    def _charge(self, which: TargetId, *, slow: bool, failed: bool = False) -> None:
        changed = self.targets.called(which, slow=slow, failed=failed)
        target = self.targets.get(which)
        if changed and target is not None and self.targets.abnormal(target):
            self._hold_all_of(which)

    def _hold_all_of(self, which: TargetId) -> None:
        """What waits for a target that may not be called (as others are) waits in PostgreSQL from now on."""
        for lanes in self._paths:
            for waiting in lanes.take_out(lambda _waiting: True, which):
                self._ledger.hold(waiting)
            for waiting in lanes.take_ready(which):
                self._ledger.hold(waiting, begun=True)
