"""The verbs about task types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
import orjson

from penstock.cli.concurrency_keys import keys
from penstock.cli.gateway import client_options, gateway_option, given_settings, open_client
from penstock.cli.groups import Group
from penstock.cli.inputs import naming_options
from penstock.cli.names import TYPE_NAME
from penstock.cli.options import callback_option, json_option, together
from penstock.cli.output import fields, print_answer, print_document, print_list
from penstock.cli.param_types import Finite, Milliseconds, OrNone, Seconds, Whole
from penstock.client import SyncClient
from penstock.errors import NotFound

_Command = TypeVar("_Command", bound=Callable[..., Any])

_TYPE_COLUMNS = ("name", "first_stage", "partitions", "lease_ms", "max_attempts", "events")
_BACKLOG_COLUMNS = ("type", "priority", "stage", "ready", "scheduled", "paused", "waiting", "in_flight")


@click.group(cls=Group, invoke_without_command=True)
@gateway_option
@json_option
@click.pass_context
def types(ctx: click.Context, gateway: str | None, json_: bool) -> None:
    """Lists, shows, registers, changes, pauses and resumes task types; counts waiting tasks."""
    if ctx.invoked_subcommand is not None:
        return
    with open_client(gateway) as client:
        found = client.types()
        owners = {} if json_ else client.owners()
    print_list(
        found,
        [*(name.replace("_", " ") for name in _TYPE_COLUMNS), "released by"],
        lambda each: [*(str(each[name]) for name in _TYPE_COLUMNS), _owner(owners, each["name"])],
        "no task types; register one with `penstock types add NAME`",
        json_=json_,
    )


types.add_list("Lists the task types, as `penstock types` does.")
types.add_command(keys)


@types.command()
@click.argument("name", type=TYPE_NAME)
@client_options
def show(name: str, client: SyncClient, json_: bool) -> None:
    """Shows one task type with its lease, limits, retries and callbacks."""
    task_type = next((found for found in client.types() if found["name"] == name), None)
    owners = {} if json_ else client.owners()
    if task_type is None:
        raise NotFound(f"there is no task type {name!r}")
    if json_:
        print_document(task_type)
    else:
        values = {**task_type, "released by": _owner(owners, name)}
        fields((field.replace("_", " "), _text(value)) for field, value in values.items())


@types.command()
@click.argument("name", required=False, type=TYPE_NAME)
@client_options
def backlog(name: str | None, client: SyncClient, json_: bool) -> None:
    """Counts the waiting tasks of one type or all, with the age of the oldest ready task."""
    lines = list(client.backlog(name))
    print_list(
        lines,
        [*(head.replace("_", " ") for head in _BACKLOG_COLUMNS), "oldest"],
        lambda line: [
            *(_number(line[head]) for head in _BACKLOG_COLUMNS),
            "" if line["oldest_s"] is None else f"{line['oldest_s']:,.1f} s",
        ],
        "no task is waiting",
        json_=json_,
    )


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _owner(owners: Mapping[str, str | None], name: str) -> str:
    return owners.get(name) or "no process"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _settings(*, defaults: bool) -> Callable[[_Command], _Command]:
    """Adds the options that `add` and `set` share.

    Args:
        defaults: say the default of each option; `set` has none, because other settings stay.
    """

    def option(
        name: str, kind: click.ParamType | None, text: str, default: str
    ) -> Callable[[_Command], _Command]:
        help_ = f"{text} Default: {default}." if defaults else text
        # None tells that an option is not given, also a flag.
        return click.option(name, type=kind, default=None, help=help_)

    return together(
        option("--first-stage", None, "The first stage of tasks that name none.", "start"),
        option(
            "--lease-ms",
            Milliseconds(),
            "The lease of a task, in milliseconds or as a duration such as 5m: a worker loses the task when "
            "it sends no heartbeat for so long.",
            "300000",
        ),
        option("--max-attempts", Whole(), "The most attempts of a stage, with the first one.", "3"),
        option(
            "--retry-base-ms",
            Milliseconds(),
            "The delay before the second attempt, in milliseconds or as a duration.",
            "1000",
        ),
        option("--retry-factor", Finite(), "The factor between two delays.", "2"),
        option(
            "--retry-max-ms", Milliseconds(), "The longest delay, in milliseconds or as a duration.", "300000"
        ),
        option("--retry-jitter", Finite(), "The random share of each delay, 0 to 1.", "0.5"),
        option("--events", click.Choice(["final", "all"]), "The transitions that are published.", "final"),
        option("--max-losses", Whole(), "The number of lost workers after which a task is quarantined.", "3"),
        option(
            "--late-results",
            click.Choice(["accept", "refuse"]),
            "Whether results of expired attempts are accepted.",
            "accept",
        ),
        option(
            "--idempotency",
            click.Choice(["lenient", "strict"]),
            "Whether an idempotency key that exists with another context returns the first task, or is refused.",
            "lenient",
        ),
        option(
            "--no-handler-s",
            OrNone(Seconds()),
            "The seconds, or a duration, for which workers hand a task back because they have no handler for its "
            "stage, until it fails; none is without end.",
            "3600",
        ),
        option(
            "--max-in-flight", OrNone(Whole()), "The most tasks that are queued or running at once.", "none"
        ),
        option("--starts-per-s", OrNone(Finite()), "The most tasks that are released a second.", "none"),
        option(
            "--max-per-key",
            OrNone(Whole()),
            "The most tasks of one concurrency key that are queued or running at once.",
            "none",
        ),
        option(
            "--fair/--no-fair",
            None,
            "Whether concurrency keys of the same priority take turns (fair queueing).",
            "no",
        ),
        option(
            "--ageing-s",
            OrNone(Seconds()),
            "The seconds of waiting, or a duration, after which a task gains one level of priority.",
            "none",
        ),
        option(
            "--finish-first/--no-finish-first",
            None,
            "Whether tasks in a later stage are released before tasks in their first stage.",
            "no",
        ),
        callback_option("A target of the tasks that name no targets."),
    )


@types.command()
@click.argument("name")
@click.option(
    "--partitions",
    type=Whole(),
    help="The partitions of the ready topic, which cannot be changed later. Default: 8.",
)
@_settings(defaults=True)
@client_options
def add(name: str, client: SyncClient, json_: bool, **options: Any) -> None:
    """Registers a task type; of one that exists it changes only the settings that are given."""
    settings = given_settings(options)
    found = next((each for each in client.types() if each["name"] == name), None)
    if found is not None and settings.get("partitions") == found["partitions"]:
        del settings["partitions"]
    with naming_options():
        if found is None:
            registered = client.register_type(name, **settings)
        else:
            registered = client.change_type(name, **settings) if settings else found
    text = f"type {name}: "
    if found is not None:
        changed = [field for field in settings if registered[field] != found[field]]
        what = f"changed: {', '.join(changed)}" if changed else "nothing changed"
        text = f"type {name} existed already, {what}; "
    print_answer(registered, f"{text}tasks begin at stage {registered['first_stage']}", json_=json_)


@types.command("set")
@click.argument("name", type=TYPE_NAME)
@_settings(defaults=False)
@gateway_option
@json_option
def set_(name: str, gateway: str | None, json_: bool, **options: Any) -> None:
    """Changes settings of a task type; other settings stay, and `none` removes a limit."""
    settings = given_settings(options)
    if not settings:
        raise click.UsageError("give at least one option with the setting to change")
    with open_client(gateway) as client:
        _change(name, client, f"type {name} is changed", json_=json_, **settings)


@types.command()
@click.argument("name", type=TYPE_NAME)
@client_options
def pause(name: str, client: SyncClient, json_: bool) -> None:
    """Stops releasing tasks of a type; tasks on the ready topic still start."""
    _change(name, client, f"type {name} is paused", json_=json_, paused=True)


@types.command()
@click.argument("name", type=TYPE_NAME)
@client_options
def resume(name: str, client: SyncClient, json_: bool) -> None:
    """Resumes releasing tasks of a type."""
    _change(name, client, f"tasks of type {name} are released again", json_=json_, paused=False)


def _change(name: str, client: SyncClient, text: str, *, json_: bool, **settings: Any) -> None:
    with naming_options():
        changed = client.change_type(name, **settings)
    print_answer(changed, text, json_=json_)


@types.command()
@click.argument("name", type=TYPE_NAME)
@client_options
def durations(name: str, client: SyncClient, json_: bool) -> None:
    """Shows how long the latest tasks of a type took: median and 95th percentile, also by stage."""
    found = client.type_durations(name)
    if json_:
        print_document(found)
        return
    rows = [(f"task from {row['first_stage']}", row) for row in found["tasks"]]
    rows += [(f"stage {row['stage']}", row) for row in found["stages"]]
    print_list(
        rows,
        ("", "count", "median", "95th percentile"),
        lambda each: (
            each[0],
            f"{each[1]['count']:,}",
            f"{each[1]['p50_s']:,.3f} s",
            f"{each[1]['p95_s']:,.3f} s",
        ),
        "no task has succeeded lately",
        json_=False,
    )
