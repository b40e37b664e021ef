"""Callbacks that are published again and again and never begun: due again each time, they look as if they were scheduled.

The releaser counts how often it wrote a record of which nothing came, and since when a callback waits that way; whoever
begins, puts back or holds it takes that back (`callbacks.sql`). Two things can then be amiss:

- Its record is *unanswered*: `OFTEN` were written on end, the last is behind what its readers have committed, and still
  nothing came of it. A record that waits for its target's turn is not committed, and one that Kafka has yet to hand out
  isn't either, so neither a long queue nor lag is taken for it, however long. It takes `OFTEN` publications, five minutes as
  the service is set by default; clocks of PostgreSQL and the callbacks service may differ by `SKEW_S`.
- Its target is *uncalled*: it is put back again and again, or stays in a line that does not move, and for `LONG_S` nobody has
  called the target, for whomever. A target that may be called more rarely than that by a rate of its own gets thrice the time
  between two calls; one that is behind records that are as old is behind a backlog. So only a rate of less than two calls an
  hour for all targets (PENSTOCK_CALLBACK_RATE), or waiting for a slot of a full pool for longer, is taken for it.

While the callbacks service does not run nothing is published, so nothing is counted; after five minutes it is counted anew.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import asyncpg
from aiokafka import TopicPartition

from penstock.checks.kafka import Topics
from penstock.checks.report import Found, Offender, Rule
from penstock.core.target import TargetId
from penstock.kafka.outbox import partition_of
from penstock.kafka.topics import CALLBACKS, CALLBACKS_DIVERTED, service_group
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.targets import columns
from penstock.settings import Platform

# Publications on end of which nothing came.
OFTEN = 5
# Seconds for which a target is not called at all.
LONG_S = 1_800.0
# By how many seconds clocks may differ, and a record be written later than PostgreSQL was told; and for how long its
# reader is given to commit it beyond that.
SKEW_S = 5.0
COMMIT_S = 5.0
# Most that one check counts, and repairs.
MOST = 10_000
AT_A_TIME = 1_000
READ_WITHIN_S = 10.0


@dataclass
class _Read:
    """How far the readers of both ways are: the oldest record of each partition that they have not committed."""

    partitions: dict[str, int] = field(default_factory=dict)
    oldest_s: dict[TopicPartition, float] = field(default_factory=dict)


class Unbegun:
    """What is published in vain.

    Args:
        settings: for the names of topics.
        pool: of the database.
        topics: of Kafka.
        show: how many to name.
    """

    def __init__(
        self, settings: Platform, pool: asyncpg.Pool[asyncpg.Record], topics: Topics, show: int
    ) -> None:
        self._prefix = settings.prefix
        self._pool = pool
        self._topics = topics
        self._show = show
        # Each by its id, its attempt and how often it was published.
        self._unanswered: list[tuple[str, int, int]] = []
        self._uncalled: list[TargetId] = []

    async def look(self) -> list[Found]:
        """The offenders; waits a few seconds when a record was written only just now.

        Raises:
            PostgresUnavailable, KafkaUnavailable: it cannot be told.
        """
        rows = await self._fetch_unanswered()
        fresh_s = max((row["published_at_s"] for row in rows), default=0.0) + SKEW_S + COMMIT_S - time.time()
        if fresh_s > 0:
            # No longer than that: clocks may differ by more.
            await asyncio.sleep(min(fresh_s, SKEW_S + COMMIT_S))
        found = [await self._find_unanswered(), await self._find_uncalled()]
        return [some for some in found if some.count]

    async def _find_unanswered(self) -> Found:
        rows = await self._fetch_unanswered()
        read = await self._read() if rows else _Read()
        # Whoever begins one commits its record after that: what was begun meanwhile is not unanswered any more.
        still = {(row["id"], row["attempt"]): row["published"] for row in await self._fetch_unanswered()}
        rows = [
            row
            for row in rows
            if still.get((row["id"], row["attempt"]), 0) >= row["published"]
            and self._unread_since_s(read, row["target"], diverted=row["diverted"])
            > row["published_at_s"] + SKEW_S
        ]
        self._unanswered = [(row["id"], row["attempt"], row["published"]) for row in rows]
        return Found(
            [
                Offender(
                    Rule.UNBEGUN,
                    "callback",
                    row["id"],
                    f"to {_target_of(row)}: its record was written {row['published']} times on end and read, and nothing "
                    f"came of it: look at {self._topic(row['diverted'])}.rejected and what callbacks logs",
                )
                for row in rows[: self._show]
            ],
            len(rows),
        )

    async def _find_uncalled(self) -> Found:
        rows = await self._fetch_uncalled()
        read = await self._read() if rows else _Read()
        behind_s = time.time() - LONG_S
        rows = [
            row
            for row in rows
            if all(self._unread_since_s(read, row["target"], diverted=d) > behind_s for d in (False, True))
        ]
        # Who was called since then has a lane that moves.
        uncalled = {_target_of(row) for row in await self._fetch_uncalled()} if rows else set()
        rows = [row for row in rows if _target_of(row) in uncalled]
        self._uncalled = [_target_of(row) for row in rows]
        return Found(
            [
                Offender(
                    Rule.UNBEGUN,
                    "callback",
                    row["id"],
                    f"{_more(row['callbacks'])} published to {_target_of(row)} again and again for "
                    f"{row['age_s'] / 60:.0f} min, and nobody has called that target",
                )
                for row in rows[: self._show]
            ],
            sum(row["callbacks"] for row in rows),
        )

    async def divert(self) -> int:
        """Makes due, on the diverted way, what was found and has not moved since; returns how many that were.

        Raises:
            PostgresUnavailable: some may be, others not.
        """
        done = 0
        for begin in range(0, len(self._unanswered), AT_A_TIME):
            ids, attempts, published = zip(*self._unanswered[begin : begin + AT_A_TIME], strict=True)
            done += len(await self._fetch("checks.divert", ids, attempts, published))
        moved = AT_A_TIME
        while self._uncalled and moved == AT_A_TIME:
            moved = len(
                await self._fetch("checks.divert_uncalled", AT_A_TIME, *columns(self._uncalled), LONG_S)
            )
            done += moved
        return done

    async def _fetch_unanswered(self) -> list[asyncpg.Record]:
        return await self._fetch("checks.unanswered", MOST, OFTEN)

    async def _fetch_uncalled(self) -> list[asyncpg.Record]:
        known = [key[0] for key in self._unanswered]
        return await self._fetch("checks.uncalled", MOST, LONG_S, known)

    async def _fetch(self, name: str, *arguments: object) -> list[asyncpg.Record]:
        with translated():
            return await self._pool.fetch(query(name), *arguments)

    async def _read(self) -> _Read:
        read = _Read()
        committed = await self._topics.committed(service_group(self._prefix, "callbacks"))
        for topic in (CALLBACKS.name, CALLBACKS_DIVERTED.name):
            read.partitions[self._prefix + topic] = len(await self._topics.ends(topic))
            unread = await self._topics.unread(topic, committed)
            if unread:
                read.oldest_s |= await self._topics.oldest_s(unread, READ_WITHIN_S)
        return read

    def _unread_since_s(self, read: _Read, target: str, *, diverted: bool) -> float:
        """When the oldest record was written that is unread on a target's partition; infinite when all are read."""
        topic = self._topic(diverted)
        partition = partition_of(target.encode(), read.partitions[topic])
        return read.oldest_s.get(TopicPartition(topic, partition), float("inf"))

    def _topic(self, diverted: bool) -> str:
        return self._prefix + (CALLBACKS_DIVERTED.name if diverted else CALLBACKS.name)


def _target_of(row: asyncpg.Record) -> TargetId:
    return TargetId(row["namespace"], row["target"])


def _more(callbacks: int) -> str:
    return f"and {callbacks - 1:,} more are" if callbacks > 1 else "is"
