"""The verbs about task types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import orjson

from penstock.cli.gateway import client, gateway_option, without_nothing
from penstock.cli.numbers import Finite, Whole
from penstock.cli.output import as_json, console, fields, print_json, table
from penstock.cli.reading import CALLBACK_FORMS, callbacks_of
from penstock.errors import NotFound

_SHOWN = ("name", "first_stage", "partitions", "lease_ms", "max_attempts", "events")


@click.group(invoke_without_command=True)
@gateway_option
@as_json
@click.pass_context
def types(ctx: click.Context, gateway: str | None, json_: bool) -> None:
    """Lists task types; `types show` tells all of one, `types add` registers one."""
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


def _owner(owners: Mapping[str, str | None], name: str) -> str:
    return owners.get(name) or "nobody"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


@types.command()
@click.argument("name")
@click.option("--first-stage", help="Where a task begins that names no stage. Default: start.")
@click.option("--partitions", type=Whole(), help="Of its ready topic; fixed once registered. Default: 8.")
@click.option(
    "--lease-ms", type=Whole(), help="A worker silent for this long has lost its task. Default: 300000."
)
@click.option("--max-attempts", type=Whole(), help="Tries of each stage, the first included. Default: 3.")
@click.option("--retry-base-ms", type=Whole(), help="Delay before the second try. Default: 1000.")
@click.option("--retry-factor", type=Finite(), help="Each further delay is this much longer. Default: 2.")
@click.option("--retry-max-ms", type=Whole(), help="No delay is longer. Default: 300000.")
@click.option(
    "--retry-jitter", type=Finite(), help="Share of the delay that is random, 0 to 1. Default: 0.5."
)
@click.option("--events", type=click.Choice(["final", "all"]), help="Transitions reported. Default: final.")
@click.option("--max-losses", type=Whole(), help="Workers a stage may lose before quarantine. Default: 3.")
@click.option(
    "--late-results", type=click.Choice(["accept", "refuse"]), help="Of expired attempts. Default: accept."
)
@click.option(
    "--callback",
    "callbacks",
    multiple=True,
    metavar="URL|JSON|@FILE",
    help=f"Of tasks that name none themselves; {CALLBACK_FORMS}",
)
@gateway_option
@as_json
def add(name: str, gateway: str | None, json_: bool, callbacks: tuple[str, ...], **given: Any) -> None:
    """Registers a task type, or changes one; what is left out gets its default."""
    settings = without_nothing(callbacks=callbacks_of(callbacks), **given)
    with client(gateway) as found:
        registered = found.register_type(name, **settings)
    if json_:
        print_json(registered)
    else:
        click.echo(f"type {name}: tasks begin at stage {registered['first_stage']}")
