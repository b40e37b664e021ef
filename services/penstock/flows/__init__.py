"""Flow definitions: a builder in Python, and `penstock.flows.validation` for files.

Definitions can be written, validated, drawn and simulated without a deployment. The service `flows`
advances the flows that `Client.submit_flow` starts.

    from penstock.flows import INPUTS, ITEM, Flow, TaskOf

    flow = Flow("nightly", version=1)
    flow.declare("day")
    files = flow.task("list_files", type="list-files", input={"day": INPUTS["day"]})
    load = TaskOf("load-file", input=ITEM)
    flow.map("load_all", after=[files], items=files.output["files"], each=load)
    definition = flow.definition()

The builder needs no package but Penstock's SDK. Validation needs `pip install 'penstock[flows]'`.
"""

from penstock.flows.builder import (
    INDEX,
    INPUTS,
    ITEM,
    Case,
    Cel,
    Flow,
    FlowOf,
    Node,
    Switch,
    TaskOf,
    cel,
)

__all__ = [
    "INDEX",
    "INPUTS",
    "ITEM",
    "Case",
    "Cel",
    "Flow",
    "FlowOf",
    "Node",
    "Switch",
    "TaskOf",
    "cel",
]
