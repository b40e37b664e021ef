"""The verbs `penstock schedules`: flows that start by cron, and runs over a past range."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import click

from penstock.cli.gateway import client_options, without_empty
from penstock.cli.groups import Group
from penstock.cli.inputs import naming_options
from penstock.cli.names import FLOW_NAME, SCHEDULE_NAME, TYPE_NAME
from penstock.cli.options import (
    PRIORITY,
    by_option,
    callback_option,
    events_option,
    label_option,
    limit_option,
    list_options,
    rate_option,
)
from penstock.cli.output import (
    counted,
    counts_text,
    fields,
    moment,
    print_answer,
    print_document,
    print_list,
    progress,
    state_text,
)
from penstock.cli.param_types import Moment, Whole
from penstock.client import SyncClient
from penstock.core.schedule_policy import CatchUp, Overlap
from penstock.errors import NotFound, PenstockError

# The status of a backfill that was stopped, or of which a flow did not succeed.
_NOT_SUCCEEDED = 1


@click.group(cls=Group)
def schedules() -> None:
    """Starts flows by cron, in a time zone; runs them over a past range.

    The service `flows` starts them. `penstock schedules next` shows the next ticks, and `penstock
    schedules history` what became of the past ones.
    """


@schedules.command()
@click.argument("name", type=SCHEDULE_NAME)
@click.option("--flow", type=FLOW_NAME, help="The definition whose flows start.")
@click.option("--type", type=TYPE_NAME, help="In place of --flow: the task type of which a task starts.")
@click.option("--stage", help="With --type: the first stage of the tasks. Default: that of the type.")
@click.option(
    "--cron",
    required=True,
    metavar="EXPRESSION",
    help='Minute, hour, day, month and day of the week: "30 2 * * *".',
)
@click.option("--zone", help="The time zone, such as Europe/Berlin. Default: UTC.")
@click.option(
    "--version", type=Whole(1), help="The version of the definition. Default: the newest at each tick."
)
@click.option(
    "--input",
    "input_",
    metavar="EXPRESSION",
    help="The inputs of the flow, or the context of the task, in CEL. The expression reads `schedule`, "
    "`tick` and `local_tick`: '{\"day\": local_tick}'. Default: no inputs.",
)
@click.option("--priority", type=PRIORITY, help="The order of release of the tasks. Default: MEDIUM.")
@label_option("A label of the flows. The option is repeatable.")
@callback_option("A target that is called when a flow of the schedule ends.")
@events_option("The transitions of the flows that are published. Default: final.")
@click.option(
    "--catch-up",
    type=click.Choice([each.value for each in CatchUp]),
    help="Which missed ticks start after an outage. Default: latest.",
)
@click.option(
    "--catch-up-limit", type=Whole(), help="The most missed ticks that --catch-up all starts. Default: 100."
)
@click.option(
    "--catch-up-rate",
    type=click.FloatRange(min=0.001, max=100),
    help="The flows a second that --catch-up all starts with --overlap allow. Default: 10.",
)
@click.option(
    "--overlap",
    type=click.Choice([each.value for each in Overlap]),
    help="What a tick does while a flow of the schedule is running. Default: skip.",
)
@click.option(
    "--paused/--not-paused",
    default=None,
    help="Whether no tick starts a flow. Default: no, and as it is for an existing schedule.",
)
@client_options
def add(name: str, input_: str | None, client: SyncClient, json_: bool, **options: Any) -> None:
    """Creates a schedule, or replaces its settings; options that are missing mean defaults."""
    settings = without_empty(input=input_, **options)
    with naming_options():
        schedule = client.put_schedule(name, **settings)
    state = "paused" if schedule["paused"] else f"next at {moment(schedule['next_tick'])}"
    text = f"schedule {name}: flow {schedule['flow']} by {schedule['cron']}, {schedule['zone']}; {state}"
    print_answer(schedule, text, json_=json_)


@schedules.command("list")
@click.option("--flow", type=FLOW_NAME, help="List only schedules of this definition.")
@list_options("schedules")
@client_options
def list_(flow: str | None, limit: int | None, client: SyncClient, json_: bool) -> None:
    """Lists schedules by name, with their next and their last tick."""
    print_list(
        list(client.schedules(flow=flow, limit=limit)),
        ("name", "flow", "cron", "zone", "state", "next", "last", "started"),
        lambda each: (
            each["name"],
            each["flow"],
            each["cron"],
            each["zone"],
            _state(each),
            "" if each["paused"] else moment(each["next_tick"]),
            moment(each["last_tick"]),
            f"{each['started']:,}",
        ),
        "no schedules; create one with `penstock schedules add NAME`",
        json_=json_,
    )


def _state(schedule: Mapping[str, Any]) -> Any:
    if schedule["paused"]:
        return state_text("paused")
    return state_text("failed") if schedule["error"] else "active"


@schedules.command()
@click.argument("name", type=SCHEDULE_NAME)
@client_options
def get(name: str, client: SyncClient, json_: bool) -> None:
    """Shows one schedule with its rules, its queue and its last error."""
    schedule = client.schedule(name)
    if json_:
        print_document(schedule)
        return
    moments = ("next_tick", "last_tick", "created_at", "updated_at")
    shown = {
        **schedule,
        **{field: moment(schedule[field]) for field in moments},
        "queued": ", ".join(map(moment, schedule["queued"])) or "none",
        "version": schedule["version"] or "newest",
        "labels": ", ".join(f"{label}={value}" for label, value in schedule["labels"].items()) or "none",
        "callbacks": ", ".join(
            each if isinstance(each, str) else each["url"] for each in schedule["callbacks"]
        )
        or "none",
    }
    fields((field.replace("_", " "), "" if value is None else str(value)) for field, value in shown.items())


@schedules.command()
@click.argument("name", type=SCHEDULE_NAME)
@client_options
def pause(name: str, client: SyncClient, json_: bool) -> None:
    """Pauses a schedule: no tick starts a flow, and running flows go on."""
    schedule = client.pause_schedule(name)
    print_answer(schedule, f"schedule {name} is paused", json_=json_)


@schedules.command()
@click.argument("name", type=SCHEDULE_NAME)
@client_options
def resume(name: str, client: SyncClient, json_: bool) -> None:
    """Resumes a schedule with its next tick from now; the ticks of the pause stay skipped."""
    schedule = client.resume_schedule(name)
    print_answer(schedule, f"schedule {name} goes on, next at {moment(schedule['next_tick'])}", json_=json_)


@schedules.command()
@click.argument("name", type=SCHEDULE_NAME)
@client_options
def remove(name: str, client: SyncClient, json_: bool) -> None:
    """Removes a schedule and stops its backfills; its flows stay."""
    removed = client.remove_schedule(name)
    if not removed:
        raise NotFound(f"there is no schedule {name!r}")
    print_answer({"name": name, "removed": True}, f"schedule {name} is removed; its flows stay", json_=json_)


@schedules.command("next")
@click.argument("name", type=SCHEDULE_NAME)
@click.option("--count", type=Whole(1), default=10, show_default=True, help="The number of ticks.")
@click.option("--after", type=Moment(), help="Show the ticks after this moment. Default: now.")
@client_options
def next_(name: str, count: int, after: datetime | None, client: SyncClient, json_: bool) -> None:
    """Shows the next ticks of a schedule, in its zone and in UTC."""
    ticks = client.schedule_ticks(name, count=count, after=after)
    print_list(
        ticks, ("in its zone", "in UTC"), lambda tick: (tick["local"], tick["tick"]), "no ticks", json_=json_
    )


@schedules.command()
@click.argument("name", type=SCHEDULE_NAME)
@limit_option("records")
@client_options
def history(name: str, limit: int, client: SyncClient, json_: bool) -> None:
    """Shows the outcome of past ticks, latest tick first: their flows, or why they were skipped."""
    print_list(
        list(client.schedule_history(name, limit=limit)),
        ("tick", "outcome", "flow", "task", "state", "why"),
        lambda each: (
            _span(each),
            each["outcome"],
            str(each["flow_id"] or ""),
            str(each["task_id"] or ""),
            state_text(each["status"]) if each["status"] else "",
            _why(each),
        ),
        "no tick has passed",
        json_=json_,
    )


def _span(record: Mapping[str, Any]) -> str:
    if record["ticks"] == 1:
        return moment(record["last_tick"])
    many = "many" if record["ticks"] is None else f"{record['ticks']:,}"
    return f"{moment(record['first_tick'])} to {moment(record['last_tick'])} ({many} ticks)"


def _why(record: Mapping[str, Any]) -> str:
    if record["reason"]:
        return f"{record['reason']}: {record['detail']}" if record["detail"] else str(record["reason"])
    parts = {"backfill": record["backfill"], "rerun of": record["rerun_of"]}
    return ", ".join(f"{word} {value}" for word, value in parts.items() if value is not None)


@schedules.command()
@click.argument("name", type=SCHEDULE_NAME)
@limit_option("records")
@client_options
def skips(name: str, limit: int, client: SyncClient, json_: bool) -> None:
    """Lists the ticks of the last 30 days that started no flow, latest first, with the reason."""
    print_list(
        list(client.schedule_skips(name, limit=limit)),
        ("first tick", "last tick", "ticks", "reason", "error"),
        lambda skip: (
            moment(skip["first_tick"]),
            moment(skip["last_tick"]),
            "many" if skip["ticks"] is None else f"{skip['ticks']:,}",
            skip["reason"],
            skip["detail"] or "",
        ),
        "no tick was skipped",
        json_=json_,
    )


@schedules.command()
@click.argument("name", type=SCHEDULE_NAME)
@click.option("--since", type=Moment(), required=True, help="The first moment of the range.")
@click.option("--until", type=Moment(), help="The last moment of the range. Default: now.")
@rate_option("The most flows that start a second. Default: no limit.")
@click.option("--max-running", type=Whole(1), help="The most flows that run at once. Default: no limit.")
@click.option("--rerun", is_flag=True, help="Run ticks again that have a flow; otherwise they are left.")
@click.option("--dry-run", is_flag=True, help="Count the ticks, but start nothing.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the backfill is stored.")
@by_option
@client_options
@click.pass_context
def backfill(
    ctx: click.Context, /, name: str, no_wait: bool, client: SyncClient, json_: bool, **options: Any
) -> None:
    """Runs a schedule over a past range, and waits until all flows have ended.

    The backfill goes on even when this command ends; `penstock schedules stop` stops it. The status
    is 1 unless all its flows succeed.
    """
    dry_run = options["dry_run"]
    known: list[int] = []
    with progress(quiet=json_ or dry_run) as bar:
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


@schedules.command()
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


@schedules.command()
@click.argument("backfill_id", metavar="BACKFILL", type=Whole(1))
@click.option("--cancel", is_flag=True, help="Cancel its running flows, too; otherwise they go on.")
@by_option
@client_options
def stop(backfill_id: int, cancel: bool, by: str | None, client: SyncClient, json_: bool) -> None:
    """Stops a backfill: it starts no further flow."""
    found = client.stop_backfill(backfill_id, cancel=cancel, by=by)
    print_answer(found, _backfill_text(found), json_=json_)
