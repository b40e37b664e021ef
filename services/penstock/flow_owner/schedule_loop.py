"""Starts the flows of schedules.

Guarantees
- A tick starts one flow, or is recorded as skipped. Both are one transaction with the position of
  the schedule, by the database's clock: a crash repeats nothing, and a clock that is set back
  starts nothing twice.
- Any number of replicas may run. They share the schedules that are due, and a schedule is decided
  by one at a time.
- A schedule that fails holds up no other one: its tick is recorded with the error.

A queued tick starts when the running flow ends, by a notification. After a lost one the next sweep
starts it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta

import asyncpg

from penstock import metrics
from penstock.core.access import namespace_of
from penstock.core.schedule import latest_ticks
from penstock.core.schedule_policy import Due, Overlap, Skip, SkipReason, decide
from penstock.cron import parse_cron
from penstock.errors import Invalid, ObjectsUnavailable, PostgresUnavailable, SessionLost, TooLarge
from penstock.flow_owner.backfill_loop import BackfillLoop
from penstock.flows.scheduled import reason, scheduled_start
from penstock.metrics import Sample
from penstock.objects import ObjectStore
from penstock.postgres import schedule_claims, schedules
from penstock.postgres.connection import translated
from penstock.postgres.flow_definitions import DefinitionCache, Reached
from penstock.postgres.flow_starts import FlowStart, start
from penstock.postgres.schedule_claims import Advance, Outlook
from penstock.postgres.schedule_rows import Schedule
from penstock.postgres.session import open_session
from penstock.settings import Platform

log = logging.getLogger(__name__)

# Schedules of one transaction.
BATCH = 500
# Definitions that are read together; those below them count, too.
_REFERENCES = 100
# Missed ticks that are counted, so that a week of hours is; of more only the span is recorded.
_COUNTED = 200
# The longest sleep: the database's clock may be corrected meanwhile.
MAX_SLEEP_S = 30.0
# How often schedules with queued ticks are looked at without a notification.
SWEEP_S = 10.0
_RETRY_S = 1.0
# A schedule that cannot be read, or whose inputs cannot be stored now, is due again after this.
_AGAIN = timedelta(seconds=10)
_PRUNE_EVERY_S = 3600.0
_SKIPS_KEPT_DAYS = 30
_PRUNE_BATCH = 10_000


class ScheduleLoop:
    """Starts the flows of schedules and backfills.

    Args:
        settings: addresses of the servers.
        pool: the database.
        objects: stores inputs above the inline limit.

    Attributes:
        started: flows started by this process, without those of backfills.
        skipped: ticks that this process recorded as skipped, by reason; a span that was not counted
            is one.
        late_s: how long after its tick the latest flow started; 0 before the first one.
        backfills: starts the flows of backfills.
    """

    def __init__(self, settings: Platform, pool: asyncpg.Pool[asyncpg.Record], objects: ObjectStore) -> None:
        self._settings = settings
        self._pool = pool
        self._objects = objects
        self._definitions = DefinitionCache(pool)
        self._woken = asyncio.Event()
        # Schedules of which a flow has ended.
        self._ended: set[str] = set()
        self._sweep_at = 0.0
        self._prune_at = 0.0
        self._busy = False
        self._steps = 0
        self.started = 0
        self.skipped: Counter[SkipReason] = Counter()
        self.late_s = 0.0
        self.backfills = BackfillLoop(pool, objects, self._definitions)

    def samples(self) -> Iterator[Sample]:
        """The metrics of this loop."""
        yield Sample(metrics.SCHEDULE_STARTED, self.started)
        for each in SkipReason:
            yield Sample(metrics.SCHEDULE_SKIPPED, self.skipped[each], (each.value,))
        yield Sample(metrics.SCHEDULE_DELAY, self.late_s)
        yield from self.backfills.samples()

    def progress(self) -> dict[str, Hashable]:
        """A round in progress and its value, for the stall detector; empty at rest."""
        return {"schedules": (self._steps, self.backfills.steps)} if self._busy else {}

    async def run(self) -> None:
        """Starts flows until cancelled."""
        while True:
            try:
                async with open_session(self._settings.sessions, "schedules", locks=False) as session:
                    await session.listen(schedules.CHANNEL, self._on_notify)
                    # A notification may have been missed while no session listened.
                    self._sweep_at = 0.0
                    while True:
                        session.ensure()
                        await self._sleep(await self.round())
            except (PostgresUnavailable, SessionLost) as error:
                log.warning(
                    "Schedules are delayed; trying again",
                    extra={"event": "schedules_delayed", "error": error},
                )
                await asyncio.sleep(_RETRY_S)

    def _on_notify(self, name: str) -> None:
        self._ended.add(name)
        self._woken.set()

    async def _sleep(self, longest_s: float) -> None:
        try:
            async with asyncio.timeout(longest_s):
                await self._woken.wait()
        except TimeoutError:
            return

    async def round(self) -> float:
        """Starts all that is due; returns the seconds until something may be due again.

        Raises:
            PostgresUnavailable: a later round starts the rest.
        """
        loop = asyncio.get_running_loop()
        self._woken.clear()
        ended, self._ended = self._ended, set()
        self._busy, self._steps = True, self._steps + 1
        try:
            # One statement is all that an idle deployment pays.
            outlook = await schedule_claims.look(self._pool)
            has_more = await self._start_due(outlook, ended)
            if outlook.due_s <= 0 or ended:
                outlook = await schedule_claims.look(self._pool)
            if loop.time() >= self._prune_at:
                await schedule_claims.prune_skips(self._pool, _SKIPS_KEPT_DAYS, _PRUNE_BATCH)
                self._prune_at = loop.time() + _PRUNE_EVERY_S
        except PostgresUnavailable:
            self._ended |= ended
            raise
        finally:
            self._busy = False
        waits = [MAX_SLEEP_S, outlook.due_s]
        if has_more:
            # The ended flows may be those of another backfill.
            self._ended |= ended
            waits.append(0.0)
        if outlook.has_queue:
            waits.append(self._sweep_at - loop.time())
        return max(0.0, min(waits))

    async def _start_due(self, outlook: Outlook, ended: Collection[str]) -> bool:
        """Starts what is due; returns whether a backfill may have more."""
        now_s = asyncio.get_running_loop().time()
        if outlook.schedule_s is not None and outlook.schedule_s <= 0:
            while await self.fire_due() == BATCH:
                pass
        is_sweep = outlook.has_queue and now_s >= self._sweep_at
        if outlook.has_queue and (is_sweep or ended):
            await self.fire_queued(None if is_sweep else ended)
        if is_sweep:
            self._sweep_at = now_s + SWEEP_S
        if outlook.backfill_s is not None and (outlook.backfill_s <= 0 or ended):
            return await self.backfills.run_batch(ended)
        return False

    async def fire_due(self) -> int:
        """Decides about a batch of due schedules; returns how many there were.

        Raises:
            PostgresUnavailable: nothing is changed; a later call decides about the same ticks.
        """
        with translated():
            async with self._pool.acquire() as connection, connection.transaction():
                return await self._fire(connection, await schedule_claims.claim(connection, BATCH))

    async def fire_queued(self, names: Iterable[str] | None) -> int:
        """Starts the next queued tick of schedules without a running flow.

        Args:
            names: only these schedules; None is all.

        Raises:
            PostgresUnavailable: nothing is changed.
        """
        wanted = None if names is None else list(names)
        with translated():
            async with self._pool.acquire() as connection, connection.transaction():
                return await self._fire(
                    connection, await schedule_claims.claim_queued(connection, wanted, BATCH)
                )

    async def _fire(
        self, connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record], due: Sequence[Schedule]
    ) -> int:
        self._steps += 1
        if not due:
            return 0
        exclusive = [each.settings.name for each in due if each.settings.rules.overlap is not Overlap.ALLOW]
        running = await schedule_claims.running(connection, exclusive)
        advances: list[Advance] = []
        wanted: list[tuple[Advance, Schedule, list[datetime]]] = []
        cancelled: list[str] = []
        for schedule in due:
            name = schedule.settings.name
            advance, starts, cancels = _decide(schedule, is_running=name in running)
            advances.append(advance)
            wanted.append((advance, schedule, starts))
            if cancels:
                cancelled.append(name)
        starting = await self._starts(connection, wanted)
        # Before the new flows are inserted, which would be cancelled otherwise.
        await schedule_claims.cancel_running(connection, cancelled)
        started = await start(connection, [each for _, each in starting])
        for (advance, each), flow in zip(starting, started, strict=True):
            assert each.tick is not None
            if flow.created:
                advance.started.append(each.tick)
        await schedule_claims.advance(connection, advances)
        self._count(due[0].now, advances)
        return len(due)

    async def _starts(
        self,
        connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record],
        wanted: Sequence[tuple[Advance, Schedule, list[datetime]]],
    ) -> list[tuple[Advance, FlowStart]]:
        """The starts of ticks; a tick that cannot start is recorded with the reason."""
        references = {(each.settings.flow, each.settings.version) for _, each, starts in wanted if starts}
        reached = await reach(self._definitions, connection, references)
        found: list[tuple[Advance, FlowStart]] = []
        for advance, schedule, ticks in wanted:
            for position, tick in enumerate(ticks):
                self._steps += 1
                try:
                    each = scheduled_start(schedule.settings, tick, reached)
                    inputs = await self._objects.check_in(each.inputs, namespace_of(each.name))
                except Invalid as error:
                    advance.error = reason(error)
                    advance.skips.append(Skip(tick, tick, 1, SkipReason.ERROR, advance.error))
                except ObjectsUnavailable as error:
                    log.warning(
                        "A schedule waits for the object store",
                        extra={
                            "event": "schedule_delayed",
                            "schedule": schedule.settings.name,
                            "error": error,
                        },
                    )
                    # These ticks wait with those that are queued already.
                    advance.queued = [*ticks[position:], *advance.queued]
                    advance.next_at = advance.queue_at = schedule.now + _AGAIN
                    break
                else:
                    found.append((advance, dataclasses.replace(each, inputs=inputs)))
        return found

    def _count(self, now: datetime, advances: Iterable[Advance]) -> None:
        for advance in advances:
            self.started += len(advance.started)
            for tick in advance.started[-1:]:
                self.late_s = (now - tick).total_seconds()
            for skip in advance.skips:
                self.skipped[skip.reason] += skip.count or 1


async def reach(
    definitions: DefinitionCache,
    connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record],
    references: Iterable[tuple[str, int | None]],
) -> Reached:
    """The definitions of schedules; those that are too large together are read one by one.

    A definition with too many below it counts as missing.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    whole = Reached()
    waiting = sorted(references, key=lambda reference: (reference[0], reference[1] or 0))
    parts = [waiting[first : first + _REFERENCES] for first in range(0, len(waiting), _REFERENCES)]
    while parts:
        part = parts.pop()
        try:
            found = await definitions.reach(part, executor=connection)
        except TooLarge:
            if len(part) > 1:
                parts += [[reference] for reference in part]
            continue
        whole.newest |= found.newest
        whole.outlines |= found.outlines
    return whole


