"""Recovery: a new generation that runs failed or chosen nodes and their descendants again.

Everything else is carried: nodes that succeeded, and nodes that are running in other branches. A
failed child flow, and the failed items of a map, are recovered in place, unless the node runs
again with other input because a node before it does.
"""

from __future__ import annotations

from penstock.core.flow.messages import Recovered, Refuse
from penstock.core.flow.plan import NodeKind
from penstock.core.flow.state import (
    UNSUCCESSFUL_NODES,
    FlowStatus,
    Items,
    NodeState,
    NodeStatus,
    StopReason,
)
from penstock.core.flow.working import Working

_ENDING = {StopReason.CANCEL: "cancelling", StopReason.TIMEOUT: "timing_out"}


def recover(working: Working, command: Recovered) -> None:
    """Applies a recovery, or refuses it by an action. Every node is loaded."""
    if command.generation != working.flow.generation + 1:
        # It has been applied already, or it is based on a generation that has ended.
        return
    chosen = command.nodes or frozenset(
        name for name, node in working.nodes.items() if node.status in UNSUCCESSFUL_NODES
    )
    refusal = _refusal(working, chosen)
    if refusal is not None:
        working.actions.append(refusal)
        return
    below = working.plan.descendants(chosen)
    for name in sorted(chosen | below):
        _reset(working, name, carries=name not in below | command.fresh)
    working.flow = working.flow._replace(generation=command.generation, status=FlowStatus.RUNNING, stop=None)
    working.set_flow_limits()
    for name, node in list(working.nodes.items()):
        if node.status is NodeStatus.PENDING:
            # An end before the recovery may not have been brought to its successors.
            working.nodes[name] = node._replace(edge_states={})
            for source in {edge.source for edge in working.plan.nodes[name].edges}:
                if working.nodes[source].is_final:
                    working.bring(source, name)
            working.evaluate_join(name)
        else:
            working.touch_map(name)


def _refusal(working: Working, chosen: frozenset[str]) -> Refuse | None:
    flow = working.flow
    running = flow.status is FlowStatus.RUNNING
    unknown = chosen - working.plan.nodes.keys()
    if unknown:
        return Refuse("unknown_node", tuple(sorted(unknown)))
    if running and flow.stop in _ENDING:
        return Refuse(_ENDING[flow.stop])
    if not chosen and (running or not flow.unfinished):
        return Refuse("nothing_to_recover")
    # A node that runs would run twice at once.
    live = [
        name
        for name in sorted(chosen | working.plan.descendants(chosen))
        if working.nodes[name].status is NodeStatus.RUNNING
    ]
    return Refuse("node_running", tuple(live)) if live else None


def _reset(working: Working, name: str, *, carries: bool) -> None:
    node, plan = working.nodes[name], working.plan.nodes[name]
    flow = working.flow
    working.flow = flow._replace(
        unfinished=flow.unfinished + node.is_final,
        unsuccessful=flow.unsuccessful - (node.status in UNSUCCESSFUL_NODES),
    )
    # A node that has been reset before, and has not started since, keeps what it carries.
    waiting = node.status in (NodeStatus.PENDING, NodeStatus.READY)
    failed = node.status in (NodeStatus.FAILED, NodeStatus.CANCELLED)
    items = _carried(node.items) if carries and (failed or waiting) else None
    working.nodes[name] = NodeState(
        generation=node.generation,
        recovers=carries and ((failed and plan.kind is NodeKind.FLOW) or (waiting and node.recovers)),
        items=items,
    )


def _carried(items: Items | None) -> Items | None:
    return items and items._replace(unsuccessful=0, retry=items.retry + items.unsuccessful, enough=False)
