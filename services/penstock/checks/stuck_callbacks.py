"""Stuck callbacks: the requeuer publishes them again and again, and no attempt is ever claimed.

They are always due again, so they look like scheduled callbacks. The requeuer counts publications
without a claim, and records since when a callback waits; a claim, a postponement or a hold resets
both (`callbacks.sql`). There are two kinds:

- *Unclaimed*: its record was published `LEAST_PUBLICATIONS` times, the consumer group has committed
  past the last one, and there is still no claim. A record that waits in a lane or in Kafka is not
  committed, so neither a long queue nor lag causes a finding. With default settings a finding takes
  five minutes. The clocks of PostgreSQL and of the callbacks service may differ by `SKEW_S`.
- *Uncalled*: it is postponed again and again, or its lane does not move, and the target was not
  called for `UNCALLED_S`. For a target with a low rate of its own, three intervals between calls
  must have passed. A target whose partition has unread records as old is behind a backlog, and no
  finding. A false finding needs a full pool for that long.

While no callbacks service runs, no record is published or counted; after five minutes the count
starts anew.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import asyncpg
from aiokafka import TopicPartition

from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rule import Candidates, Check, System, Writers
from penstock.core.target import TargetId
from penstock.kafka.processing.outbox import partition_of
from penstock.kafka.topology.topics import CALLBACKS, CALLBACKS_DIVERTED, service_group
from penstock.postgres import checks
from penstock.postgres.checks import BATCH
from penstock.postgres.targets import target_columns

# Consecutive publications without a claim.
LEAST_PUBLICATIONS = 5
# Seconds without a call to the target.
UNCALLED_S = 1_800.0
# Most difference of clocks, including the delay between `published_at` and the record; and seconds
# for the reader's commit.
SKEW_S = 5.0
COMMIT_S = 5.0
# Most callbacks that one check counts, and that one statement repairs.
MOST = 10_000
READ_WITHIN_S = 10.0


@dataclass
class _ReadPositions:
    """The oldest uncommitted record of each partition, on both paths."""

    partitions: dict[str, int] = field(default_factory=dict)
    oldest_s: dict[TopicPartition, float] = field(default_factory=dict)


class StuckCallbacks(Check):
    """A stuck callback. It is due at once on the diverted path, past what kept it."""

    rule = Rule.UNBEGUN

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._prefix = system.settings.prefix
        # (id, attempt, publications) of each.
        self._unclaimed: list[tuple[str, int, int]] = []
        self._uncalled: list[TargetId] = []

    async def find(self) -> Candidates:
        """The offenders; waits a few seconds for the commit of a record that was just published."""
        rows = await self._fetch_unclaimed()
        fresh_s = max((row["published_at_s"] for row in rows), default=0.0) + SKEW_S + COMMIT_S - time.time()
        if fresh_s > 0:
            # Bounded, because the clocks may differ by more than expected.
            await asyncio.sleep(min(fresh_s, SKEW_S + COMMIT_S))
        found = {"unclaimed": await self._find_unclaimed(), "uncalled": await self._find_uncalled()}
        return {kind: offenders for kind, offenders in found.items() if offenders.count}

    async def _find_unclaimed(self) -> Offenders:
        rows = await self._fetch_unclaimed()
        positions = await self._read_positions() if rows else _ReadPositions()
        # A claim comes before the commit of its record, so a callback that was claimed meanwhile is
        # not stuck.
        unclaimed = {(row["id"], row["attempt"]): row["published"] for row in await self._fetch_unclaimed()}
        rows = [
            row
            for row in rows
            if unclaimed.get((row["id"], row["attempt"]), 0) >= row["published"]
            and self._unread_since_s(positions, row["target"], diverted=row["diverted"])
            > row["published_at_s"] + SKEW_S
        ]
        self._unclaimed = [(row["id"], row["attempt"], row["published"]) for row in rows]
        return Offenders(
            [
                Offender(
                    Rule.UNBEGUN,
                    "callback",
                    row["id"],
                    f"to {_target_of(row)}: its record was published {row['published']} times and read, but no attempt was "
                    f"claimed: look at {self._topic(row['diverted'])}.rejected and the log of the callbacks service",
                )
                for row in rows[: self.system.show]
            ],
            len(rows),
        )

    async def _find_uncalled(self) -> Offenders:
        rows = await self._fetch_uncalled()
        positions = await self._read_positions() if rows else _ReadPositions()
        before_s = time.time() - UNCALLED_S
        rows = [
            row
            for row in rows
            if all(
                self._unread_since_s(positions, row["target"], diverted=d) > before_s for d in (False, True)
            )
        ]
        # A target that was called since then has a lane that moves.
        uncalled = {_target_of(row) for row in await self._fetch_uncalled()} if rows else set()
        rows = [row for row in rows if _target_of(row) in uncalled]
        self._uncalled = [_target_of(row) for row in rows]
        return Offenders(
            [
                Offender(
                    Rule.UNBEGUN,
                    "callback",
                    row["id"],
                    f"{_more(row['callbacks'])} published to {_target_of(row)} again and again for "
                    f"{row['age_s'] / 60:.0f} min, and that target was not called",
                )
                for row in rows[: self.system.show]
            ],
            sum(row["callbacks"] for row in rows),
        )

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`; diverts what the last search found, if it is still stuck."""
        done = 0
        for begin in range(0, len(self._unclaimed), BATCH):
            columns = zip(*self._unclaimed[begin : begin + BATCH], strict=True)
            done += len(await checks.fetch(self.system.pool, "checks.divert", *columns))
        if self._uncalled:
            namespaces, urls = target_columns(self._uncalled)
            done += await checks.repeat(
                self.system.pool,
                "checks.divert_uncalled",
                limit=BATCH,
                namespace=namespaces,
                url=urls,
                uncalled_s=UNCALLED_S,
            )
        return done

    async def _fetch_unclaimed(self) -> list[asyncpg.Record]:
        return await checks.fetch(self.system.pool, "checks.unanswered", MOST, LEAST_PUBLICATIONS)

    async def _fetch_uncalled(self) -> list[asyncpg.Record]:
        found = [callback_id for callback_id, _attempt, _published in self._unclaimed]
        return await checks.fetch(self.system.pool, "checks.uncalled", MOST, UNCALLED_S, found)

    async def _read_positions(self) -> _ReadPositions:
        positions = _ReadPositions()
        committed = await self.system.topics.committed(service_group(self._prefix, "callbacks"))
        for topic in (CALLBACKS.name, CALLBACKS_DIVERTED.name):
            positions.partitions[self._prefix + topic] = len(await self.system.topics.ends(topic))
            unread = await self.system.topics.unread(topic, committed)
            if unread:
                positions.oldest_s |= await self.system.topics.oldest_s(unread, READ_WITHIN_S)
        return positions

    def _unread_since_s(self, positions: _ReadPositions, target: str, *, diverted: bool) -> float:
        """Timestamp of the oldest unread record on a target's partition; infinite without one."""
        topic = self._topic(diverted)
        partition = partition_of(target.encode(), positions.partitions[topic])
        return positions.oldest_s.get(TopicPartition(topic, partition), float("inf"))

    def _topic(self, diverted: bool) -> str:
        return self._prefix + (CALLBACKS_DIVERTED.name if diverted else CALLBACKS.name)


def _target_of(row: asyncpg.Record) -> TargetId:
    return TargetId(row["namespace"], row["target"])


def _more(callbacks: int) -> str:
    return f"and {callbacks - 1:,} more are" if callbacks > 1 else "is"
