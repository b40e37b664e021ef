"""The verbs of `penstock schedules` that run a schedule over a past range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.gateway import client_options, gateway_option, open_client
from penstock.cli.inputs import naming_options
from penstock.cli.names import SCHEDULE_NAME
from penstock.cli.options import by_option, json_option, limit_option, rate_option
from penstock.cli.output import counted, counts_text, moment, print_answer, print_list, progress, state_text
from penstock.cli.param_types import Moment, Whole
from penstock.client import SyncClient
from penstock.errors import PenstockError

# The status of a backfill that was stopped, or of which a flow did not succeed.
_NOT_SUCCEEDED = 1


@click.command()
@click.argument("name", type=SCHEDULE_NAME)
@click.option("--since", type=Moment(), required=True, help="The first moment of the range.")
@click.option("--until", type=Moment(), help="The last moment of the range. Default: now.")
@rate_option("The most flows that start a second. Default: no limit.")
@click.option("--max-running", type=Whole(1), help="The most flows that run at once. Default: no limit.")
@click.option("--rerun", is_flag=True, help="Run ticks again that have a flow; otherwise they are left.")
@click.option("--dry-run", is_flag=True, help="Count the ticks, but start nothing.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the backfill is stored.")
@by_option
@gateway_option
@json_option
@click.pass_context
def backfill(
    ctx: click.Context, /, name: str, no_wait: bool, gateway: str | None, json_: bool, **options: Any
) -> None:
    """Runs a schedule over a past range, and waits until all flows have ended.

    The backfill goes on even when this command ends; `penstock schedules stop` stops it. The status
    is 1 unless all its flows succeed.
    """
    dry_run = options["dry_run"]
    known: list[int] = []
    with open_client(gateway) as client, progress(quiet=json_ or dry_run) as bar:
        task = bar.add_task(f"backfill of {name}", total=None)

        def show(found: Mapping[str, Any]) -> None:
            known[:] = [found["id"]]
            bar.update(task, total=found["total"], completed=_done(found))

        try:
            with naming_options():
                found = client.backfill(name, wait=not no_wait, progress=show, **options)
        except (KeyboardInterrupt, PenstockError):
            for backfill_id in known:
                click.echo(
                    f"backfill {backfill_id} goes on; `penstock schedules stop {backfill_id}` stops it",
                    err=True,
                )
            raise
    text = (
        f"{found['would_start']:,} of {counted(found['total'], 'tick')} would start a flow; "
        f"{found['already_run']:,} have one"
        if dry_run
        else _backfill_text(found)
    )
    print_answer(found, text, json_=json_)
    if not dry_run and not no_wait and not _has_succeeded(found):
        ctx.exit(_NOT_SUCCEEDED)


def _done(found: Mapping[str, Any]) -> int:
    """Ticks that need nothing more."""
    ended = sum(flows for state, flows in found["flows"].items() if state != "running")
    return int(ended + found["already_run"] + found["refused"])


def _has_succeeded(found: Mapping[str, Any]) -> bool:
    others = {state for state in found["flows"] if state != "succeeded"}
    return found["state"] == "done" and not others and not found["refused"]


def _backfill_text(found: Mapping[str, Any]) -> str:
    left = f", {found['already_run']:,} had one" if found["already_run"] else ""
    refused = f", {found['refused']:,} could not start" if found["refused"] else ""
    error = f"\n  {found['error']}" if found["error"] else ""
    return (
        f"backfill {found['id']} is {found['state']}: {found['started']:,} of {counted(found['total'], 'tick')} started a flow"
        f"{left}{refused} ({counts_text(found['flows'])}){error}"
    )


@click.command()
@click.option("--schedule", help="List only backfills of this schedule.")
@limit_option("backfills")
@client_options
def backfills(schedule: str | None, limit: int, client: SyncClient, json_: bool) -> None:
    """Lists backfills, latest first, with their progress."""
    print_list(
        list(client.backfills(schedule=schedule, limit=limit)),
        ("id", "schedule", "since", "until", "by", "state", "done", "flows"),
        lambda each: (
            str(each["id"]),
            each["schedule"],
            moment(each["since"]),
            moment(each["until"]),
            each["by"],
            state_text(each["state"]),
            f"{_done(each):,} of {each['total']:,}",
            counts_text(each["flows"]),
        ),
        "no backfills",
        json_=json_,
    )


@click.command()
@click.argument("backfill_id", metavar="BACKFILL", type=Whole(1))
@click.option("--cancel", is_flag=True, help="Cancel its running flows, too; otherwise they go on.")
@by_option
@client_options
def stop(backfill_id: int, cancel: bool, by: str | None, client: SyncClient, json_: bool) -> None:
    """Stops a backfill: it starts no further flow."""
    found = client.stop_backfill(backfill_id, cancel=cancel, by=by)
    print_answer(found, _backfill_text(found), json_=json_)
