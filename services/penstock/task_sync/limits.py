"""Limits and order: how many tasks of a type may go now, and which.

A type without limits and keys goes straight to `postgres.release`; what others cost they pay themselves: a count of what
is in flight, and for types that are released key by key a look at their lines.

What is counted in one statement holds in the next: only the owner of a type releases its tasks, through the session that
holds the lock, so what is in flight can only have become less. When a task that was counted ends, whoever ended it
tells (`penstock_ready`); what nobody told is found by a slow look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.core.choosing import Line, Turn, after, by_id, in_turns
from penstock.core.order import first
from penstock.core.rate import Bucket
from penstock.core.task import Priority
from penstock.postgres import limits, release
from penstock.postgres.limits import Place
from penstock.postgres.release import Batch
from penstock.postgres.session import Session
from penstock.postgres.types import TaskType

# Most keys looked at by one statement, and most tasks that one looks at to give them the empty key, or make them count.
KEYS_AT_ONCE = 256
ADOPTED_AT_ONCE = 5_000
TRACKED_AT_ONCE = 5_000
# When what was to be made to count, and others held, is tried again.
HELD_S = 0.05
# Between looks through a line for tasks that were submitted before their type had keys, each as many statements as the line
# is long: the first look goes on at once, later ones after a while. And at a full type whose room nobody told of.
ADOPT_EVERY_S = 10.0
ADOPT_ON_S = 0.5
LOOK_AGAIN_S = 10.0


@dataclass(slots=True)
class Released:
    """What became of a wish to release.

    Attributes:
        batch: what was released; None is nothing.
        more: there may be others that may go at once.
    """

    batch: Batch | None = None
    more: bool = False


@dataclass(slots=True)
class _Memory:
    """What is kept of a type between two releases.

    Attributes:
        tracked: all that is in flight counts.
        begun: so does what has begun, but for what is ready behind `begun_from`.
        begun_from: the next place to look for that; None is nowhere.
        bucket: of its rate.
        adopt_at_s: when to look for tasks without a key, on the loop's clock.
        adopt_from: and where.
        adopted: the whole line has been looked at.
        turns: whose turn it is, by level.
    """

    tracked: bool = False
    begun: bool = False
    begun_from: Place | None = None
    bucket: Bucket | None = None
    adopt_at_s: float = float("-inf")
    adopt_from: Place = field(default_factory=Place)
    adopted: bool = False
    turns: dict[Priority, Turn] = field(default_factory=dict)


class Limits:
    """Releases tasks of types as their limits allow.

    Args:
        session: the one that owns the types.
        wake: called with a type's name when it is worth trying again.
    """

    def __init__(self, session: Session, wake: Callable[[str], None]) -> None:
        self._session = session
        self._wake = wake
        self._keyed: frozenset[str] = frozenset()
        self._memories: dict[str, _Memory] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def load(self) -> None:
        """Learns which types are released key by key: types, or settings of keys, have changed.

        Raises:
            SessionLost, PostgresUnavailable: it cannot be told.
        """
        self._keyed = await limits.keyed(self._session)

    def forget(self, type_name: str) -> None:
        """The type is another process's: what is remembered of it is worth nothing any more."""
        self._memories.pop(type_name, None)
        if (timer := self._timers.pop(type_name, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Wakes nobody any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    async def release(
        self, task_type: TaskType, limit: int, take_confirmed: Callable[[], list[int]]
    ) -> Released:
        """Releases what may go, at most `limit` tasks.

        Args:
            task_type: as it is now.
            limit: what the window has room for.
            take_confirmed: gives the batches that Kafka has, to be forgotten with the release.

        Raises:
            SessionLost: the right to release is gone, and nothing was released by this call.
            PostgresUnavailable: as above, or it was released and noted for the next owner.
        """
        name = task_type.name
        if task_type.paused:
            return Released()
        keyed = name in self._keyed
        if not (
            keyed
            or task_type.ordered
            or task_type.max_in_flight is not None
            or task_type.starts_per_s is not None
        ):
            self._memories.pop(name, None)
            batch = await release.release(self._session, task_type, limit, take_confirmed())
            return Released(batch, batch is not None and len(batch.tasks) == limit)
        memory = self._memories.setdefault(name, _Memory())
        if not keyed:
            # When it has keys again, what came meanwhile without one is looked for at once.
            memory.adopted, memory.adopt_at_s, memory.adopt_from = False, float("-inf"), Place()
        untracked = await self._track(task_type, memory)
        if untracked is not None:
            return untracked
        allowed = limit
        for left in (await self._room(task_type), self._starts(task_type, memory)):
            allowed = allowed if left is None else min(allowed, left)
        if allowed <= 0:
            return Released()
        if keyed:
            found = await self._by_key(task_type, memory, allowed, take_confirmed)
        elif task_type.ordered:
            found = await self._in_order(task_type, memory, allowed, take_confirmed)
        else:
            batch = await release.release(
                self._session, task_type, allowed, take_confirmed(), tracked=memory.tracked
            )
            found = Released(batch, batch is not None and len(batch.tasks) == allowed)
        if memory.bucket is not None and found.batch is not None:
            memory.bucket.take(len(found.batch.tasks))
        return found

    async def _in_order(
        self, task_type: TaskType, memory: _Memory, limit: int, take_confirmed: Callable[[], list[int]]
    ) -> Released:
        if memory.begun and memory.begun_from is not None:
            # Only the order goes by it, so a long line holds nothing up.
            memory.begun_from = await limits.track_ready(
                self._session, task_type.name, memory.begun_from, TRACKED_AT_ONCE
            )
        heads = await limits.heads(self._session, task_type, limit)
        levels = first(heads, limit, task_type.ageing_s)
        batch = (
            await limits.release(self._session, task_type, list(levels), take_confirmed, levels)
            if levels
            else None
        )
        more = len(levels) == limit
        if not more and memory.begun_from is not None:
            self._try_again(task_type.name, HELD_S)
        return Released(batch, more)

    async def _track(self, task_type: TaskType, memory: _Memory) -> Released | None:
        """Sees to it that all that is in flight counts, a batch at a time: while something does not, nothing may go."""
        counted = task_type.max_in_flight is not None or task_type.name in self._keyed
        begun = task_type.finish_first
        if (counted and not memory.tracked) or (begun and not memory.begun):
            found, done = await limits.track(self._session, task_type.name, TRACKED_AT_ONCE, begun=begun)
            if found and not done:
                self._try_again(task_type.name, HELD_S)
            if found:
                return Released(None, bool(done))
        if begun and not memory.begun:
            memory.begun_from = Place()
        memory.tracked, memory.begun = counted or begun, begun
        return None

    async def _room(self, task_type: TaskType) -> int | None:
        """How many the limit of its type leaves, None is any number."""
        if task_type.max_in_flight is None:
            return None
        room = task_type.max_in_flight - await limits.in_flight(self._session, task_type.name)
        if room <= 0:
            self._try_again(task_type.name, LOOK_AGAIN_S)
        return room

    def _starts(self, task_type: TaskType, memory: _Memory) -> int | None:
        """How many its rate leaves; None is any number."""
        rate = task_type.starts_per_s
        if rate is None:
            memory.bucket = None
            return None
        now_s = asyncio.get_running_loop().time()
        if memory.bucket is None:
            memory.bucket = Bucket(rate, now_s)
        elif memory.bucket.rate != rate:
            memory.bucket.set_rate(rate, now_s)
        allowed = memory.bucket.allowed(now_s)
        if allowed <= 0:
            self._try_again(task_type.name, memory.bucket.wait_s())
        return allowed

    def _try_again(self, type_name: str, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        timer = self._timers.get(type_name)
        if timer is not None and loop.time() < timer.when() <= loop.time() + wait_s:
            return
        if timer is not None:
            timer.cancel()
        self._timers[type_name] = loop.call_later(wait_s, self._wake, type_name)

    async def _by_key(
        self, task_type: TaskType, memory: _Memory, limit: int, take_confirmed: Callable[[], list[int]]
    ) -> Released:
        more = await self._adopt(task_type, memory)
        chosen: list[int] = []
        used: dict[str, int] = {}
        cut = False
        for level in Priority:
            walk = _Walk(self._session, task_type, level, memory.turns.get(level, Turn()), used)
            cut = await walk.choose(chosen, limit)
            memory.turns[level] = walk.turn
            if walk.full:
                self._try_again(task_type.name, LOOK_AGAIN_S)
            if cut or len(chosen) >= limit:
                break
        if not chosen:
            return Released(None, more)
        batch = await limits.release(self._session, task_type, chosen, take_confirmed)
        return Released(batch, more or cut or len(chosen) >= limit)

    async def _adopt(self, task_type: TaskType, memory: _Memory) -> bool:
        """Takes in some of what no line has; True when the next is to be looked for at once."""
        now_s = asyncio.get_running_loop().time()
        if now_s < memory.adopt_at_s:
            # What came meanwhile was perhaps submitted before the type had keys.
            self._try_again(task_type.name, memory.adopt_at_s - now_s)
            return False
        place = await limits.adopt(self._session, task_type.name, memory.adopt_from, ADOPTED_AT_ONCE)
        memory.adopt_from = place or Place()
        if place is None:
            memory.adopted = True
            memory.adopt_at_s = now_s + ADOPT_EVERY_S
        elif memory.adopted:
            memory.adopt_at_s = now_s + ADOPT_ON_S
            self._try_again(task_type.name, ADOPT_ON_S)
        return not memory.adopted


class _Walk:
    """Goes round the keys of one level, a page of them a statement, from whose turn it is."""

    def __init__(
        self, session: Session, task_type: TaskType, level: Priority, turn: Turn, used: dict[str, int]
    ) -> None:
        self._session = session
        self._type = task_type
        self._level = level
        self._used = used
        self.turn = turn
        # Some keys that wait have no room, or are paused.
        self.full = False

    async def choose(self, chosen: list[int], limit: int) -> bool:
        """Adds tasks to `chosen` until there are `limit`; True when others may go at once."""
        start = self.turn.first
        page = await self._page(chosen, limit, start)
        if len(page) < KEYS_AT_ONCE:
            rest = await self._page(chosen, limit, "", start) if start else []
            if len(rest) < KEYS_AT_ONCE:
                return self._take([*page, *rest], chosen, limit, once=False)
            return await self._round(page, chosen, limit, rest, start)
        return await self._round(page, chosen, limit, None, start)

    async def _round(
        self, page: list[Line], chosen: list[int], limit: int, rest: list[Line] | None, start: str
    ) -> bool:
        """One round of more keys than a page has."""
        before = len(chosen)
        wrapped = False
        while True:
            if self._take(page, chosen, limit, once=True) or len(chosen) >= limit:
                return True
            if len(page) == KEYS_AT_ONCE:
                end = start if wrapped else None
                page = await self._page(chosen, limit, after(page[-1].key), end)
            elif not wrapped and start:
                wrapped = True
                page = rest if rest is not None else await self._page(chosen, limit, "", start)
            else:
                return len(chosen) > before

    async def _page(self, chosen: list[int], limit: int, first: str, end: str | None = None) -> list[Line]:
        asked = limits.Asked(self._level, limit - len(chosen), KEYS_AT_ONCE)
        return await limits.lines(self._session, self._type, asked, first, end)

    def _take(self, page: Sequence[Line], chosen: list[int], limit: int, *, once: bool) -> bool:
        lines = [self._left_of(line) for line in page]
        if self._type.fair:
            choice = in_turns(lines, limit - len(chosen), self.turn, once=once)
        else:
            turn = Turn(page[-1].key) if once and page else self.turn
            choice = by_id(lines, limit - len(chosen), turn)
        self.turn = choice.turn
        self.full = self.full or any(line.room <= 0 for line in lines)
        chosen += choice.ids
        ids = set(choice.ids)
        for line in page if ids else ():
            self._used[line.key] = self._used.get(line.key, 0) + len(ids.intersection(line.ids))
        return choice.cut

    def _left_of(self, line: Line) -> Line:
        """A line less what was chosen of its key at the levels before."""
        used = self._used.get(line.key, 0)
        if not used:
            return line
        return Line(line.key, line.ids, line.room - used, line.weight, line.more)
