"""The verbs `penstock tasks`, which change many tasks at once, and their audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.confirmation import yes_option
from penstock.cli.gateway import client_options, gateway_option, open_client
from penstock.cli.groups import Group
from penstock.cli.names import TYPE_NAME
from penstock.cli.options import (
    PRIORITY,
    by_option,
    json_option,
    label_option,
    list_options,
    rate_option,
    states_option,
    together,
)
from penstock.cli.output import (
    fields,
    moment,
    print_answer,
    print_document,
    print_list,
    state_text,
)
from penstock.cli.param_types import Moment, Whole
from penstock.cli.running_operation import Operation, filter_of
from penstock.cli.task_views import print_end, print_failure, watch_tasks
from penstock.cli.tasks import list_, warn_unserved
from penstock.client import SyncClient, TaskFilter
from penstock.core.flow.operations import FlowVerb
from penstock.core.operations import Verb
from penstock.core.task import State

_PARTICIPLES = {
    Verb.CANCEL: "cancelled",
    Verb.PAUSE: "paused",
    Verb.RESUME: "resumed",
    Verb.REPRIORITISE: "re-prioritised",
    Verb.RECOVER: "recovered",
}
# The figures of `why` that are moments.
_MOMENT_FIGURES = ("since", "due_at")
# The sentence has the first one; the others stand below the figures.
_NO_FIGURES = ("due_in_s", "traceback", "log")

_options = together(
    click.argument("ids", metavar="[ID...]", type=Whole(1), nargs=-1),
    click.option("--type", "type_", type=TYPE_NAME, help="Change only tasks of this type."),
    click.option("--stage", help="Change only tasks in this stage, or that ended in it."),
    click.option("--key", help="Change only tasks with this concurrency key."),
    states_option(
        "--state",
        State,
        "Change only tasks in this state. The option is repeatable. Default: every state in which the "
        "verb applies.",
    ),
    label_option("Change only tasks with this label. The option is repeatable; a task must have all labels."),
    click.option(
        "--priority",
        "priorities",
        multiple=True,
        type=PRIORITY,
        help="Change only tasks with this priority. The option is repeatable.",
    ),
    click.option("--created-since", type=Moment(), help="Change only tasks that were created then or later."),
    click.option("--created-until", type=Moment(), help="Change only tasks that were created before."),
    click.option("--finished-since", type=Moment(), help="Change only tasks that ended then or later."),
    click.option("--finished-until", type=Moment(), help="Change only tasks that ended before."),
    click.option(
        "--error",
        help='Change only tasks whose error "kind: message" has this text, in upper or lower case.',
    ),
    rate_option("The most tasks a second. Default: no limit."),
    click.option("--dry-run", is_flag=True, help="Count the tasks and show some, but change none."),
    yes_option,
    by_option,
    gateway_option,
    json_option,
)


@click.group(cls=Group)
def tasks() -> None:
    """Cancels, pauses, resumes, re-prioritises, recovers or reruns tasks, by id or by filter.

    The gateways carry an operation on even when this command ends. `penstock audit` lists the
    operations, and `penstock tasks stop` stops one. `penstock tasks why` explains why a task is
    waiting. A verb with a filter counts the tasks and asks before it changes them; --yes does not
    ask.
    """


tasks.add_command(list_)


@tasks.command()
@_options
def cancel(**options: Any) -> None:
    """Cancels tasks that have not ended; the status is 4 if no task matches."""
    _operate(Verb.CANCEL, options)


@tasks.command()
@_options
def pause(**options: Any) -> None:
    """Pauses tasks, running ones after their stage; the status is 4 if no task matches."""
    _operate(Verb.PAUSE, options)


@tasks.command()
@_options
def resume(**options: Any) -> None:
    """Resumes paused tasks in the stage where they were; the status is 4 if no task matches."""
    _operate(Verb.RESUME, options)


@tasks.command()
@click.option("--to", "to", type=PRIORITY, required=True, help="The new priority.")
@_options
def reprioritise(to: str, **options: Any) -> None:
    """Sets the priority of tasks from their next release on; the status is 4 if no task matches."""
    _operate(Verb.REPRIORITISE, options, priority=to)


@tasks.command()
@_options
def recover(**options: Any) -> None:
    """Retries failed and quarantined tasks in their last stage; status 4 if no task matches."""
    _operate(Verb.RECOVER, options)


@tasks.command()
@click.argument("task_id", metavar="ID", type=Whole(1))
@click.option(
    "--from",
    "from_stage",
    metavar="STAGE",
    help="The stage in which the new task begins, with the input of that stage. Default: the first one.",
)
@click.option(
    "--idempotency-key",
    help="A text that identifies the rerun: running the verb again returns the first new task.",
)
@click.option(
    "--watch",
    "watch_",
    is_flag=True,
    help="Wait until the new task has ended, and show its result. The status is 1 unless it succeeds.",
)
@gateway_option
@json_option
@click.pass_context
def rerun(
    ctx: click.Context,
    /,
    task_id: int,
    watch_: bool,
    gateway: str | None,
    json_: bool,
    **options: str | None,
) -> None:
    """Submits an ended task anew, from its first stage or from a later one.

    `penstock get` lists the stages with their inputs. The ended task stays as it is.
    """
    with open_client(gateway) as client:
        submitted = client.rerun(task_id, **options)
        done = f"submitted: it runs task {task_id} again"
        text = done if submitted.created else "existed already, with the same idempotency key"
        print_answer(
            {"id": submitted.id, "created": submitted.created}, f"task {submitted.id} {text}", json_=json_
        )
        if not json_:
            # The stage may be one that the type's workers have no more.
            warn_unserved(gateway, submitted.id)
        if watch_:
            status = watch_tasks(client, [submitted.id], json_=json_)
            print_end(client.get(submitted.id), json_=json_)
            ctx.exit(status)


def _operate(verb: Verb, options: Mapping[str, Any], priority: str | None = None) -> None:
    task_filter = filter_of(TaskFilter, options, type=options["type_"])
    if not task_filter.to_wire():
        raise click.UsageError("give ids, or a filter such as --type")
    done = _PARTICIPLES[verb]
    Operation(
        verb,
        done,
        done,
        "task",
        lambda client, **more: client.operate(verb, task_filter, priority=priority, **more),
        lambda task: f"{task['id']} ({task['type']}, {task['stage']}, {task['state']})",
        f"none of the tasks exists and can be {done}; `penstock get ID` shows the state of one"
        if task_filter.ids
        else f"no task matches that can be {done}; `penstock list` lists tasks",
    ).run(options)


@tasks.command()
@click.argument("operation_id", metavar="OPERATION")
@by_option
@client_options
def stop(operation_id: str, by: str | None, client: SyncClient, json_: bool) -> None:
    """Stops an operation of `penstock tasks` or `penstock flows`; what it has changed stays so."""
    operation = client.stop_operation(operation_id, by)
    print_answer(
        operation,
        f"operation {operation['id']} is {operation['state']}: {operation['changed']:,} "
        f"{operation.get('subject', 'task')}s changed",
        json_=json_,
    )


@tasks.command()
@click.argument("task_id", metavar="ID", type=Whole(1))
@client_options
def why(task_id: int, client: SyncClient, json_: bool) -> None:
    """Explains why a task is waiting, or what it does instead, with numbers."""
    answer = client.why(task_id)
    if json_:
        print_document(answer)
        return
    click.echo(f"task {answer['id']} ({answer['type']}, {answer['state']}): {answer['sentence']}")
    fields(
        ("lease" if name == "lease_s" else name.replace("_", " "), _figure(name, value))
        for name, value in answer["figures"].items()
        if name not in _NO_FIGURES
    )
    print_failure(answer["figures"])


def _figure(name: str, value: Any) -> str:
    if name in _MOMENT_FIGURES:
        return moment(value)
    return f"{value:g} s" if name == "lease_s" else str(value)


@click.command()
@click.option(
    "--verb",
    type=click.Choice([*(verb.value for verb in Verb), FlowVerb.RERUN.value]),
    help="List only operations with this verb.",
)
@click.option(
    "--state",
    type=click.Choice(["running", "done", "stopped", "failed"]),
    help="List only operations in this state.",
)
@list_options("operations")
@client_options
def audit(verb: str | None, state: str | None, limit: int | None, client: SyncClient, json_: bool) -> None:
    """Lists the operations of `penstock tasks` and `penstock flows`, latest first."""
    print_list(
        client.operations(verb=verb, state=state, limit=limit),
        ("id", "verb", "by", "started", "state", "changed", "filter"),
        lambda operation: (
            operation["id"],
            _verb_text(operation),
            operation["by"],
            moment(operation["created_at"]),
            state_text(operation["state"]),
            f"{operation['changed']:,}",
            _filter_text(operation["filter"]),
        ),
        "no operations",
        json_=json_,
    )


def _verb_text(operation: Mapping[str, Any]) -> str:
    if operation["priority"]:
        return f"{operation['verb']} to {operation['priority']}"
    return f"{operation['verb']} flows" if operation["subject"] == "flow" else str(operation["verb"])


def _filter_text(task_filter: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in task_filter.items())
    return text if len(text) <= 120 else f"{text[:120]} …"
