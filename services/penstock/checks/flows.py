"""The rules of flows: what runs can end, what has ended has nothing left, and counters agree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import asyncpg

from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rule import GRACE_S, Candidates, Check, RowCheck, Writers
from penstock.postgres import checks, flow_checks
from penstock.postgres.advance import cancel
from penstock.postgres.checks import BATCH
from penstock.postgres.flow_starts import match_events

# More than all families.
_ALL = 10_000_000


class _FlowCheck(Check):
    """A rule that one statement checks, for a page of flows after another.

    Attributes:
        statement: its name in flow_checks.sql.
        recount: a repair corrects the counters of flows and maps first.
    """

    statement: ClassVar[str]
    recount: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def lacks(row: asyncpg.Record) -> str:
        """Says in one sentence what a row lacks."""

    def _rows(self) -> AsyncIterator[list[asyncpg.Record]]:
        return checks.by_ranges(self.system.pool, "flow_checks.page", f"flow_checks.{self.statement}")

    async def find(self) -> Candidates:
        """See `Check`."""
        found = Offenders([], 0)
        async for rows in self._rows():
            missing = self.system.show - len(found.first)
            found.first += [Offender(self.rule, "flow", row["id"], self.lacks(row)) for row in rows[:missing]]
            found.count += len(rows)
        return {self.statement: found} if found.count else {}

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`; the owner of the flow decides anew, which changes nothing twice."""
        revived = 0
        async for rows in self._rows():
            ids = sorted({row["id"] for row in rows})
            for begin in range(0, len(ids), BATCH):
                revived += await flow_checks.revive(
                    self.system.pool, ids[begin : begin + BATCH], recount=self.recount
                )
        return revived


class Stalled(_FlowCheck):
    """A running flow that nothing can advance. Its owner decides anew."""

    rule, statement = Rule.STALLED, "stalled"

    @staticmethod
    def lacks(row: asyncpg.Record) -> str:
        """See `_FlowCheck`."""
        if row["node"] is None:
            return "runs without a running node, and its inbox is empty: nothing will advance it"
        if row["is_map"]:
            return f"has the running map {row['node']} without a live item, and its inbox is empty"
        return f"has the running node {row['node']} without a live task, child flow, wait or timer"


class Leftover(_FlowCheck):
    """A remainder of an ended flow. Tasks and child flows are cancelled; limits and waits go."""

    rule, statement = Rule.LEFTOVER, "leftovers"

    @staticmethod
    def lacks(row: asyncpg.Record) -> str:
        """See `_FlowCheck`."""
        if row["what"] == "task":
            return f"has ended, and task {row['child_id']} of its node {row['node']} has not"
        if row["what"] == "flow":
            return f"has ended, and child flow {row['child_id']} of its node {row['node']} has not"
        if row["what"] == "waiter":
            return "runs, and the task that waited for it has ended"
        owner = f"of its node {row['node']}" if row["node"] else "of its own"
        return f"has ended, and still has a {row['what']} {owner}"

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        pool, source = self.system.pool, self.system.settings.event_source
        ended = 0
        async for rows in self._rows():
            tasks = [row["child_id"] for row in rows if row["what"] == "task"]
            for begin in range(0, len(tasks), BATCH):
                cancelled, outbox = await cancel(pool, tasks[begin : begin + BATCH], source=source)
                await writers.publish(outbox)
                ended += len(cancelled)
            ended += await flow_checks.cancel_children(
                pool, [row["child_id"] for row in rows if row["what"] in ("flow", "waiter")]
            )
            ended += await flow_checks.clear(
                pool, sorted({row["id"] for row in rows if row["what"] in ("limit", "wait")})
            )
        return ended


class Miscounted(_FlowCheck):
    """A flow with wrong counters. They are corrected under a lock; its owner decides anew."""

    rule, statement, recount = Rule.MISCOUNTED_FLOW, "miscounted", True

    @staticmethod
    def lacks(row: asyncpg.Record) -> str:
        """See `_FlowCheck`."""
        names = ("unfinished", "live", "unsuccessful")
        wrong = [
            f"{row[name]:,} {name} nodes, and there are {row[f'counted_{name}']:,}"
            for name in names
            if row[name] != row[f"counted_{name}"]
        ]
        return f"counts {'; it counts '.join(wrong)}"


class MiscountedMap(_FlowCheck):
    """The same as `Miscounted`, for the items of a map."""

    rule, statement, recount = Rule.MISCOUNTED_FLOW, "miscounted_maps", True

    @staticmethod
    def lacks(row: asyncpg.Record) -> str:
        """See `_FlowCheck`."""
        return f"counts {row['live']:,} live items of its map {row['node']}, and there are {row['counted']:,}"


class Unapplied(RowCheck):
    """A flow whose inbox no owner applies. The owner of the shard is notified once more."""

    rule, what, statement = Rule.UNAPPLIED, "flow", "flow_checks.unapplied"
    lacks = (
        "has {messages:,} inbox rows or limits that no owner has applied, the oldest for "
        "{late_s:,.0f} s: is the service flows running, and what does its log say of this flow?"
    )

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        rows = await checks.fetch(self.system.pool, self.statement, _ALL, GRACE_S)
        shards: Sequence[int] = sorted({row["shard"] for row in rows})
        await checks.fetch(self.system.pool, "flow_checks.wake", shards)
        return len(rows)


class Unmatched(RowCheck):
    """A flow that waits for an event that is there. They meet, as by the sweep of the owner."""

    rule, what, statement = Rule.UNMATCHED, "flow", "flow_checks.unmatched"

    def sentence(self, row: asyncpg.Record) -> str:
        """See `RowCheck`."""
        key = f" with key {row['key']!r}" if row["key"] else ""
        return f"waits at node {row['node']} for event {row['event']}{key}, which is there"

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        return await match_events(self.system.pool)
