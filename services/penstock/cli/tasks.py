"""The verbs about single tasks: submit, get, list, cancel and watch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import click

from penstock.cli.gateway import client_options, gateway_option, open_client, without_empty
from penstock.cli.inputs import Lines, context_of, naming_options
from penstock.cli.names import TYPE_NAME
from penstock.cli.options import (
    PRIORITY,
    callback_option,
    events_option,
    json_option,
    label_option,
    list_options,
    states_option,
)
from penstock.cli.output import (
    counted,
    moment,
    print_answer,
    print_document,
    print_list,
    progress,
    state_text,
)
from penstock.cli.param_types import Moment, Whole
from penstock.cli.task_views import error_text, print_end, print_task, watch_tasks
from penstock.client import SubmissionsRefused, Submitted, SyncClient
from penstock.client.arguments import encode_moment
from penstock.client.chunks import ids_text
from penstock.core.task import State
from penstock.core.why import WaitReason
from penstock.errors import Invalid, NotFound, PenstockError

# Seconds that a submission waits for the reason why its task waits.
_WHY_S = 2.0


@click.command()
@click.argument("type_", metavar="TYPE", required=False, type=TYPE_NAME)
@click.option(
    "--context",
    metavar="VALUE",
    help="The context of the task. @FILE reads it from a file, and - from standard input.",
)
@click.option(
    "--content-type",
    type=click.Choice(["json", "text", "url", "bytes"]),
    default="json",
    show_default=True,
    help="The kind of the context's value.",
)
@click.option(
    "--file",
    "file",
    metavar="FILE",
    help="A file with many tasks, one JSON object a line; - is standard input.",
)
@click.option("--stage", help="The stage in which the task begins. Default: the first stage of the type.")
@click.option("--priority", type=PRIORITY, help="The order of release within the type. Default: MEDIUM.")
@click.option(
    "--key", help="The tenant or resource for which limits and fair queueing of the type count the task."
)
@click.option(
    "--idempotency-key",
    help="A text that identifies the submission: submitting it again returns the first task.",
)
@click.option(
    "--run-at",
    type=Moment(ahead=True),
    help="The earliest moment at which the task is released, such as 2026-12-01T06:00:00Z, or 10m for ten "
    "minutes from now. Without an offset it is local time.",
)
@callback_option("A target that is called when the task ends.")
@click.option("--no-callbacks", is_flag=True, help="Call no target, not even the targets of the type.")
@events_option("The transitions that are published. Default: those of the type.")
@label_option("A label of the task. The option is repeatable.")
@click.option(
    "--watch",
    "watch_",
    is_flag=True,
    help="Wait until all submitted tasks have ended. The status is 1 unless all succeed. Shows the result "
    "of a single task.",
)
@gateway_option
@json_option
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    type_: str | None,
    context: str | None,
    content_type: str,
    file: str | None,
    watch_: bool,
    gateway: str | None,
    json_: bool,
    **options: Any,
) -> None:
    """Submits one task, or with --file many tasks.

    Each line of the file is an object such as {"type": "media", "context": {"file": "a.mp4"},
    "priority": "HIGH"}. The other options are defaults for the fields that a line does not have.
    """
    if not type_ and file is None:
        raise click.UsageError("give a TYPE, or --file with many tasks")
    if file is not None and (options["idempotency_key"] or context):
        raise click.UsageError(
            "--idempotency-key and --context are for one task; put them into the lines of --file"
        )
    if options["callbacks"] and options["no_callbacks"]:
        raise click.UsageError("give --callback or --no-callbacks, but not both")
    if options.pop("no_callbacks"):
        options["callbacks"] = []
    if options["run_at"] is not None:
        options["run_at"] = encode_moment(options["run_at"], "run_at")
    # Every other option has the name of its field in the submission.
    wire = without_empty(type=type_, **options)
    if context is not None:
        wire |= {"content_type": content_type, "context": context_of(context, content_type)}
    with open_client(gateway) as client:
        lines = Lines(file, wire) if file is not None else None
        submitted = _submit_many(client, lines, quiet=json_) if lines else [_submit_one(client, wire)]
        _print_submitted(submitted, single=lines is None, json_=json_)
        if lines is None and not json_:
            warn_unserved(gateway, submitted[0].id)
        if watch_:
            status = watch_tasks(client, [task.id for task in submitted], json_=json_)
            if lines is None:
                print_end(client.get(submitted[0].id), json_=json_)
            ctx.exit(status)


def _submit_one(client: SyncClient, wire: Mapping[str, Any]) -> Submitted:
    with naming_options(below="/0"):
        [submitted] = client.submit_many([wire])
    return submitted


def warn_unserved(gateway: str | None, task_id: int) -> None:
    """Tells on standard error that no worker is there for a new task; silent without an answer."""
    with suppress(PenstockError), open_client(gateway, patience_s=0, timeout_s=_WHY_S) as client:
        why = client.why(task_id)
        if why["reason"] in (WaitReason.NO_WORKER, WaitReason.NO_HANDLER):
            click.echo(f"warning: {why['sentence']}", err=True)


def _submit_many(client: SyncClient, lines: Lines, *, quiet: bool) -> Sequence[Submitted]:
    with progress(quiet=quiet) as bar:
        task = bar.add_task("submitting", total=len(lines))
        try:
            return client.submit_many(lines, progress=lambda count: bar.advance(task, count))
        except SubmissionsRefused as error:
            click.echo(
                f"{sum(found is not None for found in error.submitted):,} of {counted(len(lines), 'task')} submitted",
                err=True,
            )
            raise lines.located(error) from error
        except Invalid as error:
            raise lines.located(error) from error


def _print_submitted(submitted: Sequence[Submitted], *, single: bool, json_: bool) -> None:
    if json_:
        for task in submitted:
            print_document({"id": task.id, "created": task.created})
    elif single:
        [task] = submitted
        existed = "existed already, with the same idempotency key; its first context stays"
        click.echo(f"task {task.id} {'submitted' if task.created else existed}")
    else:
        created = sum(task.created for task in submitted)
        ids = f": ids {submitted[0].id} to {submitted[-1].id}" if submitted else ""
        click.echo(f"{counted(created, 'task')} submitted, {len(submitted) - created:,} existed already{ids}")


@click.command()
@click.argument("task_id", type=Whole(1))
@client_options
def get(task_id: int, client: SyncClient, json_: bool) -> None:
    """Shows one task with its context, result, stages and callbacks."""
    task = client.get(task_id)
    if json_:
        print_document(task.raw)
    else:
        print_task(task)


@click.command("list")
@click.option("--type", "type_", type=TYPE_NAME, help="List only tasks of this type.")
@states_option("--state", State, "List only tasks in this state. The option is repeatable.")
@click.option("--stage", help="List only tasks in this stage.")
@click.option("--key", help="List only tasks with this concurrency key (a tenant or resource).")
@label_option("List only tasks with this label. The option is repeatable; a task must have all labels.")
@click.option("--idempotency-key", help="List only the tasks with this idempotency key.")
@click.option("--since", type=Moment(), help="List only tasks that were created then or later.")
@click.option(
    "--error",
    is_flag=False,
    flag_value="",
    metavar="[TEXT]",
    help='List only tasks with an error; with TEXT, only those whose error "kind: message" has it.',
)
@click.option("--flow", type=Whole(1), metavar="ID", help="List only tasks of this flow.")
@list_options("tasks")
@client_options
def list_(client: SyncClient, json_: bool, limit: int | None, **options: Any) -> None:
    """Lists tasks, newest first."""
    if (name := options["type_"]) and all(known["name"] != name for known in client.types()):
        raise NotFound(f"there is no task type {name!r}")
    tasks = client.list(
        **_filters(options),
        flow=options["flow"],
        since=options["since"],
        error=options["error"],
        limit=limit,
    )
    print_list(
        tasks,
        ("id", "type", "state", "stage", "attempt", "priority", "created", "labels", "error"),
        lambda task: (
            str(task.id),
            task.type,
            state_text(task.state),
            task.stage,
            str(task.attempt),
            task.priority.name,
            moment(task.raw["created_at"]),
            ", ".join(f"{k}={v}" for k, v in task.labels.items()),
            error_text(task.error)[:80],
        ),
        "no tasks",
        json_=json_,
        document=lambda task: task.raw,
    )


def _filters(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": options.get("type_"),
        "state": options.get("states") or (),
        "stage": options.get("stage"),
        "key": options.get("key"),
        "labels": options.get("labels"),
        "idempotency_key": options.get("idempotency_key"),
    }


@click.command()
@click.argument("ids", metavar="ID...", type=Whole(1), nargs=-1, required=True)
@client_options
def cancel(ids: tuple[int, ...], client: SyncClient, json_: bool) -> None:
    """Cancels the tasks that have not ended; the status is 4 if an id is unknown."""
    outcome = client.cancel(ids)
    ended = len(outcome.unchanged)
    text = f"{len(outcome.cancelled):,} cancelled" + (f", {ended:,} had ended" if ended else "")
    print_answer(dataclasses.asdict(outcome), text, json_=json_)
    if outcome.unknown:
        raise NotFound(f"there is no task {ids_text(outcome.unknown)}")


@click.command()
@click.argument("ids", metavar="[ID...]", type=Whole(1), nargs=-1)
@click.option("--type", "type_", type=TYPE_NAME, help="Instead of ids: the tasks of this type.")
@states_option(
    "--state", State, "Instead of ids: the tasks that are in this state now. The option is repeatable."
)
@click.option("--stage", help="Instead of ids: the tasks that are in this stage now.")
@click.option("--key", help="Instead of ids: the tasks with this concurrency key.")
@label_option(
    "Instead of ids: the tasks with this label. The option is repeatable; a task must have all labels."
)
@gateway_option
@json_option
@click.pass_context
def watch(
    ctx: click.Context, /, ids: tuple[int, ...], gateway: str | None, json_: bool, **options: Any
) -> None:
    """Watches tasks until all have ended; the status is 1 unless all succeed.

    Shows the progress of running tasks whose handlers report it.

    With filters instead of ids the command watches the tasks that match when it starts.
    """
    if ids and any(options.values()):
        raise click.UsageError("give ids or filters, but not both")
    if not ids and not any(options.values()):
        raise click.UsageError("give the ids of the tasks, or a filter such as --type")
    with open_client(gateway) as client:
        watched = list(ids) if ids else [task.id for task in client.list(**_filters(options))]
        ctx.exit(watch_tasks(client, watched, json_=json_))
