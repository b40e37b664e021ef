"""The ledger: every execution as its handler recorded it, compared with the effects in PostgreSQL.

The handlers append to a file, which faults do not affect. At the end the file is loaded into a
table (`ledger.execution`) of the deployment's database, so that a query can compare both.
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
    name text PRIMARY KEY, task_id bigint, step integer, attempt integer, worker text, wave integer, ended text,
    key text
);
CREATE TABLE ledger.acknowledged (key text PRIMARY KEY, wave integer);
-- The execution that took effect as the step of a task, according to the task's result.
CREATE VIEW ledger.effect AS
SELECT t.id AS task_id, by.step - 1 AS step, by.name
FROM penstock.task t,
     jsonb_array_elements_text(convert_from(t.result, 'UTF8')::jsonb -> 'by') WITH ORDINALITY AS by (name, step);
"""

TWICE = """
SELECT t.id, convert_from(t.result, 'UTF8') AS result, e.committed, e.steps
FROM penstock.task t LEFT JOIN LATERAL (
    SELECT count(*) AS committed, count(DISTINCT step) AS steps
    FROM penstock.attempt WHERE task_id = t.id AND outcome IN ('next', 'done')
) e ON true
WHERE t.state = 'succeeded' AND (
    e.committed <> 3 OR e.steps <> 3 OR convert_from(t.result, 'UTF8')::jsonb -> 'n' <> '3'
    OR jsonb_array_length(convert_from(t.result, 'UTF8')::jsonb -> 'by') <> 3)
"""
# The execution that took effect must have ended. The history must name its attempt and worker.
# Neither the history nor the ledger may have a later attempt of the same step.
STALE = """
SELECT f.task_id, f.step, f.name, x.attempt AS ran, x.worker AS ran_by, a.attempt AS committed, a.worker AS by
FROM ledger.effect f
LEFT JOIN ledger.execution x USING (name)
LEFT JOIN penstock.attempt a ON a.task_id = f.task_id AND a.step = f.step AND a.outcome IN ('next', 'done')
WHERE x.name IS NULL OR a.attempt IS NULL OR x.ended IS DISTINCT FROM 'well'
   OR ((x.task_id, x.step, x.attempt, x.worker) IS DISTINCT FROM (a.task_id, a.step, a.attempt, a.worker)
       -- Except late results, which end the successor of the expired attempt (H10).
       AND NOT ((x.task_id, x.step, x.worker) = (a.task_id, a.step, a.worker)
                AND EXISTS (SELECT FROM penstock.attempt e
                            WHERE e.task_id = x.task_id AND e.step = x.step AND e.attempt = x.attempt
                              AND e.attempt < a.attempt AND e.outcome = 'expired')))
   OR EXISTS (SELECT FROM penstock.attempt l
              WHERE l.task_id = f.task_id AND l.step = f.step AND l.attempt > a.attempt)
   OR EXISTS (SELECT FROM ledger.execution l
              WHERE l.task_id = f.task_id AND l.step = f.step AND l.attempt > a.attempt)
"""

# Each query returns the violations of an invariant.
_INVARIANTS = {
    "acknowledged tasks lost": """
        SELECT a.key, t.id, t.state, t.stage, t.attempt, t.error
        FROM ledger.acknowledged a LEFT JOIN penstock.task t ON t.idempotency_key = a.key
        WHERE t.state IS DISTINCT FROM 'succeeded'
    """,
    "tasks that were not submitted": """
        SELECT t.id, t.idempotency_key FROM penstock.task t LEFT JOIN ledger.acknowledged a ON a.key = t.idempotency_key
        WHERE a.key IS NULL
    """,
    "stages taking effect twice, or never": TWICE,
    "commits by a stale attempt": STALE,
}

# An intended failure is followed by a further execution, which does not count as a repetition.
_EXECUTIONS = """
SELECT count(*) AS executions,
       count(*) - count(DISTINCT (task_id, step))
           - count(DISTINCT (task_id, step)) FILTER (WHERE ended = 'failed') AS again
FROM ledger.execution WHERE wave = $1
"""
_OUTCOMES = """
SELECT count(*) FILTER (WHERE outcome = 'expired') AS expired, count(*) FILTER (WHERE outcome = 'handed_back') AS handed_back
FROM penstock.attempt a JOIN penstock.task t ON t.id = a.task_id
JOIN ledger.acknowledged k ON k.key = t.idempotency_key WHERE k.wave = $1
"""


@dataclass(frozen=True)
class Execution:
    """One run of a handler.

    Attributes:
        name: unique name of the execution.
        ended: "well" or "failed"; None when it did not end.
        key: the name that the submitter gave to the task.
        began_s: when it began, by the worker's clock.
        ended_s: when it ended; None when it did not end.
    """

    name: str
    task_id: int
    step: int
    attempt: int
    worker: str
    wave: int
    ended: str | None
    key: str
    began_s: float
    ended_s: float | None


@dataclass(frozen=True)
class WaveCounts:
    """The counts of one wave: `again` is the number of executions beyond those that the stages
    need."""

    executions: int
    again: int
    expired: int
    handed_back: int


def read(file: Path) -> list[Execution]:
    """Reads every execution from the file."""
    started: dict[str, list[str]] = {}
    ended: dict[str, tuple[str, float]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        kind, name, *rest = line.split()
        if kind == "begin":
            started[name] = rest
        else:
            ended[name] = rest[0], float(rest[1])
    return [
        Execution(
            name,
            int(task),
            int(step),
            int(attempt),
            worker,
            int(wave),
            ended[name][0] if name in ended else None,
            key,
            float(began_s),
            ended[name][1] if name in ended else None,
        )
        for name, (task, step, attempt, worker, wave, key, began_s) in started.items()
    ]


async def load(connection: asyncpg.Connection, file: Path, acknowledged: Iterable[tuple[str, int]]) -> None:
    """Creates and fills the tables: executions, and (key, wave) of each acknowledged submission."""
    await connection.execute(_TABLES)
    records = [(x.name, x.task_id, x.step, x.attempt, x.worker, x.wave, x.ended, x.key) for x in read(file)]
    await connection.copy_records_to_table("execution", schema_name="ledger", records=records)
    await connection.copy_records_to_table("acknowledged", schema_name="ledger", records=acknowledged)
    # Without statistics the joins are quadratic and take minutes for 30,000 tasks.
    await connection.execute("ANALYZE")


async def violations(connection: asyncpg.Connection) -> dict[str, list[dict]]:
    """Returns the violations of each invariant."""
    return {
        name: [dict(row) for row in await connection.fetch(statement)]
        for name, statement in _INVARIANTS.items()
    }


async def count_wave(connection: asyncpg.Connection, wave: int) -> WaveCounts:
    """Counts the executions of a wave and their outcomes."""
    return WaveCounts(
        **await connection.fetchrow(_EXECUTIONS, wave), **await connection.fetchrow(_OUTCOMES, wave)
    )