def _decide(schedule: Schedule, *, is_running: bool) -> tuple[Advance, list[datetime], bool]:
    """The outcome of the ticks of a locked schedule.

    Returns:
        The row to write, the ticks that start, and whether the running flows are cancelled.
    """
    settings, now = schedule.settings, schedule.now
    advance = Advance(
        settings.name,
        schedule.position,
        schedule.next_tick,
        None,
        queued=schedule.queued,
        queue_at=schedule.queue_at,
    )
    try:
        ticks = parse_cron(settings.cron, settings.zone)
    except Invalid as error:
        # The zone was removed from the database of zones.
        advance.decided, advance.error, advance.next_at = True, reason(error), now + _AGAIN
        return advance, [], False
    due = None
    if schedule.next_tick is not None and schedule.next_tick <= now:
        limit = max(settings.rules.kept, _COUNTED)
        latest, has_more = latest_ticks(ticks, schedule.position, now, limit)
        if latest:
            due = Due(schedule.next_tick, latest, is_all=not has_more)
            advance.position = latest[-1]
        advance.next_tick = ticks.first_after(max(advance.position, now))
    decision = decide(
        settings.rules,
        due,
        schedule.queued,
        is_running=is_running,
        now=now,
        queue_at=schedule.queue_at,
    )
    advance.queued, advance.queue_at, advance.skips = decision.queued, decision.queue_at, decision.skips
    advance.decided = bool(decision.starts)
    moments = [advance.next_tick, advance.queue_at if advance.queued else None]
    advance.next_at = min((moment for moment in moments if moment is not None), default=None)
    return advance, decision.starts, decision.cancels
