"""The verbs that steer flows, by id or by filter: pause, resume, cancel, recover and rerun."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.confirmation import yes_option
from penstock.cli.flow_group import flows
from penstock.cli.flow_views import watch_flow
from penstock.cli.gateway import PATIENCE_S, gateway_option, open_client
from penstock.cli.options import by_option, json_option, label_option, rate_option, states_option, together
from penstock.cli.output import print_answer
from penstock.cli.param_types import Moment, Whole
from penstock.cli.running_operation import Operation, filter_of
from penstock.client import FlowFilter, SyncClient
from penstock.core.flow.operations import FlowVerb
from penstock.core.flow.state import FlowStatus

# Seconds between two looks at a flow that is being recovered.
_POLL_S = 0.05

_PARTICIPLES = {
    FlowVerb.PAUSE: "paused",
    FlowVerb.RESUME: "resumed",
    FlowVerb.CANCEL: "cancelled",
    FlowVerb.RECOVER: "recovered",
    FlowVerb.RERUN: "rerun",
}

_options = together(
    click.argument("ids", metavar="[ID...]", type=Whole(1), nargs=-1),
    click.option("--name", help="Only flows of this definition."),
    click.option("--of-version", "of_version", type=Whole(1), help="Only flows of this version."),
    states_option(
        "--status",
        FlowStatus,
        "Only flows in this state. The option is repeatable. Default: every state in which the verb applies.",
    ),
    label_option("Only flows with this label. The option is repeatable; a flow must have all labels."),
    click.option("--created-since", type=Moment(), help="Only flows that were started then or later."),
    click.option("--created-until", type=Moment(), help="Only flows that were started before."),
    click.option("--finished-since", type=Moment(), help="Only flows that ended then or later."),
    click.option("--finished-until", type=Moment(), help="Only flows that ended before."),
    click.option("--error", help="Only flows whose error has this text, in upper or lower case."),
    click.option(
        "--schedule", help="Only flows of this schedule, with those of its backfills and of reruns."
    ),
    rate_option("With a filter: the most flows a second. Default: no limit."),
    click.option("--dry-run", is_flag=True, help="Show what would change, but change nothing."),
    yes_option,
    by_option,
    gateway_option,
    json_option,
)


@flows.command()
@_options
def pause(**options: Any) -> None:
    """Pauses flows: nothing new starts in them, and what runs goes on to its end.

    With one id the verb pauses that flow. With several ids or a filter it is an operation, as those
    of `penstock tasks`: `penstock audit` lists it, and `penstock tasks stop` stops it. The status
    is 4 if no flow matches.
    """
    _run(FlowVerb.PAUSE, options)


@flows.command()
@_options
def resume(**options: Any) -> None:
    """Resumes paused flows; ids and filters as of `penstock flows pause`."""
    _run(FlowVerb.RESUME, options)


@flows.command()
@_options
def cancel(**options: Any) -> None:
    """Cancels flows with all their tasks and child flows; ids and filters as of `pause`."""
    _run(FlowVerb.CANCEL, options)


class _Version(click.ParamType):
    """`same`, `latest` or a number."""

    name = "same|latest|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in ("same", "latest"):
            return str(value)
        return Whole(1).convert(value, param, ctx)


_watch_option = click.option(
    "--watch", "watch_", is_flag=True, help="With one id: wait until the flow has ended, as `watch` does."
)


@flows.command()
@_watch_option
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    help="With one id: a node that runs again, with those behind it. The option is repeatable. Default: all nodes "
    "that failed.",
)
@click.option(
    "--version",
    type=_Version(),
    default="same",
    show_default=True,
    help="With one id: the version of the definition from then on, `same`, `latest` or a number. What is carried must "
    "be the same there.",
)
@_options
def recover(nodes: tuple[str, ...], version: int | str, watch_: bool, **options: Any) -> None:
    """Recovers flows: nodes that failed, or chosen ones, and those behind them run again.

    Everything else is carried. Ids and filters are those of `penstock flows pause`; a filter
    matches flows that failed or were cancelled.
    """
    _run(FlowVerb.RECOVER, options, nodes=nodes, version=version, watch=watch_)


@flows.command()
@click.option(
    "--version",
    type=_Version(),
    default="same",
    show_default=True,
    help="The version of the definition: `same`, `latest`, or with one id a number.",
)
@_watch_option
@_options
def rerun(version: int | str, watch_: bool, **options: Any) -> None:
    """Starts flows anew with the same inputs; ids and filters as of `penstock flows pause`."""
    _run(FlowVerb.RERUN, options, version=version, watch=watch_)


def _run(verb: FlowVerb, options: Mapping[str, Any], **more: Any) -> None:
    which = filter_of(FlowFilter, options, version=options["of_version"])
    wire = which.to_wire()
    if not wire:
        raise click.UsageError("give ids, or a filter such as --name")
    single = len(which.ids) == 1 and list(wire) == ["ids"] and options["rate"] is None
    if single and (verb is FlowVerb.RECOVER or not options["dry_run"]):
        _command(verb, which.ids[0], options, **more)
        return
    if more.get("nodes") or more.get("watch"):
        raise click.UsageError("--node and --watch need one id, without a filter")
    version = more.get("version")
    if isinstance(version, int) or (verb is FlowVerb.RECOVER and version != "same"):
        raise click.UsageError("such a --version needs one id, without a filter")
    done = _PARTICIPLES[verb]
    Operation(
        verb,
        done,
        "started again" if verb is FlowVerb.RERUN else f"to be {done}",
        "flow",
        lambda client, **more: client.operate_flows(
            verb, which, version=version if verb is FlowVerb.RERUN else None, **more
        ),
        lambda flow: f"{flow['id']} ({flow['name']}, version {flow['version']}, {flow['status']})",
        f"no flow matches that can be {done}; `penstock flows list` lists flows",
    ).run(options)


def _command(verb: FlowVerb, flow_id: int, options: Mapping[str, Any], **more: Any) -> None:
    json_, dry_run = options["json_"], options["dry_run"]
    with open_client(options["gateway"]) as client:
        if verb is FlowVerb.RERUN:
            started = client.rerun_flow(flow_id, version=more["version"])
            watched, generation = started.id, 0
            answer: Mapping[str, Any] = {"id": started.id, "rerun_of": flow_id}
            text = f"flow {started.id} started: it repeats flow {flow_id}"
        elif verb is FlowVerb.RECOVER:
            answer = client.recover_flow(flow_id, more["nodes"], version=more["version"], dry_run=dry_run)
            watched, generation = flow_id, answer["generation"]
            nodes = ", ".join(answer["nodes"])
            text = f"flow {flow_id}: {nodes} {'would run' if dry_run else 'run' + 's' * (len(answer['nodes']) == 1)} again"
            if more["version"] != "same":
                text += f" in version {answer['version']}"
            if not dry_run and not _is_applied(client, flow_id, generation):
                text += "; the service `flows` has not applied it yet"
        else:
            answer = getattr(client, f"{verb}_flow")(flow_id)
            done = (
                f"is being {_PARTICIPLES[verb]}" if answer["accepted"] else f"was {_PARTICIPLES[verb]} before"
            )
            text = f"flow {flow_id} {done}"
        print_answer(answer, text, json_=json_)
        if more.get("watch") and not dry_run:
            status = watch_flow(client, watched, generation=generation, json_=json_)
            click.get_current_context().exit(status)


def _is_applied(client: SyncClient, flow_id: int, generation: int) -> bool:
    """Waits a moment for a recovery, so that a `watch` after it does not see the end before."""
    deadline_s = time.monotonic() + PATIENCE_S
    while client.get_flow(flow_id).generation < generation:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
