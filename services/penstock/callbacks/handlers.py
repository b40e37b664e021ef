"""A record's way: into its target's lane, begun, called, decided, settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import asyncpg
import orjson
from aiokafka import AIOKafkaProducer

from penstock.callbacks.batching import Batches, persevere
from penstock.callbacks.calling import Caller, Met
from penstock.callbacks.lanes import Lanes, Record, Waiting
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import Callback
from penstock.contracts.inbound import decode_callback
from penstock.core.delivery import Dead, Delivered, Reason, RetryIn
from penstock.kafka.connection import translated
from penstock.kafka.processor import Delivery
from penstock.kafka.topics import CALLBACKS_DEAD
from penstock.postgres import callbacks
from penstock.postgres.callbacks import Settled, Turn
from penstock.process import together

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ended:
    settled: Settled
    record: Record


@dataclass(frozen=True, slots=True)
class _Returned:
    waiting: Waiting
    due_in_s: float


class Deliverer:
    """Delivers what it is handed.

    Args:
        settings: of the service.
        pool: of the database.
        caller: makes the calls.
        producer: acks=all; for the dead.
        scheduled: told the seconds until the earliest of some retries is due.
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
        scheduled: Callable[[float], Awaitable[None]],
        fail: Callable[[BaseException], None],
        chance: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._caller = caller
        self._producer = producer
        self._scheduled = scheduled
        self._fail = fail
        self._chance = chance
        self._lanes = Lanes(
            slots=settings.callback_slots,
            target_slots=settings.callback_target_slots,
            patience_s=settings.callback_patience_s,
        )
        self._begin = Batches(self._begin_all)
        self._settle = Batches(self._settle_all)
        self._return = Batches(self._return_all)
        self._calls: set[asyncio.Task[None]] = set()
        self._closing = False

    async def take(self, delivery: Delivery) -> None:
        """Takes a record in; it is settled once PostgreSQL holds what became of it.

        Raises:
            InvalidRecord: it breaks its contract.
        """
        waiting = Waiting(decode_callback(delivery.value), delivery)
        if self._closing:
            self._return.add(_Returned(waiting, 0.0))
            return
        superfluous = self._lanes.put(waiting)
        if superfluous is not None:
            superfluous.settle()
        self._crowd_out(waiting.callback.target)
        self._admit()

    async def revoked(self, partitions: frozenset[tuple[str, int]]) -> None:
        """Lets go what has not begun of partitions that are another process's now; calls under way go on."""
        numbers = {number for _topic, number in partitions}
        self._lanes.take_out(lambda waiting: waiting.record.partition in numbers)

    async def run(self, stopping: asyncio.Event) -> None:
        """Writes begun, settled and returned callbacks until cancelled; begins nothing new once `stopping` is set.

        Raises:
            Exception: what neither a target nor an absent server explains.
        """
        try:
            await together(
                self._begin.run(), self._settle.run(), self._return.run(), self._close_on(stopping)
            )
        finally:
            # Their attempts are written down: whoever is next makes another after the horizon.
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def _close_on(self, stopping: asyncio.Event) -> None:
        """What waits in lanes could outlast any grace: it goes back, for another process to find at once."""
        await stopping.wait()
        self._closing = True
        for waiting in self._lanes.take_out(lambda _waiting: True):
            self._return.add(_Returned(waiting, 0.0))

    def _admit(self) -> None:
        for waiting in self._lanes.admit():
            self._begin.add(waiting)

    def _crowd_out(self, target: str) -> None:
        for waiting in self._lanes.crowded_out(target):
            # Spread, or all of a target's backlog would come back at one instant.
            due_in_s = self._settings.callback_postpone_s * (0.5 + self._chance())
            self._return.add(_Returned(waiting, due_in_s))

    async def _begin_all(self, batch: Sequence[Waiting]) -> None:
        turns: dict[Turn, Waiting] = {}
        for waiting in batch:
            turns.setdefault((waiting.callback.id, waiting.callback.attempt), waiting)
        horizon_s = self._settings.callback_horizon_s
        begun = await persevere(
            lambda: callbacks.begin(self._pool, list(turns), horizon_s=horizon_s), f"{len(batch)} callbacks"
        )
        for waiting in batch:
            turn = (waiting.callback.id, waiting.callback.attempt)
            if turn in begun and turns[turn] is waiting:
                self._start(waiting)
            else:
                # Made before, or under way, or owed by nobody: its fate is or will be in PostgreSQL.
                self._lanes.finish(waiting.callback.target, None)
                waiting.record.settle()
        self._admit()

    def _start(self, waiting: Waiting) -> None:
        call = asyncio.create_task(self._deliver(waiting))
        self._calls.add(call)
        call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            self._fail(error)

    async def _deliver(self, waiting: Waiting) -> None:
        callback = waiting.callback
        met = await self._caller.call(callback)
        self._lanes.finish(callback.target, met.took_s)
        self._crowd_out(callback.target)
        self._admit()
        attempt = callback.attempt + 1
        fate = self._settings.policy.decide(
            met.status,
            attempt,
            met.retry_after_s,
            self._chance(),
            callable_target=met.callable_target,
        )
        match fate:
            case Delivered():
                settled = Settled(id=callback.id, attempt=attempt, state="delivered")
            case RetryIn(seconds):
                log.info("%s: attempt %d: %s; again in %.1f s", callback.id, attempt, met.message, seconds)
                settled = Settled(
                    id=callback.id,
                    attempt=attempt,
                    state="pending",
                    error=orjson.dumps(met.to_wire()).decode(),
                    due_in_s=seconds,
                )
            case Dead(reason):
                error = {**met.to_wire(), "message": _last_words(met, attempt, reason)}
                log.warning("%s is dead: %s", callback.id, error["message"])
                # Before the row: a row that says dead has its record.
                await persevere(lambda: self._bury(callback, attempt, error), f"{callback.id}, dead,")
                settled = Settled(
                    id=callback.id, attempt=attempt, state="dead", error=orjson.dumps(error).decode()
                )
        self._settle.add(_Ended(settled, waiting.record))

    async def _bury(self, callback: Callback, attempt: int, error: dict[str, object]) -> None:
        value = orjson.dumps(
            {
                "id": callback.id,
                "target": callback.target,
                "task_id": callback.task_id,
                "attempt": attempt,
                "body": callback.body.decode(),
                "error": error,
                "dead_at": datetime.now(UTC),
                **callback.shown_options(),
            }
        )
        topic = self._settings.prefix + CALLBACKS_DEAD.name
        with translated():
            await self._producer.send_and_wait(topic, value, key=callback.target.encode())

    async def _settle_all(self, batch: Sequence[_Ended]) -> None:
        # Never two of one callback: `begin` gives each attempt once, and the next one begins after a `due`.
        settled = [ended.settled for ended in batch]
        await persevere(lambda: callbacks.settle(self._pool, settled), f"the fate of {len(batch)} callbacks")
        for ended in batch:
            ended.record.settle()
        retries = [s.due_in_s for s in settled if s.state == "pending"]
        if retries:
            await self._scheduled(min(retries))

    async def _return_all(self, batch: Sequence[_Returned]) -> None:
        turns = [(r.waiting.callback.id, r.waiting.callback.attempt) for r in batch]
        dues_s = [r.due_in_s for r in batch]
        await persevere(
            lambda: callbacks.postpone(self._pool, turns, dues_s), f"the return of {len(batch)} callbacks"
        )
        for returned in batch:
            returned.waiting.record.settle()
        await self._scheduled(min(dues_s))


def _last_words(met: Met, attempt: int, reason: Reason) -> str:
    match reason:
        case Reason.GONE:
            return f"{met.message}: it is gone"
        case Reason.EXHAUSTED:
            return f"{met.message}; attempt {attempt} was the last"
        case Reason.UNCALLABLE:
            return met.message
