"""The second stage: each callback waits for its turn, its attempt is claimed, and it is called.

queue (`router`, `lanes`) → claim the attempt (`ledger`) → call (`caller`) → decide (`outcomes`).
A slow call moves to the slow pool. Every callback leaves for the `recorder`: with an outcome, or as
a deferral if it is not called now.

One module, because the order of the steps between queue and decision is what keeps a callback from
being called twice or lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from penstock.callbacks.caller import Caller
from penstock.callbacks.lanes import Lanes
from penstock.callbacks.ledger import Ledger, claim_linger_s
from penstock.callbacks.metrics import Metrics
from penstock.callbacks.outcomes import Outcomes, why_gone
from penstock.callbacks.receiver import InFlight
from penstock.callbacks.recorder import Recorder
from penstock.callbacks.router import Call, Router
from penstock.callbacks.secret_cache import SecretCache
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target import Attempt, Target
from penstock.callbacks.target_cache import TargetCache
from penstock.concurrency.batcher import Batcher
from penstock.concurrency.timeout_queue import TimeoutQueue
from penstock.core.delivery import Dead, DeadReason, Delivered
from penstock.core.target import TargetId
from penstock.process import run_all

# A timer that is later than this, in seconds, shows that this process was busy, and extends the
# time of the call. The second number bounds the extensions.
LATE_TIMER_S = 0.25
MOST_EXTENSIONS = 2
# Seconds between two searches for overdue callbacks.
OVERDUE_EVERY_S = 1.0


class Turn:
    """Calls targets.

    Args:
        settings: of the service.
        cache: the state of the targets.
        router: has the lanes in which callbacks wait, and the slow calls.
        attempts: claims them.
        caller: makes the calls.
        outcomes: decides.
        secret_cache: the secrets that sign; the caller reads it.
        metrics: counts calls.
        recorder: the next stage.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        cache: TargetCache,
        router: Router,
        attempts: Ledger,
        caller: Caller,
        outcomes: Outcomes,
        secret_cache: SecretCache,
        metrics: Metrics,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._router = router
        self._attempts = attempts
        self._caller = caller
        self._outcomes = outcomes
        self._secret_cache = secret_cache
        self._metrics = metrics
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._slow_timers: TimeoutQueue[Call] = TimeoutQueue(settings.callback_slow_s, self._turn_slow)
        self._claims = Batcher(
            self._claim,
            linger_s=claim_linger_s,
            turn_of=lambda in_flight: in_flight.callback.target.namespace,
        )
        self._calls: set[asyncio.Task[None]] = set()
        # Has the first error of a call that is not a result.
        self._call_failed: asyncio.Future[None] = self._loop.create_future()
        self._admit_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Claims and calls under way."""
        return len(self._claims) + len(self._calls)

    def queue(self, in_flight: InFlight, target: Target) -> None:
        """Queues a callback, or defers it; `admit` begins what may begin."""
        self._recorder.defer(self._router.route(in_flight, target, self._loop.time()))

    def requeue(self, in_flight: InFlight) -> None:
        """Queues a callback that was held behind others of its target."""
        if self._cache.get(in_flight.callback.target) is not None:
            self._router.put(in_flight, self._loop.time())

    async def run(self) -> None:
        """Calls until cancelled.

        Raises:
            Exception: any error but those of targets and of unavailable servers.
        """
        try:
            await run_all(self._claims.run(), self._defer_overdue(), self._call_failed)
        finally:
            if self._admit_timer is not None:
                self._admit_timer.cancel()
            # Their attempts are claimed, so the next one is made after the horizon.
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    def admit(self) -> None:
        """Queues claims of the attempts that may begin."""
        if self._router.idle:
            return  # The usual case after a call.
        for in_flight in self._router.admit(self._loop.time()):
            self._claims.add(in_flight)
        at_s = self._router.next_paced_s()
        if self._admit_timer is not None:
            self._admit_timer.cancel()
        self._admit_timer = None if at_s is None else self._loop.call_at(at_s, self.admit)

    async def _defer_overdue(self) -> None:
        while True:
            await asyncio.sleep(OVERDUE_EVERY_S)
            self._recorder.defer(self._router.take_overdue(self._loop.time()))

    async def _claim(self, batch: Sequence[InFlight]) -> None:
        # After an outage of PostgreSQL the requeuer may publish callbacks whose outcomes wait.
        ended = [in_flight for in_flight in batch if in_flight.callback.id in self._recorder]
        claimed = await self._attempts.claim([one for one in batch if one.callback.id not in self._recorder])
        claimed.refused.extend(ended)  # As they were before the statement: each slot is freed once.
        self._cache.mark_held(claimed.held_targets)
        if claimed.requeued:
            await self._recorder.notify_due()
        # Before the calls, whose duration counts for the health of their targets.
        await self._secret_cache.prepare({granted.callback.target for granted in claimed.granted})
        calls, deferred = self._router.claimed(claimed.granted, claimed.refused, self._loop.time())
        self._recorder.defer(deferred)
        for in_flight in calls:
            self._start_call(in_flight, self._router.lanes_of(in_flight.record))
        self.admit()
        for in_flight in batch:
            in_flight.record.settle()

    def _start_call(self, in_flight: InFlight, lanes: Lanes) -> None:
        call = asyncio.create_task(self._call_in_turn(in_flight, lanes))
        self._calls.add(call)
        call.add_done_callback(self._finish_call)

    def _finish_call(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None and not self._call_failed.done():
            self._call_failed.set_exception(error)

    async def _call_in_turn(self, in_flight: InFlight, lanes: Lanes) -> None:
        """Makes a call, then the calls that wait for its slot: one task serves many short calls."""
        following: InFlight | None = in_flight
        while following is not None:
            following = await self._call(Call(following, lanes, self._cache.in_self_check))

    async def _call(self, call: Call) -> InFlight | None:
        """Makes one call; returns the callback to call next on the same slot."""
        callback = call.in_flight.callback
        self._slow_timers.add(call)
        try:
            result = await self._caller.call(callback)
        finally:
            self._slow_timers.remove(call)
            if call.timer is not None:
                call.timer.cancel()
        outcome = self._outcomes.decide(call.in_flight, result)
        if outcome == Dead(DeadReason.GONE):
            # Before the next call to this target starts.
            self._cache.disable_gone(callback.target, why_gone(callback, result))
            self._recorder.defer(self._router.hold_all(callback.target))
        following = None
        if call.slow_place is not None:
            self._router.slow_pool.leave(call.slow_place)
        else:
            following = self._free_slot(call, result.took_s)
        # Without a request nothing is known about the target: it may hang.
        if result.called and not (call.slow and self._settings.counts_early):
            self._record_call(callback.target, slow=call.slow, failed=not isinstance(outcome, Delivered))
        self._recorder.defer(self._router.take_excess(call.lanes, callback.target))
        self.admit()
        self._cache.record_attempt(callback.target, Attempt.of(callback, result, time.time()))
        in_self_check = call.in_self_check or self._cache.in_self_check
        if in_self_check:
            outcome = self._outcomes.in_self_check(outcome, result)
        self._metrics.of(call.lanes).record_call(outcome, result.took_s, slow=call.slow)
        counts = result.called and not in_self_check
        ended = self._outcomes.ended(call.in_flight, result, outcome, counts=counts)
        self._recorder.record(ended)
        return following

    def _turn_slow(self, call: Call, due_at_s: float) -> None:
        """Counts a call under way as slow, and moves it to the slow pool if there is room."""
        now_s = self._loop.time()
        late_s = now_s - due_at_s
        if late_s > LATE_TIMER_S and call.extensions < MOST_EXTENSIONS:
            # The event loop was busy, and the answer may be waiting to be read.
            call.extensions += 1
            again_at_s = now_s + min(late_s, self._settings.callback_slow_s)
            call.timer = self._loop.call_at(again_at_s, self._turn_slow, call, again_at_s)
            return
        call.slow = True
        target_id = call.in_flight.callback.target
        if self._settings.counts_early:
            self._record_call(target_id, slow=True)
        call.slow_place = self._router.slow_pool.enter(target_id)
        if call.slow_place is not None:
            following = self._free_slot(call, self._settings.callback_slow_s)
            if following is not None:
                self._start_call(following, call.lanes)
        self._recorder.defer(self._router.take_excess(call.lanes, target_id))
        self.admit()

    def _free_slot(self, call: Call, took_s: float) -> InFlight | None:
        target_id = call.in_flight.callback.target
        following, deferred = self._router.finish(call.lanes, target_id, took_s, self._loop.time())
        self._recorder.defer(deferred)
        return following

    def _record_call(self, target_id: TargetId, *, slow: bool, failed: bool = False) -> None:
        changed = self._cache.record_call(target_id, slow=slow, failed=failed)
        target = self._cache.get(target_id)
        if not changed or target is None:
            return
        if target.host.abnormal:
            self._recorder.defer(self._router.hold_host(target.host.id))
        elif self._cache.is_abnormal(target):
            self._recorder.defer(self._router.hold_all(target_id))
