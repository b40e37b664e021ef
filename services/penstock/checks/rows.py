"""What PostgreSQL alone can tell: timers, leases nobody hears, what is owed for too long, counters that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import asyncpg

from penstock.checks.report import Found, Offender, Rule
from penstock.core.target import TargetId
from penstock.core.task import Priority
from penstock.postgres.connection import translated
from penstock.postgres.queries import query

# What is due may be this late, in seconds, before nobody can be said to watch it.
GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Asked:
    rule: Rule
    what: str
    lacks: Callable[[asyncpg.Record], str]
    argument: float | None = GRACE_S


# Stands for how many partitions the topic of heartbeats has.
_HEARTBEATS = -1.0

_QUESTIONS = (
    _Asked(Rule.OVERDUE, "task", lambda r: f"was due {r['late_s']:.0f} s ago: is task-sync running?"),
    _Asked(
        Rule.UNWATCHED,
        "task",
        lambda r: (
            f"is running on {r['worker']}, heard over partition {r['lease_partition']}: nobody watches that"
        ),
        _HEARTBEATS,
    ),
    _Asked(Rule.WAITING, "task", lambda _r: "waits, and nothing is written down that could wake it", None),
    _Asked(
        Rule.UNSENT,
        "release",
        lambda r: f"{r['tasks']} tasks of {r['type']} not confirmed by Kafka: is task-sync running?",
    ),
    _Asked(Rule.UNPUBLISHED, "event", lambda r: f"{r['events']} events not published: is stages running?"),
    _Asked(
        Rule.UNDELIVERED,
        "callback",
        lambda r: (
            f"to {TargetId(r['namespace'], r['target'])} was due {r['late_s']:.0f} s ago: is callbacks running?"
        ),
    ),
    _Asked(
        Rule.MISCOUNTED,
        "counter",
        lambda r: (
            f"at {Priority(r['priority']).name}, {r['state']}: {r['counted']:,} are counted, and there are {r['tasks']:,}"
        ),
        None,
    ),
)


async def look(pool: asyncpg.Pool[asyncpg.Record], show: int, heartbeats: int) -> list[Found]:
    """The offenders against each rule, the first `show` of them; `heartbeats` is how many partitions that topic has.

    Raises:
        PostgresUnavailable: no server.
    """
    found = []
    for asked in _QUESTIONS:
        argument = heartbeats if asked.argument == _HEARTBEATS else asked.argument
        arguments = [show] if argument is None else [show, argument]
        with translated():
            rows = await pool.fetch(query(f"checks.{asked.rule.value}"), *arguments)
        if rows:
            first = [Offender(asked.rule, asked.what, row["id"], asked.lacks(row)) for row in rows]
            found.append(Found(first, rows[0]["found"]))
    return found
