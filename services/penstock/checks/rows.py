"""The rules that PostgreSQL alone can check: timers, waits, outbox, counters."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import asyncpg

from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rule import GRACE_S, Candidates, Check, RowCheck, Writers
from penstock.core.target import TargetId
from penstock.core.task import Priority
from penstock.errors import RecordsRefused
from penstock.kafka.processing.outbox import publish, redeliver, send_all
from penstock.kafka.topology.topics import CALLBACKS_DEAD, CALLBACKS_RESULTS
from penstock.postgres import backlog, callback_ends, callback_outbox, callbacks, checks, outbox
from penstock.postgres.callback_outbox import OutboxRow
from penstock.postgres.checks import BATCH, MOST_COUNTED
from penstock.postgres.outbox import OutboxEvents
from penstock.postgres.ownership import lock, unlock
from penstock.postgres.release import TYPES

log = logging.getLogger(__name__)

# Rows of the outbox that are published at a time: each may hold a thousand events.
OUTBOX_BATCH = 20
RESULT_TOPICS = (CALLBACKS_RESULTS.name, CALLBACKS_DEAD.name)


class Overdue(RowCheck):
    """A task whose timer has passed. It becomes ready, as task-sync does it."""

    rule, what = Rule.OVERDUE, "task"
    lacks = "was due {late_s:.0f} s ago: is task-sync running?"
    arguments = (GRACE_S, MOST_COUNTED)

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        return await checks.repeat(self.system.pool, "checks.promote", BATCH, GRACE_S)


class Waiting(Check):
    """A waiting task that nothing could wake. It stays."""

    rule = Rule.WAITING

    async def find(self) -> Candidates:
        """See `Check`."""
        found = Offenders([], 0)
        async for rows in checks.by_ranges(self.system.pool, "checks.task_range", "checks.waiting"):
            missing = self.system.show - len(found.first)
            found.first += [
                Offender(self.rule, "task", row["id"], "waits, and nothing is recorded that could wake it")
                for row in rows[:missing]
            ]
            found.count += len(rows)
        return {self.rule: found} if found.count else {}


class Unsent(RowCheck):
    """A release that Kafka has not confirmed. It is deleted, and its tasks are ready again."""

    rule, what = Rule.UNSENT, "release"
    lacks = "{tasks} tasks of {type} not confirmed by Kafka: is task-sync running?"

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        undone = 0
        rows = await checks.fetch(self.system.pool, "checks.unsent", BATCH, GRACE_S)
        for name in sorted({row["type"] for row in rows}):
            if not await lock(writers.session, TYPES, name):
                log.warning(
                    "A task-sync owns this type and has not brought its release to Kafka",
                    extra={"event": "release_unsent", "task_type": name},
                )
                continue
            try:
                [row] = await writers.session.fetch("checks.undo_releases", name, GRACE_S)
                undone += row["notes"]
            finally:
                await unlock(writers.session, TYPES, name)
        return undone


class Unpublished(RowCheck):
    """Events in the outbox. They are published, as by the sweeper; ids make repeats harmless."""

    rule, what = Rule.UNPUBLISHED, "event"
    lacks = "{events} events not published: is stages running?"

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        published = 0
        while True:
            rows = await outbox.unpublished(self.system.pool, age_s=GRACE_S, limit=OUTBOX_BATCH)
            published += await _publish_events(writers, rows)
            if len(rows) < OUTBOX_BATCH:
                return published


class Refused(RowCheck):
    """Events that Kafka refuses. They are published once more; what it refuses again stays."""

    rule, what = Rule.REFUSED, "event"
    lacks = "{events} events that Kafka refuses ({refused}): change its limit, then repair"
    arguments = ()

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        published = behind = 0
        while rows := await outbox.refused(self.system.pool, behind=behind, limit=OUTBOX_BATCH):
            published += await _publish_events(writers, rows)
            behind = rows[-1].id
        return published


class UnpublishedResults(RowCheck):
    """The same as `Unpublished`, for results of callbacks."""

    rule, what = Rule.UNPUBLISHED, "result"
    lacks = "{records} records of {topic} not published: is callbacks running?"
    statement = "checks.unpublished_results"

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        published = 0
        for topic in RESULT_TOPICS:
            while rows := await callback_outbox.unpublished(
                self.system.pool, topic, age_s=GRACE_S, limit=OUTBOX_BATCH
            ):
                published += await _publish_results(writers, rows)
        return published


class RefusedResults(RowCheck):
    """The same as `Refused`, for results of callbacks."""

    rule, what = Rule.REFUSED, "result"
    lacks = "{records} records of {topic} that Kafka refuses ({refused}): change its limit, then repair"
    statement = "checks.refused_results"
    arguments = ()

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        published = 0
        for topic in RESULT_TOPICS:
            behind = callback_outbox.FIRST
            while rows := await callback_outbox.refused(
                self.system.pool, topic, behind=behind, limit=OUTBOX_BATCH
            ):
                published += await _publish_results(writers, rows)
                behind = rows[-1].id
        return published


class Undelivered(RowCheck):
    """A callback that is due. Its record is published again, as by the requeuer."""

    rule, what = Rule.UNDELIVERED, "callback"
    arguments = (GRACE_S, MOST_COUNTED)

    def sentence(self, row: asyncpg.Record) -> str:
        """See `RowCheck`."""
        target = TargetId(row["namespace"], row["target"])
        return f"to {target} was due {row['late_s']:.0f} s ago: is callbacks running?"

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        redelivered = 0
        while True:
            rows = await callbacks.take_due(writers.session, BATCH, horizon_s=outbox.CALLBACK_HORIZON_S)
            refused = await redeliver(writers.producer, self.system.settings, rows)
            await callback_ends.bury(writers.session, refused)
            redelivered += len(rows)
            if len(rows) < BATCH:
                return redelivered


class Ahead(RowCheck):
    """A row with times of a clock that was ahead. Delays start anew; a `run_at` stays."""

    rule = Rule.AHEAD
    lacks = "has times up to {ahead_s:.0f} s too late: the clock of PostgreSQL was ahead"

    async def find(self) -> Candidates:
        """See `Check`."""
        found = await super().find()
        of_tasks = Offenders([], 0)
        async for rows in checks.by_ranges(
            self.system.pool, "checks.task_range", "checks.tasks_ahead", GRACE_S
        ):
            missing = self.system.show - len(of_tasks.first)
            of_tasks.first += [
                Offender(self.rule, row["what"], row["id"], self.sentence(row)) for row in rows[:missing]
            ]
            of_tasks.count += len(rows)
        return found | ({"tasks": of_tasks} if of_tasks.count else {})

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        pool = self.system.pool
        mended = await checks.repeat(pool, "checks.mend_tasks", BATCH, GRACE_S)
        mended += await checks.repeat(pool, "checks.mend_callbacks", BATCH, GRACE_S)
        for name in ("mend_outbox", "mend_results", "mend_releases", "mend_operations"):
            mended += len(await checks.fetch(pool, f"checks.{name}", GRACE_S))
        return mended


class Lost(RowCheck):
    """Records that were deleted before they were read. Noted, and later checks are silent."""

    rule, what = Rule.LOST, "topic"
    lacks = "lost {deleted:,} records that were deleted before they were read"
    arguments = ()

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        return len(await checks.fetch(self.system.pool, "checks.note_lost"))


class Miscounted(Check):
    """A counter of waiting tasks that is wrong. They are counted anew, beside the traffic."""

    rule = Rule.MISCOUNTED

    async def find(self) -> Candidates:
        """See `Check`."""
        wrong = await backlog.miscounted(self.system.pool)
        first = [
            Offender(
                self.rule,
                "counter",
                f"{each.type}/{each.stage}",
                f"at {Priority(each.priority).name}, {each.state}: the counter says {each.counted:,}, "
                f"and there are {each.tasks:,} tasks",
            )
            for each in wrong[: self.system.show]
        ]
        return {self.rule: Offenders(first, len(wrong))} if wrong else {}

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        return await backlog.recount(self.system.pool)


async def _publish_events(writers: Writers, rows: Sequence[OutboxEvents]) -> int:
    """Publishes rows of the outbox; returns how many. Those with refused events stay."""
    pool, published = writers.system.pool, []
    for row in rows:
        try:
            await publish(writers.producer, writers.system.settings, row.keys, row.records)
        except RecordsRefused as error:
            await outbox.park(pool, row, error)
        else:
            published.append(row.id)
    await outbox.delete_published(pool, published)
    return len(published)


async def _publish_results(writers: Writers, rows: Sequence[OutboxRow]) -> int:
    """The same as `_publish_events`, for rows of the callbacks service."""
    pool, published = writers.system.pool, []
    for row in rows:
        records = zip(row.keys, row.records, strict=True)
        try:
            await send_all(writers.producer, writers.system.settings.prefix + row.topic, records)
        except RecordsRefused as error:
            await callback_outbox.park(pool, row, error)
        else:
            published.append(row.id)
    await callback_outbox.delete_published(pool, published)
    return len(published)
