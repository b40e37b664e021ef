"""What is written down of callbacks: begun, settled, returned, held; many in one statement, each in its time.

Guarantees: an attempt is numbered in PostgreSQL before it is made, and each number is given once. A record is
acknowledged when PostgreSQL holds what became of it. What a callback came to is on `callbacks.results`, and the
dead on `callbacks.dead`, before PostgreSQL says so. While a server is away everything here waits.

PostgreSQL holds an attempt from the moment it is begun (it comes due again after the horizon), so its record is acknowledged
then: records are acknowledged in order, and a call that hangs would hold back all behind it until nothing more is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg
import orjson
from aiokafka import AIOKafkaProducer

from penstock.callbacks.batching import Batches, persevere
from penstock.callbacks.hand import Waiting
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import Callback
from penstock.core.target import TargetId
from penstock.kafka.connection import translated
from penstock.kafka.outbox import send_all
from penstock.kafka.topics import CALLBACKS_DEAD, CALLBACKS_RESULTS
from penstock.postgres import callbacks
from penstock.postgres.callbacks import Settled, Turn
from penstock.process import together

# The fate of an attempt waits so long for others, since no call waits for it; what is to be begun does so while there is
# much of it.
SETTLE_LINGER_S = 0.02
# Under load longer: what a crash forgets, and is called again, is so much more, and a delivery costs a thirtieth less.
SETTLE_MANY = 50
SETTLE_MANY_LINGER_S = 0.05
BEGIN_LINGER_S = 0.005
MUCH = 4


# Not frozen: see `calling.Met`.
@dataclass(slots=True)
class Ended:
    """An attempt that was made.

    Attributes:
        callback: as its record said.
        settled: what became of it.
        took_s: what the call took, in seconds.
        status: what the target answered.
        error: what it met instead of success.
    """

    callback: Callback
    settled: Settled
    took_s: float
    status: int | None
    error: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Returned:
    waiting: Waiting
    due_in_s: float
    begun: bool


class Ledger:
    """Writes for a `Deliverer`.

    Args:
        settings: of the service.
        pool: of the database.
        producer: acks=all; for results and the dead.
        scheduled: told the seconds until the earliest of some callbacks is due.
        begun: told of those whose attempt is to be made now, and of the others of its batch.
        held: told of targets for which something is held.

    Attributes:
        held: how many callbacks have been held.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
        *,
        scheduled: Callable[[float], Awaitable[None]],
        begun: Callable[[Sequence[Waiting], Sequence[Waiting]], None],
        held: Callable[[Iterable[TargetId]], None],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._producer = producer
        self._scheduled = scheduled
        self._begun = begun
        self._held = held
        # Callbacks, since the start.
        self.held = 0
        self._begin = Batches(self._begin_all, linger_s=BEGIN_LINGER_S, few=MUCH)
        self._settle = Batches(
            self._settle_all,
            linger_s=SETTLE_LINGER_S,
            many=SETTLE_MANY,
            many_linger_s=SETTLE_MANY_LINGER_S,
        )
        self._return = Batches(self._return_all)
        self._hold = Batches(self._hold_all)
        self._unwritten = 0

    @property
    def unwritten(self) -> int:
        """Attempts that have ended and whose fate is not written down yet."""
        return self._unwritten

    async def run(self) -> None:
        """Writes until cancelled.

        Raises:
            Exception: what no absent server explains.
        """
        await together(self._begin.run(), self._settle.run(), self._return.run(), self._hold.run())

    def begin(self, waiting: Waiting) -> None:
        """Asks for the right to make an attempt."""
        self._begin.add(waiting)

    def settle(self, ended: Ended) -> None:
        """An attempt has ended."""
        self._unwritten += 1
        self._settle.add(ended)

    def give_back(self, waiting: Waiting, due_in_s: float, *, begun: bool = False) -> None:
        """Not now: its record is written again in so many seconds.

        Args:
            waiting: the callback.
            due_in_s: see there.
            begun: as in `hold`.
        """
        self._return.add(_Returned(waiting, due_in_s, begun))

    def hold(self, waiting: Waiting, *, begun: bool = False) -> None:
        """Its target may not have it: it waits in PostgreSQL until it may.

        Args:
            waiting: the callback.
            begun: an attempt was begun for it, and is not made: its number is used up, its place in the schedule is not.
        """
        self._hold.add((waiting, begun))

    async def bury(self, callback: Callback, attempt: int, error: dict[str, Any]) -> None:
        """Writes a dead callback's record, before its row says so."""
        value = orjson.dumps(
            {
                "id": callback.id,
                "target": callback.target.url,
                "task_id": callback.task_id,
                "attempt": attempt,
                "body": callback.body.decode(),
                "error": error,
                "dead_at": datetime.now(UTC),
                **callback.shown_options(),
            }
        )

        async def send() -> None:
            with translated():
                await self._producer.send_and_wait(
                    self._settings.prefix + CALLBACKS_DEAD.name, value, key=callback.target.url.encode()
                )

        await persevere(send, f"{callback.id}, dead,")

    async def _begin_all(self, batch: Sequence[Waiting]) -> None:
        turns: dict[Turn, Waiting] = {}
        for waiting in batch:
            turns.setdefault((waiting.callback.id, waiting.callback.attempt), waiting)
        begun = await self._take(turns)
        mine = [waiting for turn, waiting in turns.items() if turn in begun]
        for turn, spent in begun.items():
            turns[turn].spent = spent
        told = set(map(id, mine))
        # The others were made before, are under way, wait for an earlier one or are owed by nobody: their fate is or
        # will be in PostgreSQL.
        others = [waiting for waiting in batch if id(waiting) not in told]
        self._begun(mine, others)
        for waiting in batch:
            waiting.record.settle()

    async def _take(self, turns: Mapping[Turn, Waiting]) -> dict[Turn, int]:
        """The turns that nobody had taken before; those that have to wait for an earlier one are seen to."""
        wanted, horizon_s = list(turns), self._settings.callback_horizon_s
        what = f"{len(wanted)} callbacks"
        if not any(waiting.callback.ordered for waiting in turns.values()):
            return await persevere(lambda: callbacks.begin(self._pool, wanted, horizon_s=horizon_s), what)
        begun = await persevere(
            lambda: callbacks.begin_in_order(self._pool, wanted, horizon_s=horizon_s), what
        )
        if begun.held:
            self.held += len(begun.held)
            self._held({turns[turn].callback.target for turn in begun.held})
        if begun.behind:
            overtaken = await persevere(lambda: callbacks.overtaken(self._pool, begun.behind), what)
            if overtaken:
                await self._scheduled(0.0)
        return begun.turns

    async def _settle_all(self, batch: Sequence[Ended]) -> None:
        # Never two of one callback: `begin` gives each attempt once, and the next one begins after a `due`.
        settled = [ended.settled for ended in batch]
        now = datetime.now(UTC)
        results = [_result(ended, now) for ended in batch if ended.settled.state != "pending"]
        topic = self._settings.prefix + CALLBACKS_RESULTS.name
        await persevere(
            lambda: send_all(self._producer, topic, results), f"the results of {len(results)} callbacks"
        )
        what = f"the fate of {len(batch)} callbacks"
        ordered = {
            ended.callback.id
            for ended in batch
            if ended.callback.ordered and ended.settled.state != "pending"
        }
        await persevere(lambda: callbacks.settle(self._pool, settled, ordered), what)
        self._unwritten -= len(batch)
        due_s = [s.due_in_s for s in settled if s.state == "pending"]
        if ordered:
            due_s.append(0.0)
        if due_s:
            await self._scheduled(min(due_s))

    async def _return_all(self, batch: Sequence[_Returned]) -> None:
        turns = [(r.waiting.callback.id, r.waiting.callback.attempt + r.begun) for r in batch]
        dues_s = [r.due_in_s for r in batch]
        spent = [_spent(r.waiting, begun=r.begun) for r in batch]
        await persevere(
            lambda: callbacks.postpone(self._pool, turns, dues_s, spent),
            f"the return of {len(batch)} callbacks",
        )
        for returned in batch:
            returned.waiting.record.settle()
        await self._scheduled(min(dues_s))

    async def _hold_all(self, batch: Sequence[tuple[Waiting, bool]]) -> None:
        turns = [(waiting.callback.id, waiting.callback.attempt + begun) for waiting, begun in batch]
        spent = [_spent(waiting, begun=begun) for waiting, begun in batch]
        await persevere(lambda: callbacks.hold(self._pool, turns, spent), f"{len(batch)} callbacks to hold")
        for waiting, _begun in batch:
            waiting.record.settle()
        self.held += len(batch)
        self._held({waiting.callback.target for waiting, _begun in batch})


def _spent(waiting: Waiting, *, begun: bool) -> int | None:
    """How many attempts the schedule does not count by now, when one was begun that is not made."""
    return waiting.spent + 1 if begun else None


def _result(ended: Ended, now: datetime) -> tuple[bytes, bytes]:
    callback = ended.callback
    value = orjson.dumps(
        {
            "id": callback.id,
            "target": callback.target.url,
            "task_id": callback.task_id,
            "outcome": ended.settled.state,
            "attempts": ended.settled.attempt,
            "status": ended.status,
            "took_ms": round(ended.took_s * 1000),
            "error": ended.error,
            "at": now,
        }
    )
    return str(callback.task_id).encode(), value
