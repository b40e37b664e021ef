"""Joins: the states of the edges behind an ended node, and the state that they give to a node.

Branches that a switch did not take are dead, and a dead edge never keeps a join waiting (dead-path
elimination). The result of a join depends on the states of its edges, and not on their order.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.flow.plan import Edge, NodePlan
from penstock.core.flow.state import EdgeState, NodeState, NodeStatus


def edge_state(source: NodeState, edge: Edge) -> EdgeState:
    """The state that an edge brings when its source, a final node, has ended."""
    if source.status is NodeStatus.SUCCEEDED:
        taken = edge.case is None or edge.case == source.case
        return EdgeState.SUCCEEDED if taken else EdgeState.DEAD
    return EdgeState.DEAD if source.status is NodeStatus.SKIPPED else EdgeState.FAILED


def evaluate(plan: NodePlan, edge_states: Mapping[int, EdgeState]) -> NodeStatus:
    """The next state of a pending node: `PENDING`, `READY`, `SKIPPED` or `BLOCKED`.

    Args:
        plan: the node.
        edge_states: states of the edges whose sources have ended, by position.
    """
    if not plan.edges:
        return NodeStatus.READY
    found = list(edge_states.values())
    failed = found.count(EdgeState.FAILED)
    counted = found.count(EdgeState.SUCCEEDED) + (failed if plan.join.failures_count else 0)
    if plan.join.k is not None and counted >= plan.join.k:
        return NodeStatus.READY
    if failed and plan.join.needs_all:
        return NodeStatus.BLOCKED
    if len(found) < len(plan.edges):
        return NodeStatus.PENDING
    if plan.join.k is None and counted:
        return NodeStatus.READY
    # A join of k that cannot be reached waits for its last edge: which edges failed would
    # otherwise depend on the order of the endings.
    return NodeStatus.BLOCKED if failed else NodeStatus.SKIPPED
