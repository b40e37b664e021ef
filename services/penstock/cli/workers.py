"""The verb that lists workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.gateway import client_options
from penstock.cli.names import TYPE_NAME
from penstock.cli.output import console, moment, print_document, table
from penstock.client import SyncClient


@click.command()
@click.option("--type", "type_", type=TYPE_NAME, help="List only workers of this type.")
@client_options
def workers(type_: str | None, client: SyncClient, json_: bool) -> None:
    """Lists the workers of each type, with their stages, slots and partitions.

    A gateway stands for its workers over HTTP. The gateway that answers also lists its own, with
    the moment of their last request.
    """
    found = list(client.workers(type_))
    if json_:
        for each in found:
            print_document(each)
        return
    rows = [_row(each["type"], worker) for each in found for worker in each["workers"]]
    if rows:
        table(("worker", "kind", "type", "stages", "slots", "partitions", "host", "seen"), rows)
    for each in found:
        if each["rebalancing"]:
            console().print(
                f"type {each['type']}: its workers are sharing the partitions out; ask again in a moment"
            )
        elif not each["workers"]:
            console().print(f"type {each['type']}: no worker")
    if not found:
        console().print("no task types; register one with `penstock types add NAME`")


def _row(type_name: str, worker: Mapping[str, Any]) -> tuple[str, ...]:
    stages, slots, partitions = worker["stages"], worker["slots"], worker["partitions"]
    return (
        worker["id"],
        worker["kind"],
        type_name,
        "?" if stages is None else ", ".join(stages),
        "?" if slots is None else f"{slots:,}",
        "" if partitions is None else ranges(partitions),
        worker["host"],
        moment(worker["seen_at"]),
    )


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as text, consecutive ones as a range: 0-3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
