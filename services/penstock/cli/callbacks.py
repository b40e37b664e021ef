"""The verbs about callbacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.gateway import client, gateway_option
from penstock.cli.numbers import Pace, Whole
from penstock.cli.output import as_json, console, moment, print_json, progress, state_text, table
from penstock.client import Replayed
from penstock.errors import NotFound

_LATEST = 20

_MOMENT = click.DateTime(["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d"])


@click.group()
def callbacks() -> None:
    """Lists callbacks, and replays those that are dead."""


@callbacks.command("list")
@click.option("--target", metavar="URL", help="To this URL.")
@click.option("--namespace", metavar="NAME", help="Only of this namespace.")
@click.option("--task", "task_id", type=Whole(1), help="Of this task: in any state.")
@click.option(
    "--state",
    type=click.Choice(["pending", "held", "delivered", "dead"]),
    help="Default: dead; delivered only with --task.",
)
@click.option("--since", type=_MOMENT, help="Ended then or later; created, if it has not ended.")
@click.option("--until", type=_MOMENT, help="Ended, or created, before.")
@click.option("--limit", type=Whole(1), default=_LATEST, show_default=True, help="Most callbacks.")
@click.option("--all", "all_", is_flag=True, help="No limit.")
@gateway_option
@as_json
def list_(gateway: str | None, json_: bool, limit: int, all_: bool, **filters: Any) -> None:
    """Lists callbacks: the dead, those in another state, or all of a task."""
    with client(gateway) as found:
        known = found.callbacks(**filters, limit=None if all_ else limit)
        if json_:
            for callback in known:
                print_json(callback)
            return
        rows = [
            (
                callback["id"],
                callback["target"],
                str(callback["task_id"]),
                state_text(callback["state"]),
                str(callback["attempt"]),
                moment(callback["finished_at"] or callback["created_at"]),
                (callback["error"] or {}).get("message", "")[:80],
            )
            for callback in known
        ]
    if rows:
        table(("id", "target", "task", "state", "attempts", "ended or created", "met"), rows)
    else:
        console().print(_nothing(filters))


def _nothing(filters: Mapping[str, Any]) -> str:
    if filters["task_id"]:
        return f"task {filters['task_id']} owes no such callbacks; `penstock get {filters['task_id']}` shows the task"
    state = filters["state"] or "dead"
    others = " or ".join(f"--state {other}" for other in ("pending", "held", "dead") if other != state)
    narrowed = any(filters[name] for name in ("target", "namespace", "since", "until"))
    which = f"no {state} callbacks that match" if narrowed else f"no {state} callbacks"
    return f"{which}; {others} lists others, --task ID those of a task in any state"


@callbacks.command()
@click.argument("ids", metavar="[ID...]", nargs=-1)
@click.option("--target", metavar="URL", help="Of this target.")
@click.option(
    "--namespace",
    metavar="NAME",
    help="Of this namespace. Default with --target: the only one that your key is confined to, else `default`.",
)
@click.option("--task", "task_id", type=Whole(1), help="Of this task.")
@click.option("--since", type=_MOMENT, help="Ended then or later.")
@click.option("--until", type=_MOMENT, help="Ended before.")
@click.option(
    "--state", type=click.Choice(["dead", "delivered"]), help="Default: dead; delivered only with ids."
)
@click.option("--rate", type=Pace(), help="Callbacks a second. Default: all at once.")
@click.option("--dry-run", is_flag=True, help="Only count, and show some.")
@gateway_option
@as_json
def replay(ids: tuple[str, ...], gateway: str | None, json_: bool, dry_run: bool, **given: Any) -> None:
    """Owes dead callbacks anew: by id, or all that match; status 4 if there are none.

    Their attempts go on being numbered, their schedule begins anew. Doing it twice is safe: what was replayed is dead
    no more. This is also the redrive of the topic callbacks.dead.
    """
    filters = [given[name] for name in ("target", "task_id", "since", "until") if given[name] is not None]
    if not ids and not filters:
        raise click.UsageError("give ids, --target, --task, --since or --until")
    with client(gateway) as found, progress(quiet=json_ or dry_run) as bar:
        task = bar.add_task("replaying", total=None)
        told = found.replay(
            ids or None, **given, dry_run=dry_run, progress=lambda count: bar.advance(task, count)
        )
    if json_:
        print_json({"dry_run": dry_run, **dataclasses.asdict(told)})
    else:
        _tell(told, dry_run=dry_run)
    if not told.count:
        raise _nothing_to_replay(
            given["state"] or "dead", elsewhere=given["target"] is not None and given["namespace"] is None
        )


def _nothing_to_replay(state: str, *, elsewhere: bool) -> NotFound:
    error = NotFound(f"no {state} callback matches: nothing is replayed")
    error.add_note("`penstock callbacks list` shows the dead, with --task ID those of a task in any state")
    if elsewhere:
        error.add_note(
            "--target is meant in one namespace: name another than that of your key with --namespace"
        )
    if state == "dead":
        error.add_note(
            "one that was delivered is replayed by its id with --state delivered; one that is pending or"
        )
        error.add_note("held will be called by itself")
    return error


def _tell(told: Replayed, *, dry_run: bool) -> None:
    count = f"{told.count:,}" if told.complete else f"more than {told.count:,}"
    click.echo(f"{count} callbacks {'would be' if dry_run else 'are'} replayed")
    for callback in told.examples if dry_run else ():
        click.echo(f"  {callback['id']} to {callback['target']}")
    if told.held:
        urls = ", ".join(told.disabled)
        click.echo(
            f"{told.held:,} of them {'would be' if dry_run else 'are'} held, because their targets are disabled: {urls}"
        )
