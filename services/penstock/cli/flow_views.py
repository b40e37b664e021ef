"""The verbs that show flows: list, get, items, watch and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.text import Text

from penstock.cli.flow_group import flows
from penstock.cli.gateway import client_options
from penstock.cli.options import label_option, list_options, states_option
from penstock.cli.output import (
    counts_text,
    fields,
    moment,
    print_document,
    print_list,
    progress,
    shorten,
    state_text,
    table,
)
from penstock.cli.param_types import Moment, Whole
from penstock.cli.task_views import error_text
from penstock.client import Flow, SyncClient
from penstock.core.flow.state import FINAL_NODES, FlowStatus, ShownStatus
from penstock.core.task import State

# The exit status when a watched flow did not succeed, as of `penstock watch`.
_NOT_SUCCEEDED = 1

flow_argument = click.argument("flow_id", metavar="ID", type=Whole(1))


@flows.command("list")
@click.option("--name", help="List only flows of this definition.")
@states_option("--status", ShownStatus, "List only flows in this state. The option is repeatable.")
@label_option("List only flows with this label. The option is repeatable; a flow must have all labels.")
@click.option("--since", type=Moment(), help="List only flows that were started then or later.")
@click.option("--idempotency-key", help="List only the flow with this idempotency key.")
@click.option(
    "--family", type=Whole(1), metavar="ID", help="List this root flow and all flows below it instead."
)
@click.option(
    "--schedule", help="List only flows of this schedule, with those of its backfills and of reruns."
)
@list_options("flows")
@client_options
def list_(client: SyncClient, json_: bool, limit: int | None, **options: Any) -> None:
    """Lists flows, newest first; child flows only with --family."""
    found = client.list_flows(
        name=options["name"],
        status=options["statuses"],
        labels=options["labels"],
        idempotency_key=options["idempotency_key"],
        since=options["since"],
        family=options["family"],
        schedule=options["schedule"],
        limit=limit,
    )
    print_list(
        found,
        ("id", "flow", "version", "state", "open", "live", "started", "ended", "labels", "error"),
        lambda flow: (
            str(flow.id),
            flow.name,
            str(flow.version),
            _status_text(flow),
            str(flow.raw["unfinished"]),
            str(flow.raw["live"]),
            moment(flow.raw["created_at"]),
            moment(flow.raw["finished_at"]),
            ", ".join(f"{name}={value}" for name, value in flow.labels.items()),
            (flow.error or "")[:80],
        ),
        "no flows",
        json_=json_,
        document=lambda flow: flow.raw,
    )


def _status_text(flow: Flow) -> Text:
    if flow.status is FlowStatus.RUNNING and flow.paused:
        return state_text("paused")
    if flow.status is FlowStatus.RUNNING and flow.raw["stop"] == "cancel":
        return Text("cancelling", style="yellow")
    return state_text(flow.status)


@flows.command()
@flow_argument
@click.option(
    "--depth",
    type=Whole(0),
    default=2,
    show_default=True,
    help="How many levels of child flows to show; 0 shows the flow alone.",
)
@client_options
def get(flow_id: int, depth: int, client: SyncClient, json_: bool) -> None:
    """Shows one flow: its state, inputs and output, and its nodes as a tree with their states.

    Child flows of maps are counted and not shown; `penstock flows items` lists them.
    """
    flow = client.get_flow(flow_id)
    if json_:
        print_document(flow.raw)
        return
    _print_flow(flow)
    click.echo()
    table(("node", "kind", "state", "items", "child", "started", "reason"), _tree(client, flow, depth))


def _print_flow(flow: Flow) -> None:
    raw = flow.raw
    pairs: list[tuple[str, str | Text]] = [
        ("flow", f"{flow.id} ({flow.name}, version {flow.version})"),
        ("state", _status_text(flow)),
        ("priority", flow.priority.name),
    ]
    if raw["parent"]:
        parent = raw["parent"]
        item = f", item {parent['item']}" if parent["item"] is not None else ""
        pairs.append(("parent", f"flow {parent['flow']}, node {parent['node']}{item}; root {raw['root_id']}"))
    pairs += [("recoveries", str(flow.generation))] if flow.generation else []
    pairs += [
        (name, shorten(json.dumps(raw[name], ensure_ascii=False)))
        for name in ("inputs", "output")
        if name in raw
    ]
    pairs += [("error", flow.error)] if flow.error else []
    pairs += [("labels", ", ".join(f"{k}={v}" for k, v in flow.labels.items()))] if flow.labels else []
    for name in ("idempotency_key", "rerun_of", "schedule"):
        pairs += [(name.replace("_", " "), str(raw[name]))] if raw[name] else []
    for name in ("tick", "created_at", "finished_at"):
        pairs += [(name.removesuffix("_at"), moment(raw[name]))] if raw[name] else []
    fields(pairs)


def _tree(client: SyncClient, flow: Flow, depth: int, level: int = 0) -> Iterator[list[str | Text]]:
    for node in flow.nodes:
        yield _row(node, level)
        if node["flow"] is not None and level < depth:
            yield from _tree(client, client.get_flow(node["flow"]["id"]), depth, level + 1)


def _row(node: Mapping[str, Any], level: int) -> list[str | Text]:
    items = node["items"]
    counts = ""
    if items is not None:
        counts = f"{items['succeeded'] + items['unsuccessful']:,} of {items['total']:,}"
        counts += f", {items['unsuccessful']:,} failed" if items["unsuccessful"] else ""
    child = ""
    if node["task"] is not None:
        child = f"task {node['task']['id']} ({node['task']['state']})"
    elif node["flow"] is not None:
        child = f"flow {node['flow']['id']}"
    case = f": {node['case']}" if node["case"] else ""
    return [
        "  " * level + node["name"],
        node["kind"] + case,
        state_text(node["status"]),
        counts,
        child,
        moment(node["started_at"]),
        (node["reason"] or "")[:120],
    ]


@flows.command()
@flow_argument
@click.argument("node")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(sorted({state.value for state in State})),
    help="List only tasks, or child flows, in this state. The option is repeatable.",
)
@list_options("items")
@client_options
def items(flow_id: int, node: str, client: SyncClient, json_: bool, **options: Any) -> None:
    """Lists the tasks or child flows of a node, by item and recovery."""
    print_list(
        client.flow_children(flow_id, node, state=options["states"], limit=options["limit"]),
        ("item", "recovery", "child", "state", "started", "ended", "error"),
        _child_row,
        f"node {node} has no such task or child flow",
        json_=json_,
    )


def _child_row(child: Mapping[str, Any]) -> list[str | Text]:
    task, flow = child["task"], child["flow"]
    shown = task or flow
    error = error_text(task["error"]) if task else flow["error"]
    return [
        "" if child["item"] is None else str(child["item"]),
        str(child["generation"] or ""),
        f"task {task['id']}" if task else f"flow {flow['id']}",
        state_text(task["state"] if task else flow["status"]),
        moment(shown["created_at"]),
        moment(shown["finished_at"]),
        (error or "")[:120],
    ]


@flows.command()
@flow_argument
@client_options
@click.pass_context
def watch(ctx: click.Context, /, flow_id: int, client: SyncClient, json_: bool) -> None:
    """Watches a flow until it has ended; the status is 1 unless it succeeds."""
    ctx.exit(watch_flow(client, flow_id, json_=json_))


def watch_flow(client: SyncClient, flow_id: int, *, generation: int = 0, json_: bool) -> int:
    """Watches a flow until it has ended in a generation, and returns the exit status."""
    flow: Flow | None = None
    with progress(quiet=json_) as bar:
        task = bar.add_task("", total=None)
        for flow in client.watch_flow(flow_id, generation=generation):
            if json_:
                print_document({"id": flow.id, "status": flow.status, "nodes": flow.counts})
            ended = sum(count for status, count in flow.counts.items() if status in FINAL_NODES)
            bar.update(task, total=len(flow.nodes), completed=ended, description=counts_text(flow.counts))
    assert flow is not None
    if not json_:
        click.echo(f"flow {flow.id} {flow.status}: {counts_text(flow.counts)}")
        if flow.error:
            click.echo(f"  {flow.error}")
    return 0 if flow.status is FlowStatus.SUCCEEDED else _NOT_SUCCEEDED


@flows.command()
@flow_argument
@client_options
def why(flow_id: int, client: SyncClient, json_: bool) -> None:
    """Explains why a flow has not ended, or why it failed: the path to what blocks it.

    If the path ends at a task, the line says why it waits, as `penstock tasks why` does.
    """
    answer = client.why_flow(flow_id)
    if json_:
        print_document(answer)
        return
    for level, step in enumerate(answer["path"]):
        click.echo(f"{'  ' * level}flow {step['flow']} ({step['name']}): {step['sentence']}")
