"""The verbs about keys of a type, `penstock types keys`: tenants and resources."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.gateway import client, gateway_option, without_nothing
from penstock.cli.numbers import NO_LIMIT, OrNone, Whole
from penstock.cli.output import as_json, console, print_json, table

_LATEST = 20


@click.group()
def keys() -> None:
    """Pauses, weighs and limits the keys of a type, and shows them."""


@keys.command("list")
@click.argument("type_", metavar="TYPE")
@click.option("--key", help="Only this one.")
@click.option("--limit", type=Whole(1), default=_LATEST, show_default=True, help="Most keys.")
@click.option("--all", "all_", is_flag=True, help="No limit.")
@gateway_option
@as_json
def list_(type_: str, key: str | None, limit: int, all_: bool, gateway: str | None, json_: bool) -> None:
    """Lists the keys of which something was said, with what is in flight of each."""
    with client(gateway) as found:
        known = list(found.keys(type_, key=key, limit=None if all_ else limit))
    if json_:
        for one in known:
            print_json(one)
    elif known:
        table(
            ("key", "paused", "weight", "max in flight", "in flight"),
            (
                (
                    one["key"],
                    "paused" if one["paused"] else "",
                    str(one["weight"]),
                    "as its type" if one["max_in_flight"] is None else f"{one['max_in_flight']:,}",
                    f"{one['in_flight']:,}",
                )
                for one in known
            ),
        )
    else:
        console().print("nothing was said of any key")


@keys.command("set")
@click.argument("type_", metavar="TYPE")
@click.argument("key")
@click.option("--weight", type=Whole(), help="Tasks it gives in its turn, 1 to 1000.")
@click.option(
    "--max-in-flight",
    type=OrNone(Whole()),
    help="Most of its tasks queued or running at once; `none` is its type's max-per-key.",
)
@gateway_option
@as_json
def set_(type_: str, key: str, gateway: str | None, json_: bool, **given: Any) -> None:
    """Weighs or limits a key; what is left out stays as it is."""
    settings = {
        name: None if value == NO_LIMIT else value for name, value in without_nothing(**given).items()
    }
    if not settings:
        raise click.UsageError("give --weight or --max-in-flight")
    _change(type_, key, gateway, f"key {key} of {type_} is changed", json_=json_, **settings)


@keys.command()
@click.argument("type_", metavar="TYPE")
@click.argument("key")
@gateway_option
@as_json
def pause(type_: str, key: str, gateway: str | None, json_: bool) -> None:
    """Releases no task of a key any more; what is on the ready topic already still begins."""
    _change(type_, key, gateway, f"key {key} of {type_} is paused", json_=json_, paused=True)


@keys.command()
@click.argument("type_", metavar="TYPE")
@click.argument("key")
@gateway_option
@as_json
def resume(type_: str, key: str, gateway: str | None, json_: bool) -> None:
    """Releases tasks of a key again."""
    _change(type_, key, gateway, f"key {key} of {type_} is released again", json_=json_, paused=False)


@keys.command()
@click.argument("type_", metavar="TYPE")
@click.argument("key")
@gateway_option
@as_json
def reset(type_: str, key: str, gateway: str | None, json_: bool) -> None:
    """Forgets what was said of a key: it is not paused, weighs 1, and its type says how many."""
    with client(gateway) as found:
        changed = found.reset_key(type_, key)
    if json_:
        print_json({"changed": changed})
    else:
        click.echo(f"key {key} of {type_} is as any other" if changed else f"nothing was said of key {key}")


def _change(type_: str, key: str, gateway: str | None, text: str, *, json_: bool, **settings: Any) -> None:
    with client(gateway) as found:
        changed = found.change_key(type_, key, **settings)
    if json_:
        print_json(changed)
    else:
        click.echo(text)
