"""The verbs about task types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
import orjson

from penstock.cli.gateway import client, gateway_option, without_nothing
from penstock.cli.numbers import NO_LIMIT, Finite, OrNone, Whole
from penstock.cli.output import as_json, console, fields, print_json, table
from penstock.cli.reading import CALLBACK_FORMS, callbacks_of
from penstock.cli.type_keys import keys
from penstock.errors import NotFound

_Command = TypeVar("_Command", bound=Callable[..., Any])

_SHOWN = ("name", "first_stage", "partitions", "lease_ms", "max_attempts", "events")
_BACKLOG = ("type", "priority", "stage", "ready", "scheduled", "paused", "waiting", "in_flight")


@click.group(invoke_without_command=True)
@gateway_option
@as_json
@click.pass_context
def types(ctx: click.Context, gateway: str | None, json_: bool) -> None:
    """Lists task types; `types show` tells all of one, `types add` registers one, `types set` changes one, `types backlog` counts what waits; `types keys` is about tenants and resources."""
    if ctx.invoked_subcommand is not None:
        return
    with client(gateway) as found:
        known = found.types()
        owners = {} if json_ else found.owners()
    if json_:
        for one in known:
            print_json(one)
    elif known:
        heads = [*(name.replace("_", " ") for name in _SHOWN), "released by"]
        table(heads, ([*(str(one[name]) for name in _SHOWN), _owner(owners, one["name"])] for one in known))
    else:
        console().print("no task types; register one with `penstock types add NAME`")


types.add_command(keys)


@types.command()
@click.argument("name")
@gateway_option
@as_json
def show(name: str, gateway: str | None, json_: bool) -> None:
    """Shows one task type: its lease, limits and retries, and the targets of its tasks."""
    with client(gateway) as found:
        one = next((known for known in found.types() if known["name"] == name), None)
        owners = {} if json_ else found.owners()
    if one is None:
        raise NotFound(f"there is no task type {name!r}; `penstock types` lists those there are")
    if json_:
        print_json(one)
    else:
        shown = {**one, "released by": _owner(owners, name)}
        fields((field.replace("_", " "), _text(value)) for field, value in shown.items())


@types.command()
@click.argument("name", required=False)
@gateway_option
@as_json
def backlog(name: str | None, gateway: str | None, json_: bool) -> None:
    """Shows how many tasks wait, of one type or of all, by priority and stage, and for how long the first is ready."""
    with client(gateway) as found:
        lines = list(found.backlog(name))
    if json_:
        for line in lines:
            print_json(line)
    elif lines:
        heads = [head.replace("_", " ") for head in _BACKLOG]
        table(
            [*heads, "oldest"], ([*(_number(line[head]) for head in _BACKLOG), _age(line)] for line in lines)
        )
    else:
        console().print("nothing waits")


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _age(line: Mapping[str, Any]) -> str:
    return "" if line["oldest_s"] is None else f"{line['oldest_s']:,.1f} s"


def _owner(owners: Mapping[str, str | None], name: str) -> str:
    return owners.get(name) or "nobody"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _settings(command: _Command) -> _Command:
    """The options that `add` and `set` share."""
    for option in reversed(
        (
            click.option("--first-stage", help="Where a task begins that names no stage. Default: start."),
            click.option(
                "--lease-ms",
                type=Whole(),
                help="A worker silent for this long has lost its task. Default: 300000.",
            ),
            click.option(
                "--max-attempts", type=Whole(), help="Tries of each stage, the first included. Default: 3."
            ),
            click.option("--retry-base-ms", type=Whole(), help="Delay before the second try. Default: 1000."),
            click.option(
                "--retry-factor", type=Finite(), help="Each further delay is this much longer. Default: 2."
            ),
            click.option("--retry-max-ms", type=Whole(), help="No delay is longer. Default: 300000."),
            click.option(
                "--retry-jitter",
                type=Finite(),
                help="Share of the delay that is random, 0 to 1. Default: 0.5.",
            ),
            click.option(
                "--events", type=click.Choice(["final", "all"]), help="Transitions reported. Default: final."
            ),
            click.option(
                "--max-losses", type=Whole(), help="Workers a stage may lose before quarantine. Default: 3."
            ),
            click.option(
                "--late-results",
                type=click.Choice(["accept", "refuse"]),
                help="Of expired attempts. Default: accept.",
            ),
            click.option(
                "--max-in-flight",
                type=OrNone(Whole()),
                help="Most tasks queued or running at once. Default: none.",
            ),
            click.option(
                "--starts-per-s",
                type=OrNone(Finite()),
                help="Most attempts released a second. Default: none.",
            ),
            click.option(
                "--max-per-key",
                type=OrNone(Whole()),
                help="Most tasks of one key queued or running at once. Default: none.",
            ),
            click.option(
                "--fair/--no-fair",
                default=None,
                help="Keys of the same priority take turns. Default: no.",
            ),
            click.option(
                "--ageing-s",
                type=OrNone(Finite()),
                help="A task gains a level of priority with so many seconds. Default: none.",
            ),
            click.option(
                "--finish-first/--no-finish-first",
                default=None,
                help="Tasks in a later stage go before those in their first. Default: no.",
            ),
            click.option(
                "--callback",
                "callbacks",
                multiple=True,
                metavar="URL|JSON|@FILE",
                help=f"Of tasks that name none themselves; {CALLBACK_FORMS}",
            ),
        )
    ):
        command = option(command)
    return command


def _given(callbacks: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    settings = without_nothing(callbacks=callbacks_of(callbacks), **given)
    return {name: None if value == NO_LIMIT else value for name, value in settings.items()}


@types.command()
@click.argument("name")
@click.option("--partitions", type=Whole(), help="Of its ready topic; fixed once registered. Default: 8.")
@_settings
@gateway_option
@as_json
def add(name: str, gateway: str | None, json_: bool, callbacks: tuple[str, ...], **given: Any) -> None:
    """Registers a task type, or changes one; what is left out gets its default."""
    with client(gateway) as found:
        registered = found.register_type(name, **_given(callbacks, given))
    if json_:
        print_json(registered)
    else:
        click.echo(f"type {name}: tasks begin at stage {registered['first_stage']}")


@types.command("set")
@click.argument("name")
@_settings
@gateway_option
@as_json
def set_(name: str, gateway: str | None, json_: bool, callbacks: tuple[str, ...], **given: Any) -> None:
    """Changes a task type; what is left out stays as it is, and `none` takes a limit away."""
    settings = _given(callbacks, given)
    if not settings:
        raise click.UsageError("give at least one option: what is to be changed")
    _change(name, gateway, f"type {name} is changed", json_=json_, **settings)


@types.command()
@click.argument("name")
@gateway_option
@as_json
def pause(name: str, gateway: str | None, json_: bool) -> None:
    """Releases no task of a type any more; what is on its ready topic already still begins."""
    _change(name, gateway, f"type {name} is paused", json_=json_, paused=True)


@types.command()
@click.argument("name")
@gateway_option
@as_json
def resume(name: str, gateway: str | None, json_: bool) -> None:
    """Releases tasks of a type again."""
    _change(name, gateway, f"type {name} is released again", json_=json_, paused=False)


def _change(name: str, gateway: str | None, text: str, *, json_: bool, **settings: Any) -> None:
    with client(gateway) as found:
        changed = found.change_type(name, **settings)
    if json_:
        print_json(changed)
    else:
        click.echo(text)
