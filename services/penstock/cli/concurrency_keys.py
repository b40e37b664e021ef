"""The verbs `penstock types keys`: the concurrency keys of a type, by tenant or resource."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.gateway import client_options, gateway_option, given_settings, open_client
from penstock.cli.groups import Group
from penstock.cli.names import TYPE_NAME
from penstock.cli.options import json_option, list_options
from penstock.cli.output import print_answer, print_list
from penstock.cli.param_types import OrNone, Whole
from penstock.client import SyncClient


@click.group(cls=Group)
def keys() -> None:
    """Lists, pauses, weighs and limits the concurrency keys of a type."""


@keys.command("list")
@click.argument("type_", metavar="TYPE", type=TYPE_NAME)
@click.option("--key", help="List only this concurrency key.")
@list_options("keys")
@client_options
def list_(type_: str, key: str | None, limit: int | None, client: SyncClient, json_: bool) -> None:
    """Lists the concurrency keys that have settings of their own, with their tasks in flight."""
    print_list(
        list(client.keys(type_, key=key, limit=limit)),
        ("key", "paused", "weight", "max in flight", "in flight"),
        lambda document: (
            document["key"],
            "paused" if document["paused"] else "",
            str(document["weight"]),
            "as its type" if document["max_in_flight"] is None else f"{document['max_in_flight']:,}",
            f"{document['in_flight']:,}",
        ),
        "no concurrency key has settings of its own",
        json_=json_,
    )


@keys.command("set")
@click.argument("type_", metavar="TYPE", type=TYPE_NAME)
@click.argument("key")
@click.option(
    "--weight", type=Whole(), help="The number of tasks that the key releases in its turn, 1 to 1000."
)
@click.option(
    "--max-in-flight",
    type=OrNone(Whole()),
    help="The most tasks of the key that are queued or running at once; `none` is the type's max-per-key.",
)
@gateway_option
@json_option
def set_(type_: str, key: str, gateway: str | None, json_: bool, **options: Any) -> None:
    """Sets the weight or the limit of a concurrency key; other settings stay as they are."""
    settings = given_settings(options)
    if not settings:
        raise click.UsageError("give --weight or --max-in-flight")
    with open_client(gateway) as client:
        _change(type_, key, client, f"key {key} of {type_} is changed", json_=json_, **settings)


@keys.command()
@click.argument("type_", metavar="TYPE", type=TYPE_NAME)
@click.argument("key")
@client_options
def pause(type_: str, key: str, client: SyncClient, json_: bool) -> None:
    """Stops releasing tasks of a concurrency key; tasks on the ready topic still start."""
    _change(type_, key, client, f"key {key} of {type_} is paused", json_=json_, paused=True)


@keys.command()
@click.argument("type_", metavar="TYPE", type=TYPE_NAME)
@click.argument("key")
@client_options
def resume(type_: str, key: str, client: SyncClient, json_: bool) -> None:
    """Resumes releasing tasks of a concurrency key."""
    _change(
        type_, key, client, f"tasks of key {key} of {type_} are released again", json_=json_, paused=False
    )


@keys.command()
@click.argument("type_", metavar="TYPE", type=TYPE_NAME)
@click.argument("key")
@client_options
def reset(type_: str, key: str, client: SyncClient, json_: bool) -> None:
    """Removes the settings of a concurrency key: no pause, weight 1, and the limit of the type."""
    changed = client.reset_key(type_, key)
    print_answer(
        {"changed": changed},
        f"key {key} of {type_} has the type's settings"
        if changed
        else f"key {key} of {type_} had no settings",
        json_=json_,
    )


def _change(type_: str, key: str, client: SyncClient, text: str, *, json_: bool, **settings: Any) -> None:
    changed = client.change_key(type_, key, **settings)
    print_answer(changed, text, json_=json_)
