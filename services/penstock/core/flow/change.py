"""Moves a flow to another version of its definition, as a part of a recovery.

A node that has begun and does not run again is carried. It must be the same in both versions:
otherwise its output would be one that the new version never made. Nodes that run again, and nodes
that have not begun, may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.flow.messages import Refuse
from penstock.core.flow.plan import Plan
from penstock.core.flow.state import UNSUCCESSFUL_NODES, FlowState, NodeState, NodeStatus

# States of nodes that have not begun.
_UNBEGUN = frozenset({NodeStatus.PENDING, NodeStatus.READY})
# States of nodes that no other node has read anything of.
_WITHOUT_OUTPUT = UNSUCCESSFUL_NODES | {NodeStatus.SKIPPED}
# The longest value that a difference shows.
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Change:
    """The rows of a flow in another version.

    Attributes:
        flow: its counters are those of the new version.
        nodes: the rows of the new version's nodes, by name.
        gone: nodes that the new version does not have.
        fresh: nodes that differ, so they start from their beginning instead of where they failed.
    """

    flow: FlowState
    nodes: Mapping[str, NodeState]
    gone: frozenset[str]
    fresh: frozenset[str]


def change(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    plan: Plan,
    flow: FlowState,
    nodes: Mapping[str, NodeState],
    chosen: Iterable[str],
) -> Change | Refuse:
    """Decides whether a flow fits another version, and what its rows are there.

    Args:
        old: the definition of the flow.
        new: the other version.
        plan: of the other version.
        flow: the flow's row.
        nodes: the rows of the old version's nodes, by name.
        chosen: nodes of the recovery; none are all that failed.
    """
    before, after = old["nodes"], new["nodes"]
    wanted = frozenset(chosen) or {
        name for name, node in nodes.items() if name in after and node.status in UNSUCCESSFUL_NODES
    }
    # A recovery refuses unknown nodes itself.
    known = frozenset(wanted) & after.keys()
    again = known | plan.descendants(known)
    changed = {name for name in after if name in before and before[name] != after[name]}
    gone = before.keys() - after.keys()
    # What was made behind a node that runs again is no longer wanted.
    behind = Plan.from_wire(old).descendants(known & before.keys())
    refused = sorted(
        name
        for name, node in nodes.items()
        if (name in changed - again and node.status not in _UNBEGUN)
        or (name in gone and not _may_go(node.status, is_behind=name in behind))
    )
    if refused:
        return Refuse("node_changed", tuple(refused))
    moved = {name: nodes[name] if name in before else NodeState() for name in after}
    for name in changed:
        if moved[name].status in _UNBEGUN:
            moved[name] = NodeState(generation=moved[name].generation)
    states = [node.status for node in moved.values()]
    counted = flow._replace(
        unfinished=sum(not node.is_final for node in moved.values()),
        live=states.count(NodeStatus.RUNNING),
        unsuccessful=sum(state in UNSUCCESSFUL_NODES for state in states),
    )
    return Change(counted, moved, frozenset(gone), frozenset(changed & again))


def _may_go(status: NodeStatus, *, is_behind: bool) -> bool:
    if status is NodeStatus.RUNNING:
        return False
    return is_behind or status in _UNBEGUN | _WITHOUT_OUTPUT


def differences(old: Mapping[str, Any], new: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """How nodes differ between two versions, for people: one text for each node."""
    return [_difference(name, old["nodes"][name], new["nodes"].get(name)) for name in names]


def _difference(name: str, before: Mapping[str, Any], after: Mapping[str, Any] | None) -> str:
    if after is None:
        return f"{name} is missing"
    fields = [
        f"{field} {_shown(before, field)} is {_shown(after, field)}"
        for field in [*before, *(field for field in after if field not in before)]
        if before.get(field) != after.get(field)
    ]
    return f"{name} differs ({'; '.join(fields)})"


def _shown(node: Mapping[str, Any], field: str) -> str:
    if field not in node:
        return "without a value"
    text = json.dumps(node[field], ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
