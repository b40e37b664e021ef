"""Random flows as definitions and inputs, and the ends that a reference model expects."""

from __future__ import annotations

from penstock.core.flow.plan import NodeKind
from tests.support.flows import random_plan, random_world


def definition(name="f", version=1, **fields):
    """A definition; `nodes` by name."""
    return {"flow": name, "version": version, **fields}


# A child flow with one task, which ends as its input says.
LEAF = definition(
    "leaf", inputs={"end": {}}, nodes={"t": {"kind": "task", "type": "a", "input": "inputs.end"}}
)


def document_of(number, plan, world):
    """The plan as a definition; what the world says is in its inputs."""
    nodes = {}
    for name, node in plan.nodes.items():
        after = [f"{edge.source}.{edge.case}" if edge.case else edge.source for edge in node.edges]
        join = {"k": node.join.k} if node.join.k else "all_done" if node.join.failures_count else "all"
        common = {"kind": str(node.kind), "after": after, "join": join}
        child = {"kind": "flow", "flow": "leaf", "input": '{"end": item}'}
        each = child if node.recoverable_child else {"kind": "task", "type": "a", "input": "item"}
        match node.kind:
            case NodeKind.TASK:
                common |= {"type": "a", "input": f"inputs.ends.{name}"}
            case NodeKind.FLOW:
                common |= {"flow": "leaf", "input": '{"end": inputs.ends.' + name + "}"}
            case NodeKind.SWITCH:
                common |= {
                    "cases": [{"case": case, "when": f'inputs.cases.{name} == "{case}"'} for case in "xy"],
                    "else": "z",
                }
            case NodeKind.WAIT:
                common |= {"event": "e", "key": f'string(flow.id) + "{name}"'}
            case NodeKind.TIMER:
                common |= {"delay_s": 0}
            case NodeKind.MAP:
                common |= {"items": f"inputs.lists.{name}", "parallel": node.parallel, "each": each}
                common |= {"k": node.k} if node.k else {"tolerate": node.tolerate}
        nodes[name] = common
    failing = {name for (name, *rest) in world.ends if not rest}
    inputs = {
        "cases": {name: case for name, case in world.cases.items() if name not in failing},
        "lists": {
            name: [world.ends.get((name, index), "succeeded") for index in range(total)]
            for name, total in world.totals.items()
        },
        "ends": {name: world.ends.get((name,), "succeeded") for name in plan.nodes},
    }
    return (
        definition(
            f"random{number}",
            nodes=nodes,
            on_failure=str(plan.on_failure),
            inputs={"cases": {}, "lists": {}, "ends": {}},
        ),
        inputs,
    )


class Family:
    """A flow, its plan and its world."""

    def __init__(self, rng, number, policy):
        self.plan = random_plan(rng, policy)
        self.world = random_world(rng, self.plan)
        for name, node in self.plan.nodes.items():
            if node.kind in (NodeKind.WAIT, NodeKind.TIMER):
                self.world.ends.pop((name,), None)
        self.document, self.inputs = document_of(number, self.plan, self.world)
        self.id = 0

    def outcome(self, node, item, generation):
        key = (node, generation) if item is None else (node, item, generation)
        return str(self.world.outcome(*key))
