"""The ledger: every execution as its handler saw it, laid beside what PostgreSQL says took effect.

The handlers append to a file, which no fault can reach; it is read into a table (`ledger.execution`) of the
deployment's own database once everything has ended, so that one query can compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import asyncpg

_TABLES = """
DROP SCHEMA IF EXISTS ledger CASCADE;
CREATE SCHEMA ledger;
CREATE TABLE ledger.execution (
    name text PRIMARY KEY, task_id bigint, step integer, attempt integer, worker text, wave integer, ended text
);
CREATE TABLE ledger.acknowledged (key text PRIMARY KEY, wave integer);
-- The execution that took effect as the step of a task, as the task's own result tells.
CREATE VIEW ledger.effect AS
SELECT t.id AS task_id, by.step - 1 AS step, by.name
FROM penstock.task t,
     jsonb_array_elements_text(convert_from(t.result, 'UTF8')::jsonb -> 'by') WITH ORDINALITY AS by (name, step);
"""

# Each gives the offenders; there must be none.
_INVARIANTS = {
    "acknowledged tasks lost": """
        SELECT a.key, t.id, t.state, t.stage, t.attempt, t.error
        FROM ledger.acknowledged a LEFT JOIN penstock.task t ON t.idempotency_key = a.key
        WHERE t.state IS DISTINCT FROM 'succeeded'
    """,
    "tasks nobody submitted": """
        SELECT t.id, t.idempotency_key FROM penstock.task t LEFT JOIN ledger.acknowledged a ON a.key = t.idempotency_key
        WHERE a.key IS NULL
    """,
    "stages taking effect twice, or never": """
        SELECT t.id, convert_from(t.result, 'UTF8') AS result, e.committed, e.steps
        FROM penstock.task t LEFT JOIN LATERAL (
            SELECT count(*) AS committed, count(DISTINCT step) AS steps
            FROM penstock.attempt WHERE task_id = t.id AND outcome IN ('next', 'done')
        ) e ON true
        WHERE t.state = 'succeeded' AND (
            e.committed <> 3 OR e.steps <> 3 OR convert_from(t.result, 'UTF8')::jsonb -> 'n' <> '3'
            OR jsonb_array_length(convert_from(t.result, 'UTF8')::jsonb -> 'by') <> 3)
    """,
    # What took effect must be an execution that ended, of the attempt and by the worker that history names, and
    # neither history nor the ledger may know a later attempt of the same step.
    "commits by a stale attempt": """
        SELECT f.task_id, f.step, f.name, x.attempt AS ran, x.worker AS ran_by, a.attempt AS committed, a.worker AS by
        FROM ledger.effect f
        LEFT JOIN ledger.execution x USING (name)
        LEFT JOIN penstock.attempt a ON a.task_id = f.task_id AND a.step = f.step AND a.outcome IN ('next', 'done')
        WHERE x.name IS NULL OR a.attempt IS NULL OR x.ended IS DISTINCT FROM 'well'
           OR ((x.task_id, x.step, x.attempt, x.worker) IS DISTINCT FROM (a.task_id, a.step, a.attempt, a.worker)
               -- But for late results, which end the attempt that took the place of the one that expired (H10).
               AND NOT ((x.task_id, x.step, x.worker) = (a.task_id, a.step, a.worker)
                        AND EXISTS (SELECT FROM penstock.attempt e
                                    WHERE e.task_id = x.task_id AND e.step = x.step AND e.attempt = x.attempt
                                      AND e.attempt < a.attempt AND e.outcome = 'expired')))
           OR EXISTS (SELECT FROM penstock.attempt l
                      WHERE l.task_id = f.task_id AND l.step = f.step AND l.attempt > a.attempt)
           OR EXISTS (SELECT FROM ledger.execution l
                      WHERE l.task_id = f.task_id AND l.step = f.step AND l.attempt > a.attempt)
    """,
}

# One that failed as it was told to asks for another: that is no repetition.
_EXECUTIONS = """
SELECT count(*) AS executions,
       count(*) - count(DISTINCT (task_id, step))
           - count(DISTINCT (task_id, step)) FILTER (WHERE ended = 'failed') AS again
FROM ledger.execution WHERE wave = $1
"""
_OUTCOMES = """
SELECT count(*) FILTER (WHERE outcome = 'expired') AS expired, count(*) FILTER (WHERE outcome = 'retry') AS handed_back
FROM penstock.attempt a JOIN penstock.task t ON t.id = a.task_id
JOIN ledger.acknowledged k ON k.key = t.idempotency_key WHERE k.wave = $1
"""


@dataclass(frozen=True)
class Execution:
    """One run of a handler.

    Attributes:
        name: its own.
        ended: "well" or "failed"; None when it did not end.
    """

    name: str
    task_id: int
    step: int
    attempt: int
    worker: str
    wave: int
    ended: str | None


@dataclass(frozen=True)
class Figures:
    """What was counted of one wave: `again` is how many executions were more than the stages needed."""

    executions: int
    again: int
    expired: int
    handed_back: int


def read(file: Path) -> list[Execution]:
    """Every execution in the file."""
    begun: dict[str, list[str]] = {}
    ended: dict[str, str] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        kind, name, *rest = line.split()
        if kind == "begin":
            begun[name] = rest
        else:
            ended[name] = rest[0]
    return [
        Execution(name, int(task), int(step), int(attempt), worker, int(wave), ended.get(name))
        for name, (task, step, attempt, worker, wave) in begun.items()
    ]


async def load(connection: asyncpg.Connection, file: Path, acknowledged: Iterable[tuple[str, int]]) -> None:
    """Makes the tables: executions from the file, and (key, wave) of each submission that was acknowledged."""
    await connection.execute(_TABLES)
    records = [(x.name, x.task_id, x.step, x.attempt, x.worker, x.wave, x.ended) for x in read(file)]
    await connection.copy_records_to_table("execution", schema_name="ledger", records=records)
    await connection.copy_records_to_table("acknowledged", schema_name="ledger", records=acknowledged)
    # Without statistics the joins are quadratic: minutes, for 30,000 tasks.
    await connection.execute("ANALYZE")


async def violations(connection: asyncpg.Connection) -> dict[str, list[dict]]:
    """The offenders against each invariant."""
    return {
        name: [dict(row) for row in await connection.fetch(statement)]
        for name, statement in _INVARIANTS.items()
    }


async def figures(connection: asyncpg.Connection, wave: int) -> Figures:
    """What was counted of a wave."""
    return Figures(
        **await connection.fetchrow(_EXECUTIONS, wave), **await connection.fetchrow(_OUTCOMES, wave)
    )
