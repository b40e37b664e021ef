"""Each statement by which flows are advanced has an answer in memory."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.query_rights import all_queries

import penstock
from penstock.postgres.queries import query
from penstock.testing.database import Connection
from penstock.testing.gateway_statements import GatewayStatements
from penstock.testing.owner_statements import OwnerStatements
from penstock.testing.task_statements import TaskStatements

PACKAGE = Path(penstock.__file__).parent
# The modules that a pipeline runs. The loops of the service, which take rows of shards and start
# flows by schedules, are not among them.
MODULES = (
    *("flow_owner/batch.py", "flow_owner/definitions.py", "flow_owner/ending.py", "flow_owner/rounds.py"),
    *("flow_owner/starting.py", "postgres/flow_writes.py"),
)
# A recovery in memory has no version.
OF_OTHER_VERSIONS = {"flows.write_version"}


def test_every_statement_has_an_answer() -> None:
    """A statement without one would fail the flows of all tests that reach it."""
    connection = Connection(
        *(object.__new__(kind) for kind in (GatewayStatements, OwnerStatements, TaskStatements))
    )
    answered = {name for name, _answer in connection._answers.values()}
    used = {
        name
        for module in MODULES
        for name in re.findall(r'"(\w+\.\w+)"', (PACKAGE / module).read_text())
        if name in all_queries()
    }
    used |= {"flows.item_results", "flows.item_outputs", "flows.lock", "flows.nodes", "tasks.cancel"}
    assert len(used) > 25
    assert used - answered == OF_OTHER_VERSIONS
    assert all(query(name) for name in answered)
