"""The verbs about callbacks: list and replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.confirmation import confirm, yes_option
from penstock.cli.gateway import client_options, gateway_option, open_client
from penstock.cli.groups import Group
from penstock.cli.names import TARGET_URL
from penstock.cli.options import json_option, list_options
from penstock.cli.output import counted, moment, print_document, print_list, progress, state_text
from penstock.cli.param_types import Moment, Rate, Whole
from penstock.client import Replayed, SyncClient
from penstock.errors import NotFound


@click.group(cls=Group)
def callbacks() -> None:
    """Lists callbacks, and replays dead ones."""


@callbacks.command("list")
@click.option("--target", metavar="URL", type=TARGET_URL, help="List only callbacks to this URL.")
@click.option("--namespace", metavar="NAME", help="List only callbacks of this namespace.")
@click.option("--task", "task_id", type=Whole(1), help="List only callbacks of this task, in any state.")
@click.option(
    "--state",
    type=click.Choice(["pending", "held", "delivered", "dead"]),
    help="List only callbacks in this state; `delivered` needs --task. Default: dead, or with --task any "
    "state.",
)
@click.option(
    "--since",
    type=Moment(),
    help="List only callbacks that ended then or later. Pending callbacks count by their creation.",
)
@click.option(
    "--until",
    type=Moment(),
    help="List only callbacks that ended before. Pending callbacks count by their creation.",
)
@list_options("callbacks")
@client_options
def list_(client: SyncClient, json_: bool, limit: int | None, **filters: Any) -> None:
    """Lists dead callbacks, callbacks in another state, or all callbacks of a task."""
    print_list(
        client.callbacks(**filters, limit=limit),
        ("id", "target", "task", "state", "attempts", "ended or created", "error"),
        lambda callback: (
            callback["id"],
            callback["target"],
            str(callback["task_id"]),
            state_text(callback["state"]),
            str(callback["attempt"]),
            moment(callback["finished_at"] or callback["created_at"]),
            (callback["error"] or {}).get("message", "")[:80],
        ),
        _no_callbacks_text(filters),
        json_=json_,
    )


def _no_callbacks_text(filters: Mapping[str, Any]) -> str:
    if task_id := filters["task_id"]:
        return f"task {task_id} has no such callbacks; `penstock get {task_id}` shows the task"
    state = filters["state"] or "dead"
    others = " or ".join(f"--state {other}" for other in ("pending", "held", "dead") if other != state)
    narrowed = any(filters[name] for name in ("target", "namespace", "since", "until"))
    message = f"no {state} callbacks match" if narrowed else f"no {state} callbacks"
    return f"{message}; {others} lists callbacks in other states, --task ID all callbacks of a task"


@callbacks.command()
@click.argument("ids", metavar="[ID...]", nargs=-1)
@click.option("--target", metavar="URL", type=TARGET_URL, help="Replay only callbacks to this URL.")
@click.option(
    "--namespace",
    metavar="NAME",
    help="Replay only callbacks of this namespace. Default with --target: the only namespace of the API key, "
    "or else `default`.",
)
@click.option("--task", "task_id", type=Whole(1), help="Replay only callbacks of this task.")
@click.option("--since", type=Moment(), help="Replay only callbacks that ended then or later.")
@click.option("--until", type=Moment(), help="Replay only callbacks that ended before.")
@click.option(
    "--state",
    type=click.Choice(["dead", "delivered"]),
    help="Replay only callbacks in this state; `delivered` needs ids. Default: dead.",
)
@click.option("--rate", type=Rate(), help="The most callbacks a second. Default: no limit.")
@click.option("--dry-run", is_flag=True, help="Count the callbacks and show some, but replay none.")
@yes_option
@gateway_option
@json_option
def replay(
    ids: tuple[str, ...], gateway: str | None, json_: bool, dry_run: bool, yes: bool, **options: Any
) -> None:
    """Replays dead callbacks, by id or by filter; the status is 4 if none matches.

    With a filter the command counts the callbacks and asks first; --yes does not ask.

    A replayed callback keeps counting its attempts, and its retry schedule starts again. Replaying
    twice is safe, because a replayed callback is no longer dead. The topic callbacks.dead needs no
    other redrive.
    """
    filters = [options[name] for name in ("target", "task_id", "since", "until") if options[name] is not None]
    if not ids and not filters:
        raise click.UsageError("give ids, --target, --task, --since or --until")
    if not (ids or dry_run or yes):
        with open_client(gateway) as client:
            preview = client.replay(None, **options, dry_run=True)
        if preview.count:
            confirm(f"{_count_text(preview)} would be replayed")
    with open_client(gateway) as client, progress(quiet=json_ or dry_run) as bar:
        task = bar.add_task("replaying", total=None)
        outcome = client.replay(
            ids or None, **options, dry_run=dry_run, progress=lambda count: bar.advance(task, count)
        )
    if json_:
        print_document({"dry_run": dry_run, **dataclasses.asdict(outcome)})
    else:
        _print_outcome(outcome, dry_run=dry_run)
    if not outcome.count:
        raise _not_found(
            options["state"] or "dead",
            one_namespace=options["target"] is not None and options["namespace"] is None,
        )


def _not_found(state: str, *, one_namespace: bool) -> NotFound:
    error = NotFound(f"no {state} callback matches: nothing is replayed")
    error.add_note(
        "`penstock callbacks list` shows dead callbacks, and with --task ID all callbacks of a task"
    )
    if one_namespace:
        error.add_note("--target names a target of one namespace: name another namespace with --namespace")
    if state == "dead":
        error.add_note("replay a delivered callback by its id with --state delivered;")
        error.add_note("pending and held callbacks need no replay, because they are still called")
    return error


def _print_outcome(outcome: Replayed, *, dry_run: bool) -> None:
    click.echo(f"{_count_text(outcome)} {'would be ' if dry_run else ''}replayed")
    for callback in outcome.examples if dry_run else ():
        click.echo(f"  {callback['id']} to {callback['target']}")
    if outcome.held:
        urls = ", ".join(outcome.disabled)
        click.echo(
            f"{outcome.held:,} of them {'would be' if dry_run else 'are'} held, because their targets are disabled: {urls}"
        )


def _count_text(outcome: Replayed) -> str:
    return f"{'' if outcome.complete else 'more than '}{counted(outcome.count, 'callback')}"
