"""The rules of flows: what runs can end, what has ended has nothing left, and counters agree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import asyncpg

from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rows import GRACE_S
from penstock.contracts.event import OutboxEntry
from penstock.postgres import flow_checks
from penstock.postgres.advance import cancel
from penstock.postgres.checks import BATCH, Pool
from penstock.postgres.flow_starts import match_events


def _stalled(row: asyncpg.Record) -> str:
    if row["node"] is None:
        return "runs without a running node, and its inbox is empty: nothing will advance it"
    if row["is_map"]:
        return f"has the running map {row['node']} without a live item, and its inbox is empty"
    return f"has the running node {row['node']} without a live task, child flow, wait or timer"


def _leftover(row: asyncpg.Record) -> str:
    if row["what"] == "task":
        return f"has ended, and task {row['child_id']} of its node {row['node']} has not"
    if row["what"] == "flow":
        return f"has ended, and child flow {row['child_id']} of its node {row['node']} has not"
    if row["what"] == "waiter":
        return "runs, and the task that waited for it has ended"
    owner = f"of its node {row['node']}" if row["node"] else "of its own"
    return f"has ended, and still has a {row['what']} {owner}"


def _miscounted(row: asyncpg.Record) -> str:
    names = ("unfinished", "live", "unsuccessful")
    wrong = [
        f"{row[name]:,} {name} nodes, and there are {row[f'counted_{name}']:,}"
        for name in names
        if row[name] != row[f"counted_{name}"]
    ]
    return f"counts {'; it counts '.join(wrong)}"


def _miscounted_map(row: asyncpg.Record) -> str:
    return f"counts {row['live']:,} live items of its map {row['node']}, and there are {row['counted']:,}"


def _unapplied(row: asyncpg.Record) -> str:
    return (
        f"has {row['messages']:,} inbox rows or limits that no owner has applied, the oldest for "
        f"{row['late_s']:,.0f} s: is the service flows running, and what does its log say of this flow?"
    )


def _unmatched(row: asyncpg.Record) -> str:
    key = f" with key {row['key']!r}" if row["key"] else ""
    return f"waits at node {row['node']} for event {row['event']}{key}, which is there"


_PAGED: tuple[tuple[Rule, str, Callable[[asyncpg.Record], str]], ...] = (
    (Rule.STALLED, "stalled", _stalled),
    (Rule.LEFTOVER, "leftovers", _leftover),
    (Rule.MISCOUNTED_FLOW, "miscounted", _miscounted),
    (Rule.MISCOUNTED_FLOW, "miscounted_maps", _miscounted_map),
)
_LATE: tuple[tuple[Rule, str, Callable[[asyncpg.Record], str]], ...] = (
    (Rule.UNAPPLIED, "unapplied", _unapplied),
    (Rule.UNMATCHED, "unmatched", _unmatched),
)
# More than all families.
_ALL = 10_000_000


class Flows:
    """Finds flows that break a rule, and repairs them.

    Args:
        pool: of the database.
        show: how many offenders against one rule to name.
    """

    def __init__(self, pool: Pool, show: int) -> None:
        self._pool = pool
        self._show = show

    async def find(self) -> list[Offenders]:
        """The first offenders against each rule.

        Raises:
            PostgresUnavailable: no server.
        """
        offenders = []
        for rule, name, lacks in _PAGED:
            of_rule = Offenders([], 0)
            async for rows in flow_checks.found(self._pool, name):
                missing = self._show - len(of_rule.first)
                of_rule.first += [Offender(rule, "flow", row["id"], lacks(row)) for row in rows[:missing]]
                of_rule.count += len(rows)
            offenders.append(of_rule)
        for rule, name, lacks in _LATE:
            rows = await flow_checks.late(self._pool, name, self._show, GRACE_S)
            first = [Offender(rule, "flow", row["id"], lacks(row)) for row in rows]
            offenders.append(Offenders(first, rows[0]["found"] if rows else 0))
        return [of_rule for of_rule in offenders if of_rule.count]

    def repairs(
        self, publish: Callable[[OutboxEntry], Awaitable[None]], source: str
    ) -> dict[Rule, Callable[[], Awaitable[int]]]:
        """The repairs, by rule.

        Args:
            publish: publishes the events of tasks that a repair cancels.
            source: of CloudEvents (see `Platform`).
        """
        return {
            Rule.STALLED: partial(self._revive, "stalled"),
            Rule.MISCOUNTED_FLOW: self._recount,
            Rule.LEFTOVER: partial(self._end, publish, source),
            Rule.UNAPPLIED: self._wake,
            Rule.UNMATCHED: partial(match_events, self._pool),
        }

    async def _revive(self, name: str, *, recount: bool = False) -> int:
        revived = 0
        async for rows in flow_checks.found(self._pool, name):
            ids = sorted({row["id"] for row in rows})
            for begin in range(0, len(ids), BATCH):
                revived += await flow_checks.revive(self._pool, ids[begin : begin + BATCH], recount=recount)
        return revived

    async def _recount(self) -> int:
        flows = await self._revive("miscounted", recount=True)
        return flows + await self._revive("miscounted_maps", recount=True)

    async def _end(self, publish: Callable[[OutboxEntry], Awaitable[None]], source: str) -> int:
        ended = 0
        async for rows in flow_checks.found(self._pool, "leftovers"):
            tasks = [row["child_id"] for row in rows if row["what"] == "task"]
            for begin in range(0, len(tasks), BATCH):
                cancelled, outbox = await cancel(self._pool, tasks[begin : begin + BATCH], source=source)
                await publish(outbox)
                ended += len(cancelled)
            ended += await flow_checks.cancel_children(
                self._pool, [row["child_id"] for row in rows if row["what"] in ("flow", "waiter")]
            )
            ended += await flow_checks.clear(
                self._pool, sorted({row["id"] for row in rows if row["what"] in ("limit", "wait")})
            )
        return ended

    async def _wake(self) -> int:
        rows = await flow_checks.late(self._pool, "unapplied", _ALL, GRACE_S)
        await flow_checks.wake(self._pool, sorted({row["shard"] for row in rows}))
        return len(rows)
