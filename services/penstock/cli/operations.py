"""The verbs about many tasks at once, and the audit of what was done by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import click

from penstock.cli.gateway import client, gateway_option, labels_of
from penstock.cli.numbers import Whole
from penstock.cli.output import (
    as_json,
    console,
    counts_text,
    fields,
    moment,
    print_json,
    progress,
    state_text,
    table,
)
from penstock.client import Operated, TaskFilter
from penstock.core.operations import Verb
from penstock.core.task import Priority, State
from penstock.errors import NotFound, PenstockError

_LATEST = 20

_PRIORITY = click.Choice([priority.name for priority in Priority], case_sensitive=False)
_MOMENT = click.DateTime(["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d"])
_DONE = {
    Verb.CANCEL: "cancelled",
    Verb.PAUSE: "paused",
    Verb.RESUME: "resumed",
    Verb.REPRIORITISE: "re-prioritised",
    Verb.RECOVER: "recovered",
}
# Of the figures of `why`.
_MOMENTS = ("since", "due_at")

_FILTERS = (
    click.argument("ids", metavar="[ID...]", type=Whole(1), nargs=-1),
    click.option("--type", "type_", help="Of this type."),
    click.option("--stage", help="In this stage, or ended in it."),
    click.option("--key", help="Of this key."),
    click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice([state.value for state in State]),
        help="Repeatable. Default: any in which it can be done.",
    ),
    click.option(
        "--label", "labels", multiple=True, metavar="NAME=VALUE", help="Repeatable; all must match."
    ),
    click.option("--priority", "priorities", multiple=True, type=_PRIORITY, help="Repeatable."),
    click.option("--created-since", type=_MOMENT, help="Created then or later."),
    click.option("--created-until", type=_MOMENT, help="Created before."),
    click.option("--finished-since", type=_MOMENT, help="Ended then or later."),
    click.option("--finished-until", type=_MOMENT, help="Ended before."),
    click.option("--error", help='A part of "kind: message" of its error, in any case of letters.'),
)
_HOW = (
    click.option(
        "--rate",
        type=click.FloatRange(min=0.001, max=1_000_000),
        help="Tasks a second. Default: as fast as it goes.",
    ),
    click.option("--dry-run", is_flag=True, help="Only count, and show some."),
    click.option("--by", help="Who asks, for the audit. Default: user@host."),
    gateway_option,
    as_json,
)


def _options(verb: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed((*_FILTERS, *_HOW)):
        verb = option(verb)
    return verb


@click.group()
def tasks() -> None:
    """Cancels, pauses, resumes, re-prioritises and recovers tasks: by id, or all that match; tells why one is waiting.

    What is asked for is written down and goes on by itself, whatever becomes of this terminal; `penstock audit` lists it,
    `penstock tasks stop` stops it.
    """


@tasks.command()
@_options
def cancel(**given: Any) -> None:
    """Cancels tasks that have not ended; status 4 if there are none."""
    _operate(Verb.CANCEL, given)


@tasks.command()
@_options
def pause(**given: Any) -> None:
    """Pauses tasks: at once, and those that run when their stage has ended; status 4 if there are none."""
    _operate(Verb.PAUSE, given)


@tasks.command()
@_options
def resume(**given: Any) -> None:
    """Puts paused tasks back where they were; status 4 if there are none."""
    _operate(Verb.RESUME, given)


@tasks.command()
@click.option("--to", "to", type=_PRIORITY, required=True, help="The new priority.")
@_options
def reprioritise(to: str, **given: Any) -> None:
    """Gives tasks another priority, from their next release on; status 4 if there are none."""
    _operate(Verb.REPRIORITISE, given, priority=to)


@tasks.command()
@_options
def recover(**given: Any) -> None:
    """Tries anew what has failed or is quarantined, in the stage where it did; status 4 if there are none."""
    _operate(Verb.RECOVER, given)


def _operate(verb: Verb, given: Mapping[str, Any], priority: str | None = None) -> None:
    which = TaskFilter(
        ids=given["ids"],
        type=given["type_"],
        stage=given["stage"],
        key=given["key"],
        states=given["states"],
        labels=labels_of(given["labels"]),
        priorities=given["priorities"],
        created_since=given["created_since"],
        created_until=given["created_until"],
        finished_since=given["finished_since"],
        finished_until=given["finished_until"],
        error=given["error"],
    )
    if not which.to_wire():
        raise click.UsageError("give ids, or a filter such as --type")
    dry_run, json_ = given["dry_run"], given["json_"]
    begun: list[str] = []
    with client(given["gateway"]) as found, progress(quiet=json_ or dry_run) as bar:
        task = bar.add_task(str(verb), total=None)
        try:
            told = found.operate(
                verb,
                which,
                priority=priority,
                rate=given["rate"],
                by=given["by"],
                dry_run=dry_run,
                progress=lambda count: bar.advance(task, count),
                begun=begun.append,
            )
        except (KeyboardInterrupt, PenstockError):
            if begun:
                click.echo(
                    f"operation {begun[0]} goes on; `penstock tasks stop {begun[0]}` stops it", err=True
                )
            raise
    if json_:
        print_json({"dry_run": dry_run, "verb": verb, **dataclasses.asdict(told)})
    else:
        _tell(verb, told)
    if told.error is not None:
        raise PenstockError(f"operation {told.id} failed: {told.error}")
    if not told.count:
        raise NotFound(f"no such task is there to be {_DONE[verb]}")


def _tell(verb: Verb, told: Operated) -> None:
    count = f"{told.count:,}" if told.complete else f"at least {told.count:,}"
    states = f" ({counts_text(told.found_in)})" if told.count else ""
    if told.id is None:
        click.echo(f"{count} tasks would be {_DONE[verb]}{states}")
        for task in told.examples:
            click.echo(f"  {task['id']} ({task['type']}, {task['stage']}, {task['state']})")
        return
    how = "" if told.state == "done" else f"; the operation is {told.state}"
    click.echo(f"{count} tasks {_DONE[verb]}{states}, operation {told.id}{how}")


@tasks.command()
@click.argument("operation_id", metavar="OPERATION")
@click.option("--by", help="Who asks, for the audit. Default: user@host.")
@gateway_option
@as_json
def stop(operation_id: str, by: str | None, gateway: str | None, json_: bool) -> None:
    """Stops what one of these verbs has begun; what it has done stays done."""
    with client(gateway) as found:
        told = found.stop_operation(operation_id, by)
    if json_:
        print_json(told)
    else:
        click.echo(f"operation {told['id']} is {told['state']}: {told['changed']:,} tasks changed")


@tasks.command()
@click.argument("task_id", metavar="ID", type=Whole(1))
@gateway_option
@as_json
def why(task_id: int, gateway: str | None, json_: bool) -> None:
    """Tells why a task is waiting, or what it does instead, and by which figures."""
    with client(gateway) as found:
        told = found.why(task_id)
    if json_:
        print_json(told)
        return
    click.echo(f"task {told['id']} ({told['type']}, {told['state']}): {told['sentence']}")
    fields(
        (name.replace("_", " "), moment(value) if name in _MOMENTS else str(value))
        for name, value in told["figures"].items()
    )


@click.command()
@click.option("--verb", type=click.Choice([verb.value for verb in Verb]), help="Only of this verb.")
@click.option(
    "--state", type=click.Choice(["running", "done", "stopped", "failed"]), help="Only in this state."
)
@click.option("--limit", type=Whole(1), default=_LATEST, show_default=True, help="Most operations.")
@click.option("--all", "all_", is_flag=True, help="No limit.")
@gateway_option
@as_json
def audit(
    verb: str | None, state: str | None, limit: int, all_: bool, gateway: str | None, json_: bool
) -> None:
    """Lists what was done to tasks by `penstock tasks`: who, when, to which, to how many; latest first."""
    with client(gateway) as found:
        known = found.operations(verb=verb, state=state, limit=None if all_ else limit)
        if json_:
            for one in known:
                print_json(one)
            return
        rows = [
            (
                one["id"],
                one["verb"] + (f" to {one['priority']}" if one["priority"] else ""),
                one["by"],
                moment(one["created_at"]),
                state_text(one["state"]),
                f"{one['changed']:,}",
                _shown(one["filter"]),
            )
            for one in known
        ]
    if rows:
        table(("id", "verb", "by", "asked", "state", "tasks", "filter"), rows)
    else:
        console().print("no operations")


def _shown(which: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in which.items())
    return text if len(text) <= 120 else f"{text[:120]} …"
