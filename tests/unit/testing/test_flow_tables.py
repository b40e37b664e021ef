"""The rows of flows in memory, as the statements of PostgreSQL read them."""

from __future__ import annotations

from typing import Any

from penstock.testing.flow_tables import FlowTables


def test_a_command_waits_for_an_earlier_recovery_of_its_flow() -> None:
    """F3: as `flows.take`, which leaves it in its place; no other row waits."""
    nothing: Any = None
    tables = FlowTables(nothing, nothing, nothing)
    for flow_id, kind in (
        (1, "cancel"),
        (1, "recover"),
        (1, "resume"),
        (2, "pause"),
        (1, "task"),
        (1, "pause"),
    ):
        tables.note(root_id=1, flow_id=flow_id, kind=kind)
    takes = [[(row["flow_id"], row["kind"]) for row in tables.take_inbox()] for _ in range(3)]
    assert takes == [
        [(1, "cancel"), (1, "recover"), (2, "pause"), (1, "task")],
        [(1, "resume"), (1, "pause")],
        [],
    ]
