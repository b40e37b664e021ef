"""The rules that PostgreSQL alone can check: timers, partitions of leases, outbox, counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import asyncpg

from penstock.checks.report import Offender, Offenders, Rule
from penstock.core.target import TargetId
from penstock.core.task import Priority
from penstock.postgres import backlog, checks
from penstock.postgres.backlog import Miscount

# A timer may be late by this many seconds before it is an offender.
GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Check:
    rule: Rule
    # Empty when each row says it.
    what: str
    lacks: Callable[[asyncpg.Record], str]
    argument: float | None = GRACE_S
    # Name of the statement, if it is not that of the rule.
    statement: str = ""


# Stands for the number of partitions of the heartbeats topic.
_HEARTBEATS = -1.0

_CHECKS = (
    _Check(Rule.OVERDUE, "task", lambda r: f"was due {r['late_s']:.0f} s ago: is task-sync running?"),
    _Check(
        Rule.UNWATCHED,
        "task",
        lambda r: (
            f"is running on {r['worker']}, and its heartbeats partition {r['lease_partition']} does not exist: "
            "no lease of it can expire"
        ),
        _HEARTBEATS,
    ),
    _Check(Rule.WAITING, "task", lambda _r: "waits, and nothing is recorded that could wake it", None),
    _Check(
        Rule.UNSENT,
        "release",
        lambda r: f"{r['tasks']} tasks of {r['type']} not confirmed by Kafka: is task-sync running?",
    ),
    _Check(Rule.UNPUBLISHED, "event", lambda r: f"{r['events']} events not published: is stages running?"),
    _Check(
        Rule.REFUSED,
        "event",
        lambda r: f"{r['events']} events that Kafka refuses ({r['refused']}): change its limit, then repair",
        None,
    ),
    _Check(
        Rule.UNPUBLISHED,
        "result",
        lambda r: f"{r['records']} records of {r['topic']} not published: is callbacks running?",
        statement="unpublished_results",
    ),
    _Check(
        Rule.REFUSED,
        "result",
        lambda r: (
            f"{r['records']} records of {r['topic']} that Kafka refuses ({r['refused']}): change its limit, then repair"
        ),
        None,
        statement="refused_results",
    ),
    _Check(
        Rule.UNDELIVERED,
        "callback",
        lambda r: (
            f"to {TargetId(r['namespace'], r['target'])} was due {r['late_s']:.0f} s ago: is callbacks running?"
        ),
    ),
    _Check(
        Rule.AHEAD,
        "",
        lambda r: f"has times up to {r['ahead_s']:.0f} s too late: the clock of PostgreSQL was ahead",
    ),
    _Check(
        Rule.LOST,
        "topic",
        lambda r: f"lost {r['deleted']:,} records that were deleted before they were read",
        None,
    ),
)


async def find(pool: checks.Pool, show: int, heartbeats: int) -> list[Offenders]:
    """The first `show` offenders against each rule; `heartbeats`: partitions of that topic.

    Raises:
        PostgresUnavailable: no server.
    """
    found = []
    for check in _CHECKS:
        argument = heartbeats if check.argument == _HEARTBEATS else check.argument
        arguments = [show] if argument is None else [show, argument]
        rows = await checks.offenders(pool, check.statement or check.rule.value, *arguments)
        if rows:
            first = [
                Offender(check.rule, check.what or row["what"], row["id"], check.lacks(row)) for row in rows
            ]
            found.append(Offenders(first, rows[0]["found"]))
    if wrong := await backlog.miscounted(pool):
        found.append(Offenders([_offender(miscount) for miscount in wrong[:show]], len(wrong)))
    return found


def _offender(miscount: Miscount) -> Offender:
    lacks = (
        f"at {Priority(miscount.priority).name}, {miscount.state}: the counter says {miscount.counted:,}, "
        f"and there are {miscount.tasks:,} tasks"
    )
    return Offender(Rule.MISCOUNTED, "counter", f"{miscount.type}/{miscount.stage}", lacks)
