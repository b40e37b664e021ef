"""The verbs about flows; those of this module work without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from penstock.cli import flow_graphs, flow_operations, flow_submission, flow_views  # noqa: F401 (they add their verbs)
from penstock.cli.flow_durations import Measured, measure
from penstock.cli.flow_files import FILE, REFUSED, print_faults, valid, validated
from penstock.cli.flow_group import flows
from penstock.cli.gateway import gateway_option, open_client
from penstock.cli.options import json_option
from penstock.cli.output import console, counted, print_document, state_text, table
from penstock.core.flow.plan import Plan
from penstock.core.flow.simulation import Simulation, Span
from penstock.core.flow.simulation import simulate as run
from penstock.core.flow.state import FlowStatus

# The status of a bad outcome, as for every other verb.
_NOT_SUCCEEDED = 1


@flows.command()
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="NAME",
    help="A task type that exists. With this option, tasks of all other types are faults. The option is repeatable.",
)
@json_option
def validate(files: tuple[Path, ...], types: tuple[str, ...], json_: bool) -> None:
    """Validates definitions in YAML or JSON; prints every fault with its place.

    With several files, their child flows are looked up among them. With one file, child flows are
    not checked. The status is 3 if a definition is invalid.
    """
    found = validated(files, frozenset(types) if types else None)
    for file, (document, faults) in found.items():
        if json_ or faults:
            print_faults(file, faults, json_=json_)
        else:
            name = f"{document['flow']}, version {document['version']}"
            nodes = counted(len(document["nodes"]), "node")
            unchecked = _unchecked(document, types=bool(types), children=len(files) > 1)
            console().print(f"{file}: flow {name} is valid: {nodes}{unchecked}", markup=False)
    if any(faults for _, faults in found.values()):
        click.get_current_context().exit(REFUSED)


def _unchecked(document: Mapping[str, Any], *, types: bool, children: bool) -> str:
    """Names what `validate` could not look up; empty if it checked everything."""
    kinds = {each["kind"] for node in document["nodes"].values() for each in (node, node.get("each")) if each}
    left = []
    if not types and "task" in kinds:
        left.append("types of tasks")
    if not children and "flow" in kinds:
        left.append("child flows")
    return f"; not checked: {' and '.join(left)}" if left else ""


@flows.command()
@click.argument("file", type=FILE)
@click.option(
    "--assume",
    type=FILE,
    metavar="FILE",
    help="Durations, outcomes, cases and lengths of lists, in YAML or JSON. Default: each task takes a second and "
    "succeeds, each switch takes its else, and each list has one item.",
)
@click.option(
    "--from-history",
    "percentile",
    type=click.Choice(("p50", "p95")),
    help="Take the durations of tasks from their latest runs in a deployment, except those of nodes in --assume: the "
    "median, or the 95th percentile.",
)
@gateway_option
@json_option
def simulate(
    file: Path, assume: Path | None, percentile: str | None, gateway: str | None, json_: bool
) -> None:
    """Runs a definition on paper; prints when nodes start and end, the critical path and the slots.

    The run has as many slots as it needs, and evaluates no expression. A `*` marks the nodes that
    decide when the flow ends. The status is 1 if the flow does not succeed.
    """
    definition = valid(file)
    # With the SDK alone the package of assumptions cannot be imported.
    from penstock.flows.assumptions import read_assumptions, tasks_of  # noqa: PLC0415

    nodes = tasks_of(definition)
    measured: dict[str, Measured] = {}
    if percentile is not None:
        with open_client(gateway) as client:
            measured = measure(client, nodes, percentile)
    assumptions, faults = read_assumptions(
        assume.read_bytes() if assume else None,
        definition,
        {node: each.takes_s for node, each in measured.items()},
    )
    if assume is not None and faults:
        # Faults are printed where the result would be, as by `validate`.
        print_faults(assume, faults, json_=json_)
        click.get_current_context().exit(REFUSED)
    simulation = run(Plan.from_wire(definition), assumptions)
    if json_:
        history = {node: {"type": each.type, "count": each.count} for node, each in measured.items()}
        print_document(_document(simulation) | ({} if percentile is None else {"history": history}))
    else:
        _print_simulation(simulation)
        if percentile is not None:
            _print_history(percentile, measured, nodes)
    if simulation.status != FlowStatus.SUCCEEDED:
        click.get_current_context().exit(_NOT_SUCCEEDED)


def _print_history(
    percentile: str, measured: Mapping[str, Measured], nodes: Mapping[str, tuple[str, str | None]]
) -> None:
    """Names the types whose durations are real, and those that have none."""
    counts = {each.type: counted(each.count, "task") for each in measured.values()}
    if counts:
        text = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
        console().print(f"durations: {percentile} of {text}", markup=False)
    absent = sorted({name for node, (name, _) in nodes.items() if node not in measured})
    if absent:
        console().print(f"no task has succeeded lately: {', '.join(absent)}", markup=False)


def _document(simulation: Simulation) -> dict[str, Any]:
    nodes = [
        {"node": span.node, "state": span.status, "started_s": span.started_s, "ended_s": span.ended_s}
        for span in simulation.spans
    ]
    return {
        "state": simulation.status,
        "takes_s": simulation.takes_s,
        "nodes": nodes,
        "critical_path": simulation.critical_path,
        "slots": simulation.slots,
        "late": simulation.late,
    }


def _print_simulation(simulation: Simulation) -> None:
    rows: list[list[str | Text]] = []
    for span in simulation.spans:
        mark = "*" if span.node in simulation.critical_path else ""
        rows.append(
            [
                mark,
                span.node,
                state_text(span.status),
                _seconds(span.started_s),
                _seconds(span.ended_s),
                _bar(span, simulation.takes_s),
            ]
        )
    table(("", "node", "state", "start", "end", ""), rows)
    console().print(f"{simulation.status} after {_seconds(simulation.takes_s)}", markup=False)
    console().print(f"critical path: {' → '.join(simulation.critical_path)}", markup=False)
    console().print(
        f"slots: {counted(simulation.slots, 'task')} at the same time, without those of child flows"
    )
    for node in simulation.late:
        console().print(f"late: {node or 'the flow'} ran longer than warn_after_s", markup=False)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.10g} s"


# Characters of the longest bar.
_WIDTH = 40


def _bar(span: Span, takes_s: float) -> str:
    if span.started_s is None or span.ended_s is None:
        return ""
    before, end = (round(_WIDTH * at / takes_s) if takes_s else 0 for at in (span.started_s, span.ended_s))
    return " " * min(before, _WIDTH - 1) + "━" * max(end - before, 1)
