"""Repairs offenders by the mechanism that would normally do it, and never past the fence.

| offender | repair |
| --- | --- |
| overdue, recordless | ready again if still in the same attempt; its type's owner releases it |
| unreleased | the type's owner is notified once more |
| unwatched | its lease expires: the same decision, fenced statement and events |
| unsent | under its type's lock the release is deleted, and its tasks are ready again |
| unpublished | published, as the sweeper does; the events' ids make a repetition harmless |
| refused | published once more; what Kafka refuses again stays |
| undelivered | its record is published again, as the requeuer does |
| held | due again |
| ahead | delays start anew, by the clock of now; a `run_at` stays |
| misplaced | the position moves to where its reader would start, if the group has no members |
| lost | noted: the records are gone, and later checks do not report them |
| miscounted | counted anew, without a pause of the platform |
| unbegun | due at once on the diverted path: another topic and another pool, past what kept it |
| stalled | the flow's owner decides anew: what it has applied before changes nothing |
| leftover | tasks and child flows are cancelled as by hand; limits and waits are deleted |
| miscounted_flow | counters are corrected while the flow is locked, and its owner decides anew |
| unapplied | the owner of the shard is notified once more |
| unmatched | events are brought to waits, as the owner's sweep does |

A service that does not run cannot be replaced: offenders that are unheard, unread, unproven or
waiting stay. An unwatched attempt stays while a result is unread, because it may be its own.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.checks.flows import Flows
from penstock.checks.kafka import Topics
from penstock.checks.misplaced import Misplaced
from penstock.checks.queued import Queued
from penstock.checks.report import Rule
from penstock.checks.rows import GRACE_S
from penstock.checks.stuck_callbacks import StuckCallbacks
from penstock.contracts.event import OutboxEntry
from penstock.core.attempt import AttemptId
from penstock.core.endings import ExpiredLease
from penstock.core.target import TargetId
from penstock.errors import RecordsRefused
from penstock.kafka.processing.outbox import Publisher, publish, redeliver, send_all
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import (
    CALLBACKS_DEAD,
    CALLBACKS_RESULTS,
    HEARTBEATS,
    STAGE_RESULTS,
    service_group,
)
from penstock.postgres import backlog, callback_ends, callback_outbox, callbacks, checks, outbox, release
from penstock.postgres.callback_outbox import OutboxRow
from penstock.postgres.checks import BATCH
from penstock.postgres.expiry import expire
from penstock.postgres.outbox import OutboxEvents
from penstock.postgres.session import Session
from penstock.settings import Platform

log = logging.getLogger(__name__)

# Rows of the outbox that are published at a time: each may hold a thousand events.
OUTBOX_BATCH = 20
RESULT_TOPICS = (CALLBACKS_RESULTS.name, CALLBACKS_DEAD.name)


class Repair:
    """Repairs offenders.

    Args:
        settings: for the names of topics.
        pool: of the database, with two connections at least.
        session: for locks.
        producer: acks=all.
        queued: knows the queued tasks without a record.
        stuck: knows the stuck callbacks.
        topics: of Kafka.
        misplaced: knows the positions that do not fit their topics.
        flows: finds and repairs flows.
    """

    def __init__(
        self,
        settings: Platform,
        pool: asyncpg.Pool[asyncpg.Record],
        session: Session,
        producer: AIOKafkaProducer,
        queued: Queued,
        stuck: StuckCallbacks,
        topics: Topics,
        misplaced: Misplaced,
        flows: Flows,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._session = session
        self._producer = producer
        self._queued = queued
        self._topics = topics
        self._repairs: dict[Rule, Callable[[], Awaitable[int]]] = {
            Rule.OVERDUE: partial(checks.promote, pool, GRACE_S),
            Rule.RECORDLESS: self._release_again,
            Rule.UNRELEASED: self._wake,
            Rule.UNWATCHED: self._expire,
            Rule.UNSENT: self._undo_releases,
            Rule.UNPUBLISHED: self._publish,
            Rule.REFUSED: self._publish_refused,
            Rule.UNDELIVERED: self._redeliver,
            Rule.UNBEGUN: stuck.divert,
            Rule.HELD: self._requeue_held,
            Rule.AHEAD: partial(checks.mend_ahead, pool, GRACE_S),
            Rule.MISPLACED: misplaced.move,
            Rule.LOST: partial(checks.note_lost, pool),
            Rule.MISCOUNTED: partial(backlog.recount, pool),
            **flows.repairs(self._publish_outbox, settings.event_source),
        }

    async def repair(self, rules: Counter[Rule]) -> Counter[Rule]:
        """Repairs all offenders against some rules; returns how many, by rule.

        Raises:
            PostgresUnavailable, KafkaUnavailable, SessionLost: repairs that are done by then stay.
        """
        repaired: Counter[Rule] = Counter()
        for rule in rules:
            if rule in self._repairs:
                repaired[rule] = await self._repairs[rule]()
        return +repaired

    async def _requeue_held(self) -> int:
        rows = await checks.held_targets(self._pool, GRACE_S)
        targets = [TargetId(row["namespace"], row["target"]) for row in rows]
        return await checks.requeue_held(self._pool, targets)

    async def _release_again(self) -> int:
        released = 0
        async for page in self._queued.without_record():
            attempt_ids = [attempt_id for _type_name, attempt_id in page]
            for begin in range(0, len(attempt_ids), BATCH):
                released += await self._queued.release_again(attempt_ids[begin : begin + BATCH])
        return released

    async def _wake(self) -> int:
        owned = [row for row in await checks.ready_types(self._pool, GRACE_S) if row["owned"]]
        await checks.wake(self._pool, [row["type"] for row in owned])
        return sum(row["tasks"] for row in owned)

    async def _expire(self) -> int:
        """Ends unwatched attempts, as the heartbeat processor ends those of expired leases."""
        total = 0
        while True:
            rows = await checks.unwatched(self._pool, partitions_of(self._settings, HEARTBEATS))
            if rows and await self._has_unread_results():
                log.warning(
                    "Unwatched attempts may have an unread result; they do not expire before the stage processor has read it",
                    extra={"event": "expiry_postponed", "attempts": len(rows)},
                )
                break
            expiry = await expire(
                self._pool,
                [
                    ExpiredLease(
                        AttemptId(row["id"], row["step"], row["attempt"]),
                        row["worker"],
                        f"no lease of worker {row['worker']} could expire; ended by `penstock check --repair`",
                    )
                    for row in rows
                ],
                chance=random.random,
                source=self._settings.event_source,
            )
            await self._publish_outbox(expiry.outbox)
            total += len(expiry.ended)
            if len(rows) < BATCH or not expiry.ended:
                break
        return total

    async def _publish_outbox(self, entry: OutboxEntry) -> None:
        """Publishes what a repair wrote; the sweeper publishes what cannot be published now."""
        publisher = Publisher(self._producer, self._settings, partial(outbox.delete_published, self._pool))
        publisher.enqueue(entry)
        await publisher.drain()

    async def _has_unread_results(self) -> bool:
        """Whether the stage processor has not committed a result that is on Kafka now."""
        committed = await self._topics.committed(service_group(self._settings.prefix, "stages"))
        return bool(await self._topics.unread(STAGE_RESULTS.name, committed))

    async def _undo_releases(self) -> int:
        undone = 0
        for name in await checks.unsent_types(self._pool, GRACE_S):
            if not await release.lock_type(self._session, name):
                log.warning(
                    "A task-sync owns this type and has not brought its release to Kafka",
                    extra={"event": "release_unsent", "task_type": name},
                )
                continue
            try:
                undone += await checks.undo_releases(self._session, name, GRACE_S)
            finally:
                await release.unlock_type(self._session, name)
        return undone

    async def _publish(self) -> int:
        published = 0
        while True:
            rows = await outbox.unpublished(self._pool, age_s=GRACE_S, limit=OUTBOX_BATCH)
            published += await self._publish_rows(rows)
            if len(rows) < OUTBOX_BATCH:
                break
        for topic in RESULT_TOPICS:
            while results := await callback_outbox.unpublished(
                self._pool, topic, age_s=GRACE_S, limit=OUTBOX_BATCH
            ):
                published += await self._publish_results(results)
        return published

    async def _publish_refused(self) -> int:
        published = behind = 0
        while rows := await outbox.refused(self._pool, behind=behind, limit=OUTBOX_BATCH):
            published += await self._publish_rows(rows)
            behind = rows[-1].id
        for topic in RESULT_TOPICS:
            after = callback_outbox.FIRST
            while results := await callback_outbox.refused(
                self._pool, topic, behind=after, limit=OUTBOX_BATCH
            ):
                published += await self._publish_results(results)
                after = results[-1].id
        return published

    async def _publish_results(self, rows: Sequence[OutboxRow]) -> int:
        """As `_publish_rows`, for rows of the callbacks service."""
        published = []
        for row in rows:
            records = zip(row.keys, row.records, strict=True)
            try:
                await send_all(self._producer, self._settings.prefix + row.topic, records)
            except RecordsRefused as error:
                await callback_outbox.park(self._pool, row, error)
            else:
                published.append(row.id)
        await callback_outbox.delete_published(self._pool, published)
        return len(published)

    async def _publish_rows(self, rows: Sequence[OutboxEvents]) -> int:
        """Publishes rows of the outbox; returns how many. Those with refused events stay."""
        published = []
        for row in rows:
            try:
                await publish(self._producer, self._settings, row.keys, row.records)
            except RecordsRefused as error:
                await outbox.park(self._pool, row, error)
            else:
                published.append(row.id)
        await outbox.delete_published(self._pool, published)
        return len(published)

    async def _redeliver(self) -> int:
        redelivered = 0
        while True:
            rows = await callbacks.take_due(self._session, BATCH, horizon_s=outbox.CALLBACK_HORIZON_S)
            await callback_ends.bury(self._session, await redeliver(self._producer, self._settings, rows))
            redelivered += len(rows)
            if len(rows) < BATCH:
                return redelivered
