"""The ledger under state faults: what may be lost is known by name, and nothing else is.

A submission is known by the key in its context, because some have no idempotency key. `ends` says
what must become of it: `succeeded`, `quarantined` (it kills its worker), `lost` (a fault removed it
after it was acknowledged: no task may exist), or `uncertain` (it was never acknowledged: a task may
exist).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import asyncpg

from tests.chaos import ledger

_TABLES = """
CREATE TABLE ledger.submission (key text PRIMARY KEY, wave integer, ends text);
CREATE VIEW ledger.task AS
SELECT id, state, stage, attempt, error, idempotency_key,
       convert_from(coalesce(result, context), 'UTF8')::jsonb ->> 'key' AS key
FROM penstock.task;
"""

_INVARIANTS = {
    "acknowledged tasks lost": """
        SELECT s.key, s.ends, t.id, t.state, t.stage, t.attempt, t.error
        FROM ledger.submission s LEFT JOIN ledger.task t USING (key)
        WHERE s.ends IN ('succeeded', 'quarantined') AND t.state IS DISTINCT FROM s.ends
           OR s.ends = 'uncertain' AND t.state <> 'succeeded'
    """,
    "tasks of submissions that a fault removed": """
        SELECT s.key, t.id FROM ledger.submission s JOIN ledger.task t USING (key) WHERE s.ends = 'lost'
    """,
    "tasks that were not submitted": """
        SELECT t.id, t.key FROM ledger.task t LEFT JOIN ledger.submission s USING (key) WHERE s.key IS NULL
    """,
    "submissions with two tasks": """
        SELECT key, array_agg(id) AS ids FROM ledger.task GROUP BY key HAVING count(*) > 1
    """,
    "stages taking effect twice, or never": ledger.TWICE,
    "results of another task": """
        SELECT t.id, t.key, t.idempotency_key, f.step, f.name, x.task_id, x.step AS ran, x.key AS of, x.ended
        FROM ledger.effect f JOIN ledger.task t ON t.id = f.task_id LEFT JOIN ledger.execution x USING (name)
        WHERE (x.task_id, x.step, x.key, x.ended) IS DISTINCT FROM (f.task_id, f.step, t.key, 'well')
           OR t.key <> t.idempotency_key
    """,
}


async def load(
    connection: asyncpg.Connection, file: Path, waves: Iterable[tuple[str, int]], ends: Mapping[str, str]
) -> None:
    """Creates and fills the tables.

    Args:
        connection: of the deployment's database.
        file: of the executions.
        waves: key and wave of each submission.
        ends: by key, what must become of it unless it must succeed.
    """
    submissions = list(waves)
    await ledger.load(connection, file, submissions)
    await connection.execute(_TABLES)
    records = [(key, wave, ends.get(key, "succeeded")) for key, wave in submissions]
    await connection.copy_records_to_table("submission", schema_name="ledger", records=records)
    await connection.execute("ANALYZE ledger.submission")


async def violations(connection: asyncpg.Connection, gone_back: Collection[int]) -> dict[str, list[dict]]:
    """Returns the violations of each invariant.

    Args:
        connection: of the deployment's database.
        gone_back: waves in which the database went back. A task of them may be at an earlier
            attempt again, which a record of its own former life may end. Its stages still take
            effect once.
    """
    found = {
        name: [dict(row) for row in await connection.fetch(statement)]
        for name, statement in _INVARIANTS.items()
    }
    rows = await connection.fetch(
        "SELECT t.id FROM ledger.task t JOIN ledger.submission s USING (key) WHERE s.wave = ANY ($1::integer[])",
        list(gone_back),
    )
    excepted = {row["id"] for row in rows}
    stale = await connection.fetch(ledger.STALE)
    found["commits by a stale attempt"] = [dict(row) for row in stale if row["task_id"] not in excepted]
    return found
