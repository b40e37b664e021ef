"""The verbs that draw flows, and that compare a run with another version of its definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from penstock.cli.flow_files import FILE, valid
from penstock.cli.flow_group import flows
from penstock.cli.flow_views import flow_argument
from penstock.cli.gateway import gateway_option, open_client
from penstock.cli.options import json_option
from penstock.cli.output import console, counted, print_answer, print_document, table
from penstock.cli.param_types import Whole
from penstock.cli.serving import extra
from penstock.client import Flow
from penstock.core.flow.plan import NodeKind, Plan
from penstock.core.flow.replay import Record, RecordedNode, compare
from penstock.core.flow.state import NodeStatus, StopReason
from penstock.errors import InvalidRecord, PenstockError

# The exit status of versions that decide differently, for CI.
_DIFFERENT = 1


@flows.command()
@click.argument("source", metavar="FILE|ID")
@click.option("--svg", "svg_", is_flag=True, help="Print an SVG picture instead of text.")
@gateway_option
@json_option
def graph(source: str, svg_: bool, gateway: str | None, json_: bool) -> None:
    """Draws a definition in a file, or a flow with the states of its nodes.

    As text: the nodes in an order of running, and what starts each. Nodes of one level do not
    depend on each other. A number is the id of a flow, unless a file has that name.
    """
    states: dict[str, str] | None = None
    if source.isdigit() and not Path(source).exists():
        with open_client(gateway) as client:
            flow = client.get_flow(int(source), definition=True)
        definition, states = _definition(flow), {node["name"]: _state(node) for node in flow.nodes}
    else:
        definition = valid(Path(str(FILE.convert(source, None, click.get_current_context()))))
    with extra("flows", "drawing flows"):
        # With the SDK alone the package of definitions cannot be imported whole.
        from penstock.flows.drawing import lines  # noqa: PLC0415
        from penstock.flows.svg import svg  # noqa: PLC0415
    if svg_:
        click.echo(svg(definition, states), nl=False)
        return
    rows = lines(definition)
    if json_:
        for level, name, runs, starts in rows:
            state = {} if states is None else {"state": states[name]}
            print_document({"level": int(level), "node": name, "runs": runs, "starts": starts, **state})
        return
    policy = definition.get("on_failure", "stop")
    console().print(f"flow {definition['flow']}, version {definition['version']}, on_failure {policy}")
    if states is None:
        table(("level", "node", "runs", "starts"), rows)
    else:
        shown = [(level, name, states[name], runs, starts) for level, name, runs, starts in rows]
        table(("level", "node", "state", "runs", "starts"), shown)


def _definition(flow: Flow) -> Mapping[str, Any]:
    definition: Mapping[str, Any] | None = flow.raw.get("definition")
    if definition is None:
        raise PenstockError(f"the gateway has no definition of flow {flow.id}")
    return definition


def _state(node: Mapping[str, Any]) -> str:
    items = node["items"]
    if items is None:
        return str(node["status"])
    return f"{node['status']}, {items['succeeded']:,} of {items['total']:,} items"


@flows.command()
@flow_argument
@click.option("--version", type=Whole(1), help="The uploaded version to compare with.")
@click.option("--file", type=FILE, help="A file with the definition to compare with, before its upload.")
@gateway_option
@json_option
def diff(flow_id: int, version: int | None, file: Path | None, gateway: str | None, json_: bool) -> None:
    """Replays a flow against another version; the status is 1 if it would decide differently.

    The ends of its nodes, its chosen cases and the ends of its items are applied to the other
    version in their recorded order. No task runs and no expression is evaluated. Child flows count
    as one node.
    """
    if (version is None) == (file is None):
        raise click.UsageError("give --version or --file")
    with open_client(gateway) as client:
        flow = client.get_flow(flow_id, definition=True)
        if version is not None:
            other: Mapping[str, Any] = client.flow_definition(flow.name, version)["definition"]
    if file is not None:
        other = valid(file)
        if other["flow"] != flow.name:
            raise InvalidRecord(
                f"{file} defines flow {other['flow']!r}, and flow {flow.id} is a run of {flow.name!r}"
            )
    plan = Plan.from_wire(_definition(flow))
    found = compare(plan, Plan.from_wire(other), record_of(flow))
    document = {
        "id": flow.id,
        "flow": flow.name,
        "version": flow.version,
        "other": other["version"],
        "equal": not found,
        "differences": [{**dataclasses.asdict(each), "sentence": each.sentence} for each in found],
    }
    equal = (
        f"version {other['version']} decides flow {flow.id} as version {flow.version} did: "
        f"{counted(len(plan.nodes), 'node')}"
    )
    print_answer(document, "\n".join(each.sentence for each in found) or equal, json_=json_)
    if found:
        click.get_current_context().exit(_DIFFERENT)


def record_of(flow: Flow) -> Record:
    """The messages of a flow, from the gateway's answer."""
    nodes = {}
    stopped_at: datetime | None = None
    for node in flow.nodes:
        if node["started_at"] is None:
            continue
        items = node["items"] or {}
        ended_at = datetime.fromisoformat(node["finished_at"]) if node["finished_at"] else None
        status = NodeStatus(node["status"])
        if status is NodeStatus.CANCELLED and ended_at is not None:
            stopped_at = min(stopped_at or ended_at, ended_at)
        nodes[node["name"]] = RecordedNode(
            kind=NodeKind(node["kind"]),
            status=status,
            ended_at=ended_at,
            timed_out=node["timed_out"] is not None,
            case=node["case"],
            total=items.get("total"),
            succeeded=items.get("succeeded", 0),
            unsuccessful=items.get("unsuccessful", 0),
        )
    stop = StopReason(flow.raw["stop"]) if flow.raw["stop"] else None
    return Record(nodes, stop, stopped_at)
