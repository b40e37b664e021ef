"""The plans of the statements of flows: each reads the rows that it names, and no other."""

from __future__ import annotations

import orjson
import pytest

from penstock.postgres.connection import GENERIC_PLANS, connect
from penstock.postgres.queries import load

# Tables that grow with the flows of a deployment.
GROWING = {
    *("flow", "flow_node", "flow_node_history", "flow_inbox", "flow_limit", "flow_wait", "flow_event"),
    *("task", "flow_history", "flow_definition"),
}


def scans(plan):
    """Every scan below a node of a plan; that of a bitmap is the one of its index.

    A branch with a one-time filter is for a statement without keys.
    """
    if "One-Time Filter" in plan:
        return
    if plan["Node Type"].endswith("Scan") and plan["Node Type"] != "Bitmap Heap Scan":
        yield plan
    for child in plan.get("Plans", ()):
        yield from scans(child)


@pytest.fixture
async def session(database):
    connection = await connect(database, "test", generic_plans=True)
    yield connection
    await connection.close()


@pytest.mark.parametrize(
    "name",
    [
        *(f"{file}.{name}" for file in ("flows", "flow_events", "flow_commands") for name in load(file)),
        *("flow_views.get", "ends.unfinished"),
    ],
)
async def test_a_statement_reads_no_row_that_it_does_not_name(session, name):
    """F2: no statement of flows scans a table that grows, whichever rows it is given."""
    assert GENERIC_PLANS == {"plan_cache_mode": "force_generic_plan"}
    file, _, short = name.partition(".")
    statement = load(file)[short].text
    await session.execute(f"PREPARE one AS {statement}")
    count = await session.fetchval(
        "SELECT cardinality(parameter_types) FROM pg_prepared_statements WHERE name = 'one'"
    )
    values = f"({', '.join(['NULL'] * count)})" if count else ""
    plan = orjson.loads(await session.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE one{values}"))
    found = [
        scan
        for scan in scans(plan[0]["Plan"])
        if scan.get("Relation Name") in GROWING and not {"Index Cond", "TID Cond"} & scan.keys()
    ]
    assert found == []
