"""A record's way: `intake` takes it, it waits on one of the `paths`, is called here, and `fates` has the rest of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.callbacks.call import Call
from penstock.callbacks.calling import Caller
from penstock.callbacks.fates import Fates
from penstock.callbacks.figures import Figures
from penstock.callbacks.hand import Waiting
from penstock.callbacks.intake import Intake
from penstock.callbacks.known import Attempt
from penstock.callbacks.lanes import Lanes
from penstock.callbacks.ledger import Ledger
from penstock.callbacks.paths import Paths
from penstock.callbacks.patience import Patience
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.slow_pool import SlowPool
from penstock.callbacks.targets import Targets
from penstock.core.acknowledgement import Partition
from penstock.core.delivery import Dead, Delivered, Reason
from penstock.core.target import TargetId
from penstock.errors import Fatal, Invalid
from penstock.kafka.processor import Delivery
from penstock.kafka.topics import CALLBACKS, CALLBACKS_DIVERTED
from penstock.process import together

# A timer that is later than this, in seconds, tells of this process and not of the target; but only so many times.
STOOD_STILL_S = 0.25
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
        self.targets = Targets(
            settings,
            pool,
            owner,
            partition_of=partition_of,
            # What waits is made below.
            room=lambda: self._paths.room,
            waiting=lambda which: self._paths.diverted.waiting_for(which),  # noqa: PLW0108 (see above)
            changed=lambda which: self._paths.changed(which),  # noqa: PLW0108 (see above)
            in_hand=self._in_hand,
        )
        self._slow = SlowPool(settings.callback_slow_slots, settings.callback_slow_target_slots)
        self._ledger = Ledger(
            settings,
            pool,
            producer,
            scheduled=scheduled,
            begun=lambda mine, others: self._paths.begun(mine, others),  # noqa: PLW0108 (see above)
            held=self.targets.holding,
        )
        self._paths = Paths(settings, self.targets, self._ledger, call=self._call, chance=chance)
        self._fates = Fates(settings, self.targets, self._ledger, stop=self._paths.hold_all_of, chance=chance)
        self.figures = Figures(
            settings,
            normal=self._paths.normal,
            diverted=self._paths.diverted,
            slow=self._slow,
            ledger=self._ledger,
            targets=self.targets,
        )
        self._intake = Intake(
            settings,
            self.targets,
            reject=reject,
            route=self._paths.route,
            taken=self._taken,
            loaded=self._paths.admit,
        )
        self._calls: set[asyncio.Task[None]] = set()
        self._patience: Patience[Call] = Patience(settings.callback_slow_s, self._turned_slow)
        self._loop = asyncio.get_running_loop()

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
        self._paths.admit()

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
        self._paths.revoked(partitions)
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
                self._paths.run(),
                self.targets.run(self._scheduled),
                self._close_on(stopping),
            )
        finally:
            # Their attempts are written down: whoever is next makes another after the horizon.
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def _close_on(self, stopping: asyncio.Event) -> None:
        """What waits in lanes could outlast any grace: it goes back, for another process to find at once."""
        await stopping.wait()
        for one in [*self._intake.close(), *self._paths.close()]:
            self._ledger.give_back(one, 0.0)

    def _taken(self, delivery: Delivery, count: int) -> None:
        self.figures.of(self._paths.of(delivery)).taken += count

    def _in_hand(self, which: TargetId) -> bool:
        """Whether it is called, or something here waits for it."""
        return self._paths.have(which) or self._intake.waits_for(which) or self._slow.calling_to(which) > 0

    def _call(self, waiting: Waiting, lanes: Lanes) -> None:
        call = asyncio.create_task(self._deliver(waiting, lanes))
        self._calls.add(call)
        call.add_done_callback(self._ended)

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
            self._paths.hold_all_of(callback.target)
        following = None
        if call.moved:
            self._slow.leave(callback.target)
        else:
            following = self._paths.finish(call.lanes, callback.target, met.took_s)
        if not (call.slow and self._settings.callback_count_early):
            self._charge(callback.target, slow=call.slow, failed=not isinstance(fate, Delivered))
        self._paths.crowd_out(call.lanes, callback.target)
        self._paths.admit()
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
            following = self._paths.finish(call.lanes, target, self._settings.callback_slow_s)
            if following is not None:
                self._call(following, call.lanes)
        self._paths.crowd_out(call.lanes, target)
        self._paths.admit()

    def _charge(self, which: TargetId, *, slow: bool, failed: bool = False) -> None:
        changed = self.targets.called(which, slow=slow, failed=failed)
        target = self.targets.get(which)
        if changed and target is not None and self.targets.abnormal(target):
            self._paths.hold_all_of(which)
