"""The verb that lists workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from penstock.cli.gateway import client_options
from penstock.cli.names import TYPE_NAME
from penstock.cli.output import console, counted, moment, print_document, table
from penstock.client import SyncClient

# Seconds without any sign of life after which the list says how old it is.
OLD_S = 10.0

_HEADERS = (
    "worker",
    "kind",
    "state",
    "type",
    "stages",
    "in flight",
    "slots",
    "partitions",
    "host",
    "version",
    "seen",
)
_LOST_HEADERS = ("worker", "kind", "type", "host", "seen", "tasks")


@click.command()
@click.option("--type", "type_", type=TYPE_NAME, help="List only workers of this type.")
@click.option("--lost", is_flag=True, help="List only lost workers, with what became of their tasks.")
@client_options
def workers(type_: str | None, lost: bool, client: SyncClient, json_: bool) -> None:
    """Lists the workers of each type: stages, slots, attempts in flight, last sign of life.

    A worker that ends without saying so is lost, and stays listed for an hour with its tasks.
    Workers over HTTP are listed by the gateways that answer them.
    """
    found = list(client.workers(type_, state="lost" if lost else None))
    if json_:
        for each in found:
            print_document(each)
        return
    listed = [(each["type"], worker) for each in found for worker in each["workers"]]
    if listed and lost:
        table(_LOST_HEADERS, (_lost_row(*row) for row in listed))
    elif listed:
        table(_HEADERS, (_row(*row) for row in listed))
    for each in found:
        if each["rebalancing"]:
            console().print(
                f"type {each['type']}: its workers are sharing the partitions out; ask again in a moment"
            )
        elif not each["workers"]:
            console().print(f"type {each['type']}: no {'lost ' if lost else ''}worker")
    if not found:
        console().print("no task types; register one with `penstock types add NAME`")
    elif (found[-1]["age_s"] or 0.0) > OLD_S:
        console().print(
            f"no sign of life has come from Kafka for {found[-1]['age_s']:,.0f} s: "
            f"this is as of {moment(found[-1]['as_of'])}"
        )


def _row(type_name: str, worker: Mapping[str, Any]) -> tuple[str, ...]:
    stages, partitions = worker["stages"], worker["partitions"]
    return (
        worker["id"],
        worker["kind"],
        worker["state"],
        type_name,
        "?" if stages is None else ", ".join(stages),
        _number(worker["in_flight"]),
        _number(worker["slots"]),
        "" if partitions is None else ranges(partitions),
        worker["host"],
        worker["version"] or "?",
        moment(worker["seen_at"]),
    )


def _lost_row(type_name: str, worker: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        worker["id"],
        worker["kind"],
        type_name,
        worker["host"],
        moment(worker["seen_at"]),
        _tasks(worker),
    )


def _tasks(worker: Mapping[str, Any]) -> str:
    """The attempts of a lost worker by outcome and state of the task, and the first tasks."""
    tasks = worker["tasks"]
    if tasks is None:
        return f"{_number(worker['in_flight'])} in flight"
    if not tasks:
        return "none"
    outcomes = Counter((each["outcome"] or "not ended", each["state"]) for each in tasks)
    said = [
        f"{counted(number, 'attempt')} {outcome}, now {state}"
        for (outcome, state), number in sorted(outcomes.items())
    ]
    first = ", ".join(str(each["id"]) for each in tasks[:5])
    more = f" and {worker['in_flight'] - 5:,} more" if worker["in_flight"] > 5 else ""
    return f"{'; '.join(said)}: {first}{more}"


def _number(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as text, consecutive ones as a range: 0-3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
