"""The plans of all statements: none reads all of a table that grows, whichever rows it is given.

Sessions hash their joins (`connection.SESSION_SETTINGS`), so a statement names the rows of each of
its tables, or looks them up in a subquery that is no join.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest

from penstock.postgres.connection import GENERIC_PLANS, connect
from penstock.postgres.queries import load

QUERIES = Path(__file__).parents[3] / "schemas" / "postgres" / "queries"
# Tables that grow with the tasks and flows of a deployment.
GROWING = (
    *("task", "attempt", "callback", "history", "task_progress"),
    *("flow", "flow_node", "flow_node_history", "flow_inbox", "flow_limit", "flow_wait", "flow_event"),
    *("flow_history", "flow_definition", "log_segment", "log_deletion", "schedule_skip"),
)
# Statements of services on the way of a task or of a flow. They are also planned for tables without
# rows: the statistics of a queue are those of another time.
ON_THE_WAY = {
    *("advance", "callbacks", "ends", "flow_commands", "flow_events", "flows", "history", "leases"),
    *("limits", "lost_attempts", "outbox", "progress", "release", "schedules", "tasks"),
}
# Statements that read more, and why.
ALLOWED = {
    "checks.ahead": "a check: due callbacks, without an index of these times",
    "checks.mend_callbacks": "a repair: as `checks.ahead`",
    "checks.mend_tasks": "a repair: each task may be ahead",
    "checks.unanswered": "a check: callbacks in flight",
    "checks.unwatched": "a check: running tasks, which workers bound",
    "flow_checks.leftovers": "a check: the inbox, which owners empty",
    "flow_checks.miscounted": "a check: the definitions, which releases bound",
    "flow_checks.recount": "a repair: the definitions",
    "flow_checks.stalled": "a check: the inbox, which owners empty",
    "flow_checks.unapplied": "a check: the inbox",
    "flow_checks.unmatched": "a check: all waits for events",
    "flow_definitions.names": "a list by pages",
    "history.delete_events": "the inbox, which owners empty",
    "limits.track": "once, when a type gets limits: running tasks",
    "schedules.cancel_running": "running flows of schedules, by their own index once it has statistics",
    "schedules.claim_queued": "as `schedules.cancel_running`",
    "task_logs.forget_deletions": "logs that users deleted",
}
# No statements to prepare.
COMMANDS = {"backlog.lock_recount", "migrations.drop_index", "migrations.prepare"}
VALUES = {
    **dict.fromkeys(("bigint", "integer", "smallint", "double precision"), "1"),
    "text": "'x'",
    "boolean": "false",
    "timestamp with time zone": "now()",
    "bytea": "''",
    "json": "'{}'",
    "jsonb": "'{}'",
    "ARRAY": "'{}'",
}


@pytest.fixture
async def session(database: str) -> Any:
    connection = await connect(database, "test", generic_plans=True)
    yield connection
    await connection.close()


async def grow(session: asyncpg.Connection[Any]) -> None:
    """Gives each of the tables a row, and the statistics of ten million."""
    await session.execute("SET session_replication_role = replica")
    await session.execute("SELECT history_open(current_date)")
    for table in GROWING:
        checks = await session.fetch(
            "SELECT conname FROM pg_constraint WHERE conrelid = $1::text::regclass AND contype = 'c'", table
        )
        for (name,) in checks:
            await session.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"')
        columns = await session.fetch(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = 'penstock'"
            " AND table_name = $1 AND is_nullable = 'NO' AND is_identity = 'NO' AND is_generated = 'NEVER'"
            " AND column_default IS NULL",
            table,
        )
        await session.execute(
            f"INSERT INTO {table} ({', '.join(name for name, _ in columns)})"
            f" VALUES ({', '.join(VALUES[kind] for _, kind in columns)})"
        )
    await session.execute(
        "WITH grown AS (SELECT t FROM unnest($1::text[]::regclass[]) AS i (t)"
        " UNION SELECT inhrelid FROM pg_inherits WHERE inhparent = ANY ($1::text[]::regclass[]))"
        " UPDATE pg_class SET reltuples = 1e7, relpages = 1 WHERE oid IN (SELECT t FROM grown)"
        " OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid IN (SELECT t FROM grown))",
        list(GROWING),
    )


def whole_scans(
    plan: Mapping[str, Any], tables: Mapping[str, str], *, limited: bool = False
) -> Iterator[str]:
    """The growing tables of which a plan reads more than the rows that keys name.

    Args:
        plan: a node.
        tables: by relation, and by index.
        limited: a node above takes only the first rows of this one.
    """
    kind, filter_ = plan["Node Type"], plan.get("One-Time Filter", "")
    if filter_ and "InitPlan" not in filter_:
        return  # a branch for a statement without keys
    if kind in ("Sort", "Hash", "Aggregate", "WindowAgg", "ModifyTable") or "Subplan Name" in plan:
        limited = False
    limited = limited or kind == "Limit"
    if kind.endswith("Scan") and kind != "Bitmap Heap Scan" and not {"Index Cond", "TID Cond"} & plan.keys():
        relation = plan.get("Relation Name", plan.get("Index Name", ""))
        if relation in tables and not limited:
            yield tables[relation]
    for child in plan.get("Plans", ()):
        yield from whole_scans(child, tables, limited=limited)


async def growing(session: asyncpg.Connection[Any]) -> dict[str, str]:
    """The growing table of each of their partitions and indexes, by name."""
    rows = await session.fetch(
        "WITH grown AS (SELECT t, t AS part FROM unnest($1::text[]::regclass[]) AS i (t)"
        " UNION SELECT inhparent, inhrelid FROM pg_inherits WHERE inhparent = ANY ($1::text[]::regclass[]))"
        " SELECT c.relname, t.relname FROM grown g JOIN pg_class t ON t.oid = g.t JOIN pg_class c ON c.oid = g.part"
        " OR c.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = g.part)",
        list(GROWING),
    )
    return dict(rows)


async def scanning(session: asyncpg.Connection[Any], files: set[str]) -> dict[str, list[str]]:
    """The statements that read all of growing tables, with these."""
    found, growing_tables = {}, await growing(session)
    for file in sorted(files):
        for short, statement in load(file).items():
            if (name := f"{file}.{short}") in COMMANDS:
                continue
            await session.execute(f"PREPARE one AS {statement.text}")
            count = await session.fetchval(
                "SELECT cardinality(parameter_types) FROM pg_prepared_statements WHERE name = 'one'"
            )
            values = f"({', '.join(['NULL'] * count)})" if count else ""
            plan = orjson.loads(await session.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE one{values}"))
            await session.execute("DEALLOCATE one")
            if tables := list(whole_scans(plan[0]["Plan"], growing_tables)):
                found[name] = tables
    return found


async def test_no_statement_reads_a_whole_table(session):
    """Growth: with ten million rows in each table, each statement reads those that it names."""
    assert GENERIC_PLANS == {"plan_cache_mode": "force_generic_plan"}
    await grow(session)
    found = await scanning(session, {path.stem for path in QUERIES.glob("*.sql")})
    assert found.keys() == ALLOWED.keys(), found


async def test_no_statement_on_the_way_relies_on_statistics(session):
    """F2: a statement that is planned while its tables are empty names its rows, too."""
    found = await scanning(session, ON_THE_WAY)
    assert found.keys() <= ALLOWED.keys(), found


@pytest.mark.parametrize(
    "statement",
    [
        (
            "SELECT FROM unnest('{x}'::text[]) AS i (type)"
            " WHERE EXISTS (SELECT FROM task t WHERE t.type = i.type AND t.state = 'ready')"
        ),
        "SELECT 1 WHERE EXISTS (SELECT FROM task_type) AND EXISTS (SELECT FROM task WHERE stage = 'x') LIMIT 1",
        "SELECT id FROM task WHERE state = 'queued' ORDER BY context LIMIT 1",
    ],
)
async def test_a_statement_that_reads_all_is_found(session, statement):
    """The test sees a join that a session hashes, a condition without a key, and a sort."""
    await grow(session)
    plan = await session.fetchval(f"EXPLAIN (FORMAT JSON) {statement}")
    assert list(whole_scans(orjson.loads(plan)[0]["Plan"], await growing(session))) == ["task"]
