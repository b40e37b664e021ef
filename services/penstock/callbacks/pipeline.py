"""Moves callbacks through the service, in one direction.

receive (`receiver`) → look up the target (`target_cache`, `target_store`) → queue (`router`,
`lanes`) → claim the attempt (`ledger`) → call (`caller`) → decide (`outcomes`) → record the outcome
(`ledger`).

The pipeline owns these parts and passes each result to the next part. No part refers to a later one
or calls it back. One module, because the order of the steps between two parts is what keeps a
callback from being called twice or lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import asyncpg

from penstock.callbacks import ledger
from penstock.callbacks.caller import Caller
from penstock.callbacks.hosts import Hosts
from penstock.callbacks.lanes import Lanes
from penstock.callbacks.ledger import EndedAttempt, Ledger
from penstock.callbacks.metrics import Metrics
from penstock.callbacks.outcomes import Outcomes, why_gone
from penstock.callbacks.receiver import InFlight, Receiver
from penstock.callbacks.requeuer import Drainer, QueueReader, Requeuer
from penstock.callbacks.results import ResultsPublisher
from penstock.callbacks.router import Call, Deferral, Router, SlowPool
from penstock.callbacks.secret_cache import SecretCache
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target import Attempt
from penstock.callbacks.target_cache import TargetCache
from penstock.callbacks.target_store import TargetStore
from penstock.concurrency.batcher import Batcher
from penstock.concurrency.timeout_queue import TimeoutQueue
from penstock.core.delivery import Dead, DeadReason, Delivered
from penstock.core.offset_tracker import Partition
from penstock.core.target import TargetId
from penstock.errors import PostgresUnavailable
from penstock.kafka.processing.processor import Delivery
from penstock.process import run_all

log = logging.getLogger(__name__)

# A timer that is later than this, in seconds, shows that this process was busy, and extends the
# time of the call. The second number bounds the extensions.
LATE_TIMER_S = 0.25
MOST_EXTENSIONS = 2
# Targets that one statement loads: new ones of one namespace delay those of another by it.
MOST_LOADED = 250
# Seconds between two searches for overdue callbacks.
OVERDUE_EVERY_S = 1.0
# Seconds that the maintenance of targets pauses while PostgreSQL is unavailable.
MAINTENANCE_RETRY_S = 1.0


class Pipeline:
    """Delivers callbacks.

    Args:
        settings: of the service.
        pool: of the database.
        caller: makes the calls.
        results: publishes the records of ended callbacks.
        requeuer: publishes callbacks again when they are due.
        hosts: of the targets; the caller's resolver tells them the addresses of their names.
        secret_cache: the secrets that sign; the caller reads it.
        owner: unique name of this process.
        partition_of: the partition of a URL's records.
        random_share: random numbers from 0 to 1, for jitter.

    Attributes:
        targets: loads and saves targets; it receives the notifications of their changes.
        metrics: of the service.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        caller: Caller,
        results: ResultsPublisher,
        requeuer: Requeuer,
        hosts: Hosts,
        secret_cache: SecretCache,
        *,
        owner: str,
        partition_of: Callable[[str], int],
        random_share: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._caller = caller
        self._results = results
        self._requeuer = requeuer
        self._secret_cache = secret_cache
        self._loop = asyncio.get_running_loop()
        self._cache = TargetCache(settings, hosts)
        self.targets = TargetStore(settings, pool, self._cache, owner, partition_of, self._is_in_flight)
        self._receiver = Receiver(self._cache)
        self._router = Router(settings, self._cache, random_share)
        self._drainer = Drainer(pool, self._cache, self._router)
        self._queue_reader = QueueReader(pool, self._cache, self._router, settings.lane_bounds.total_size)
        self._ledger = Ledger(settings, pool, owner)
        self._slow_pool = SlowPool(settings, self._cache)
        self._slow_timers: TimeoutQueue[Call] = TimeoutQueue(settings.callback_slow_s, self._turn_slow)
        self._outcomes = Outcomes(settings, random_share)
        self.metrics = Metrics(
            settings,
            self._router,
            self._slow_pool,
            self._ledger,
            self._cache,
            self._drainer,
            secret_cache,
            requeuer,
        )
        # The queues between the parts; each is read in batches. Namespaces take turns before the
        # call.
        self._loads = Batcher(self._load, max_size=MOST_LOADED, turn_of=lambda load: load[0].namespace)
        self._claims = Batcher(
            self._claim,
            linger_s=ledger.claim_linger_s,
            turn_of=lambda in_flight: in_flight.callback.target.namespace,
        )
        self._ended = Batcher(self._record_outcomes, linger_s=ledger.outcome_linger_s)
        self._postponed = Batcher(self._postpone)
        self._held = Batcher(self._hold)
        self._calls: set[asyncio.Task[None]] = set()
        # Has the first error of a call that is not a result.
        self._call_failed: asyncio.Future[None] = self._loop.create_future()
        # Callbacks whose last outcome is not recorded yet.
        self._unrecorded: set[str] = set()
        self._admit_timer: asyncio.TimerHandle | None = None

    @property
    def unfinished(self) -> int:
        """Claims and calls under way, unrecorded outcomes, and results that are published.

        A callback that was held has no record: only this count lets a stop wait for its claim.
        """
        return len(self._claims) + len(self._calls) + len(self._unrecorded) + len(self._results)

    async def receive(self, delivery: Delivery) -> None:
        """Takes a record in.

        It is settled once PostgreSQL has each of its callbacks as claimed, held or postponed.

        Raises:
            InvalidRecord: the record as a whole breaks its contract.
            KafkaUnavailable: an invalid part was not rejected, and nothing was received.
        """
        received = await self._receiver.receive(delivery)
        self.metrics.of(self._router.lanes_of(delivery)).received += len(received)
        if self._receiver.closed:
            self._defer(Deferral(in_flight, 0.0) for in_flight in received)
            return
        for in_flight in received:
            target_id = in_flight.callback.target
            if (target := self._cache.get(target_id)) is not None:
                self._defer(self._router.route(in_flight, target, self._loop.time()))
            elif self._receiver.wait_for_target(in_flight):
                self._loads.add((target_id, in_flight.record.partition))
        self._admit()

    async def assign(self, partitions: frozenset[Partition]) -> None:
        """Adds partitions.

        Raises:
            Fatal: they are not the same on both paths.
        """
        self.targets.assign(partitions)

    async def revoke(self, partitions: frozenset[Partition]) -> None:
        """Drops the callbacks of partitions that other processes may own, except claimed ones."""
        numbers = frozenset(number for _topic, number in partitions)
        self._router.revoke(partitions)
        self._receiver.revoke(numbers)
        self._cache.revoke(numbers)

    async def run(self, stopping: asyncio.Event) -> None:
        """Runs until cancelled; after `stopping` is set it only finishes the claimed calls.

        Raises:
            Exception: any error but those of targets and of unavailable servers.
        """
        batchers = (self._loads, self._claims, self._ended, self._postponed, self._held)
        try:
            await run_all(
                *(batcher.run() for batcher in batchers),
                self._results.run(),
                self._defer_overdue(),
                self._maintain_targets(),
                self._call_failed,
                self._close_on(stopping),
            )
        finally:
            if self._admit_timer is not None:
                self._admit_timer.cancel()
            # Their attempts are claimed, so the next one is made after the horizon.
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def _close_on(self, stopping: asyncio.Event) -> None:
        """Returns waiting callbacks to PostgreSQL: waiting could exceed the grace period."""
        await stopping.wait()
        waiting = [*self._receiver.close(), *self._router.close()]
        self._defer(Deferral(in_flight, 0.0) for in_flight in waiting)

    # Targets

    def _is_in_flight(self, target_id: TargetId) -> bool:
        return (
            self._router.has(target_id)
            or self._receiver.has(target_id)
            or self._slow_pool.calls_to(target_id) > 0
        )

    async def _load(self, batch: Sequence[tuple[TargetId, int]]) -> None:
        await self.targets.load(dict(batch))
        for in_flight, target in self._receiver.resolve(target_id for target_id, _partition in batch):
            self._defer(self._router.route(in_flight, target, self._loop.time()))
        self._admit()

    async def _maintain_targets(self) -> None:
        """Applies changes from PostgreSQL, saves the cache and drains held callbacks."""
        try:
            while True:
                await self.targets.wait()
                try:
                    for target_id in await self.targets.refresh():
                        self._defer(self._router.target_changed(target_id))
                        self._admit()
                    await self.targets.save_due()
                    await self.targets.find_troubled()
                    self._cache.evict_disabled(time.monotonic(), self._is_in_flight)
                    for in_flight in [] if self._receiver.closed else await self._queue_reader.read():
                        if self._cache.get(in_flight.callback.target) is not None:
                            self._router.requeue(in_flight, self._loop.time())
                    self._admit()
                    if await self._drainer.drain(time.monotonic()):
                        await self._requeuer.notify_due(0.0)
                except PostgresUnavailable as error:
                    log.warning(
                        "Saving the health of targets is delayed: PostgreSQL is unavailable",
                        extra={"event": "target_saving_delayed", "error": str(error)},
                    )
                    await asyncio.sleep(MAINTENANCE_RETRY_S)
        finally:
            await self.targets.save_last()

    # Queues

    def _defer(self, deferrals: Iterable[Deferral]) -> None:
        for deferral in deferrals:
            (self._held if deferral.due_in_s is None else self._postponed).add(deferral)

    def _admit(self) -> None:
        """Queues claims of the attempts that may begin."""
        if self._router.idle:
            return  # The usual case after a call.
        for in_flight in self._router.admit(self._loop.time()):
            self._claims.add(in_flight)
        at_s = self._router.next_paced_s()
        if self._admit_timer is not None:
            self._admit_timer.cancel()
        self._admit_timer = None if at_s is None else self._loop.call_at(at_s, self._admit)

    async def _defer_overdue(self) -> None:
        while True:
            await asyncio.sleep(OVERDUE_EVERY_S)
            self._defer(self._router.take_overdue(self._loop.time()))

    async def _postpone(self, batch: Sequence[Deferral]) -> None:
        await self._requeuer.notify_due(await self._ledger.postpone(batch))

    async def _hold(self, batch: Sequence[Deferral]) -> None:
        await self._ledger.hold(batch)
        for deferral in batch:
            target_id = deferral.in_flight.callback.target
            (self._cache.mark_queued if deferral.queued else self._cache.mark_held)([target_id])

    async def _claim(self, batch: Sequence[InFlight]) -> None:
        # After an outage of PostgreSQL the requeuer may publish callbacks whose outcomes wait here.
        ended = [in_flight for in_flight in batch if in_flight.callback.id in self._unrecorded]
        claimed = await self._ledger.claim([one for one in batch if one.callback.id not in self._unrecorded])
        claimed.refused.extend(ended)
        self._cache.mark_held(claimed.held_targets)
        if claimed.requeued:
            await self._requeuer.notify_due(0.0)
        # Before the calls, whose duration counts for the health of their targets.
        await self._secret_cache.prepare({granted.callback.target for granted in claimed.granted})
        calls, deferred = self._router.claimed(claimed.granted, claimed.refused, self._loop.time())
        self._defer(deferred)
        for in_flight in calls:
            self._start_call(in_flight, self._router.lanes_of(in_flight.record))
        self._admit()
        for in_flight in batch:
            in_flight.record.settle()

    # Calls

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
            self._defer(self._router.hold_all(callback.target))
        following = None
        if call.slow_place is not None:
            self._slow_pool.leave(call.slow_place)
        else:
            following = self._free_slot(call, result.took_s)
        # Without a request nothing is known about the target: it may hang.
        if result.called and not (call.slow and self._settings.callback_count_early):
            self._record_call(callback.target, slow=call.slow, failed=not isinstance(outcome, Delivered))
        self._defer(self._router.take_excess(call.lanes, callback.target))
        self._admit()
        self._cache.record_attempt(callback.target, Attempt.of(callback, result, time.time()))
        in_self_check = call.in_self_check or self._cache.in_self_check
        if in_self_check:
            outcome = self._outcomes.in_self_check(outcome, result)
        self.metrics.of(call.lanes).record_call(outcome, result.took_s, slow=call.slow)
        counts = result.called and not in_self_check
        ended = self._outcomes.ended(call.in_flight, result, outcome, counts=counts)
        self._unrecorded.add(callback.id)
        self._ended.add(ended)
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
        if self._settings.callback_count_early:
            self._record_call(target_id, slow=True)
        call.slow_place = self._slow_pool.enter(target_id)
        if call.slow_place is not None:
            following = self._free_slot(call, self._settings.callback_slow_s)
            if following is not None:
                self._start_call(following, call.lanes)
        self._defer(self._router.take_excess(call.lanes, target_id))
        self._admit()

    def _free_slot(self, call: Call, took_s: float) -> InFlight | None:
        target_id = call.in_flight.callback.target
        following, deferred = self._router.finish(call.lanes, target_id, took_s, self._loop.time())
        self._defer(deferred)
        return following

    def _record_call(self, target_id: TargetId, *, slow: bool, failed: bool = False) -> None:
        changed = self._cache.record_call(target_id, slow=slow, failed=failed)
        target = self._cache.get(target_id)
        if not changed or target is None:
            return
        if target.host.abnormal:
            self._defer(self._router.hold_host(target.host.id))
        elif self._cache.is_abnormal(target):
            self._defer(self._router.hold_all(target_id))

    # Outcomes

    async def _record_outcomes(self, batch: Sequence[EndedAttempt]) -> None:
        recorded = await self._ledger.record_outcomes(batch)
        self._unrecorded.difference_update(ended.callback.id for ended in batch)
        self._cache.disabling.difference_update(recorded.gone)
        self._results.publish(recorded.enqueued)
        if recorded.due_in_s is not None:
            await self._requeuer.notify_due(recorded.due_in_s)
