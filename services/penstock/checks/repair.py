"""Putting back what is in limbo, by what would normally do it: never past the fence, never by hand.

| offender | what is done |
| --- | --- |
| overdue, recordless | ready again, if still in the very attempt; the type's owner is told and releases it |
| unreleased | the type's owner is told once more |
| unwatched | expires, as its lease would have: the same decision, the same fenced statement, the same events |
| unsent | under its type's lock: the note goes, and what it queued is ready again |
| unpublished | published, as the sweeper does; the events' ids make a repetition harmless |
| undelivered | its record is written again, as the releaser does |
| miscounted | counted anew: what is missing is added, while all goes on |
| unbegun | due at once, on the diverted way: another topic, another pool, past what kept it |

A service that does not run cannot be made up for: what is unheard, unread or unproven is left, and so is what waits.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.checks.queued import Queued
from penstock.checks.report import Rule
from penstock.checks.rows import GRACE_S
from penstock.checks.unbegun import Unbegun
from penstock.contracts.result import Failure
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.target import TargetId
from penstock.kafka.declared import partitions_of
from penstock.kafka.outbox import Publisher, publish, redeliver
from penstock.kafka.topics import HEARTBEATS
from penstock.postgres import backlog, callbacks, outbox, release
from penstock.postgres.advance import CALLBACK_HORIZON_S, Ending, advance, tallies
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.session import Session
from penstock.postgres.targets import columns
from penstock.settings import Platform

log = logging.getLogger(__name__)

# Rows that one statement changes.
AT_A_TIME = 1_000
# Rows of the outbox: each may hold a thousand events.
BATCHES_AT_A_TIME = 20


class Repair:
    """Puts back offenders.

    Args:
        settings: for the names of topics.
        pool: of the database, with two connections at least.
        session: for locks.
        producer: acks=all.
        queued: knows the queued tasks without a record.
        unbegun: knows the callbacks that are published in vain.
    """

    def __init__(
        self,
        settings: Platform,
        pool: asyncpg.Pool[asyncpg.Record],
        session: Session,
        producer: AIOKafkaProducer,
        queued: Queued,
        unbegun: Unbegun,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._session = session
        self._producer = producer
        self._queued = queued
        self._ways: dict[Rule, Callable[[], Awaitable[int]]] = {
            Rule.OVERDUE: self._promote,
            Rule.RECORDLESS: self._release_again,
            Rule.UNRELEASED: self._wake,
            Rule.UNWATCHED: self._expire,
            Rule.UNSENT: self._unnote,
            Rule.UNPUBLISHED: self._publish,
            Rule.UNDELIVERED: self._redeliver,
            Rule.UNBEGUN: unbegun.divert,
            Rule.HELD: self._let_go,
            Rule.MISCOUNTED: self._recount,
        }

    async def put_back(self, rules: Counter[Rule]) -> Counter[Rule]:
        """Puts back all that breaks some rules; returns how many were, by rule.

        Raises:
            PostgresUnavailable, KafkaUnavailable, SessionLost: what was put back by then stays so.
        """
        done: Counter[Rule] = Counter()
        for rule in rules:
            if rule in self._ways:
                done[rule] = await self._ways[rule]()
        return +done

    async def _recount(self) -> int:
        return await backlog.recount(self._pool)

    async def _promote(self) -> int:
        return await self._repeat("checks.promote", AT_A_TIME, GRACE_S)

    async def _repeat(self, name: str, *arguments: object) -> int:
        done = 0
        while True:
            with translated():
                rows = await self._pool.fetch(query(name), *arguments)
            done += len(rows)
            if len(rows) < AT_A_TIME:
                return done

    async def _let_go(self) -> int:
        with translated():
            rows = await self._pool.fetch(query("checks.held"), GRACE_S)
        held = columns(TargetId(row["namespace"], row["target"]) for row in rows)
        return await self._repeat("checks.let_go", AT_A_TIME, *held)

    async def _release_again(self) -> int:
        done = 0
        async for _names, keys in self._queued.without_record():
            for begin in range(0, len(keys), AT_A_TIME):
                done += await self._queued.release_again(keys[begin : begin + AT_A_TIME])
        return done

    async def _wake(self) -> int:
        with translated():
            rows = await self._pool.fetch(query("checks.ready"), GRACE_S)
            owned = [row for row in rows if row["owned"]]
            await self._pool.fetch(query("checks.wake"), [row["type"] for row in owned])
        return sum(row["tasks"] for row in owned)

    async def _expire(self) -> int:
        """As the heartbeat processor would, whose watch they have escaped."""
        publisher = Publisher(self._producer, self._settings, partial(outbox.paid, self._pool))
        done = 0
        while True:
            with translated():
                rows = await self._pool.fetch(
                    query("checks.unwatched"), AT_A_TIME, partitions_of(self._settings, HEARTBEATS)
                )
            trials = await tallies(self._pool, [row["id"] for row in rows])
            endings = []
            for row in rows:
                trial = trials.get(row["id"])
                if trial is None:
                    continue  # ended or cancelled since
                fence = Fence(row["id"], row["step"], row["stage"], row["attempt"])
                verdict = conclude(
                    fence,
                    Outcome.EXPIRED,
                    tally=trial.tally,
                    policy=trial.policy,
                    max_losses=trial.max_losses,
                    chance=random.random(),  # noqa: S311 (jitter)
                )
                error = Failure(
                    kind="LeaseExpired",
                    message=f"nobody watched over worker {row['worker']}; put back by `penstock check --repair`",
                )
                endings.append(
                    Ending(
                        fence=fence,
                        outcome=Outcome.EXPIRED,
                        verdict=verdict,
                        worker=row["worker"],
                        error=error,
                    )
                )
            applied = 0
            if endings:
                advanced = await advance(self._pool, endings, source=self._settings.event_source)
                publisher.owe(advanced.owed)
                applied = len(advanced.applied)
            done += applied
            if len(rows) < AT_A_TIME or not applied:
                break
        # What cannot be published now is left to the sweeper.
        await publisher.drain()
        return done

    async def _unnote(self) -> int:
        done = 0
        with translated():
            rows = await self._pool.fetch(query("checks.unsent"), AT_A_TIME, GRACE_S)
        for name in sorted({row["type"] for row in rows}):
            if not await release.own(self._session, name):
                log.warning("%s: a task-sync owns the type and has not brought its release to Kafka", name)
                continue
            try:
                [row] = await self._session.fetch("checks.unnote", name, GRACE_S)
                done += row["notes"]
            finally:
                await release.disown(self._session, name)
        return done

    async def _publish(self) -> int:
        done = 0
        while True:
            rows = await outbox.owed(self._pool, age_s=GRACE_S, limit=BATCHES_AT_A_TIME)
            for row in rows:
                await publish(self._producer, self._settings, row.keys, row.records)
            await outbox.paid(self._pool, [row.id for row in rows])
            done += len(rows)
            if len(rows) < BATCHES_AT_A_TIME:
                return done

    async def _redeliver(self) -> int:
        done = 0
        while True:
            rows = await callbacks.due(self._session, AT_A_TIME, horizon_s=CALLBACK_HORIZON_S)
            await redeliver(self._producer, self._settings, rows)
            done += len(rows)
            if len(rows) < AT_A_TIME:
                return done
