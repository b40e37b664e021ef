"""The verbs about rejected records: list them, and submit submissions again."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import datetime
from functools import partial
from typing import Any

import click

from penstock.cli.confirmation import confirm, yes_option
from penstock.cli.deployment import deployment_settings
from penstock.cli.groups import Group
from penstock.cli.options import DEFAULT_LIMIT, kafka_options
from penstock.cli.output import moment, print_answer, print_list
from penstock.cli.param_types import Moment, Whole
from penstock.contracts.rejected import Rejection
from penstock.errors import NotFound
from penstock.kafka.processing import replay
from penstock.settings import Kafka

# The most characters of a record's value that a table shows.
_EXCERPT = 80


@click.group(cls=Group)
def rejected() -> None:
    """Lists records that were rejected, and submits them again.

    A record that breaks its contract is written to `<topic>.rejected` with the reason. The verbs
    read these topics directly.
    """


@rejected.command("list")
@click.argument(
    "names",
    metavar="[TOPIC...]",
    nargs=-1,
    type=click.Choice(list(replay.REJECTING)),
)
@click.option("--since", type=Moment(), help="List only records that were rejected then or later.")
@click.option(
    "--limit",
    type=Whole(1),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="The most records of each topic.",
)
@kafka_options
def list_(names: tuple[str, ...], *, since: datetime | None, limit: int, json_: bool, **options: Any) -> None:
    """Lists rejected records with the reason, latest first; without a TOPIC, of all topics."""

    async def read(settings: Kafka) -> list[Rejection]:
        found: list[Rejection] = []
        for name in names or replay.REJECTING:
            found += await replay.rejections(settings, name, since=since, limit=limit)
        return sorted(found, key=lambda rejection: rejection.rejected_at, reverse=True)

    with deployment_settings(Kafka, options, "kafka") as settings:
        found = asyncio.run(read(settings))
    print_list(
        found,
        ("rejected", "topic", "record", "field", "reason", "value"),
        partial(_row, settings.prefix),
        "no rejected records",
        json_=json_,
        document=_wire,
    )


def _row(prefix: str, rejection: Rejection) -> tuple[str, ...]:
    text = rejection.original[: 2 * _EXCERPT].decode(errors="replace")
    return (
        moment(rejection.rejected_at.isoformat()),
        rejection.topic.removeprefix(prefix),
        f"{rejection.partition}/{rejection.offset}",
        rejection.pointer,
        rejection.reason,
        text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…",
    )


def _wire(rejection: Rejection) -> dict[str, Any]:
    return {**dataclasses.asdict(rejection), "original": rejection.original.decode(errors="replace")}


@rejected.command("replay")
@click.argument("types", metavar="[TYPE...]", nargs=-1)
@click.option(
    "--flow",
    "flows",
    multiple=True,
    metavar="NAME",
    help="A flow instead of task types. The option is repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Count the submissions, but submit none.")
@yes_option
@kafka_options
def replay_(
    types: tuple[str, ...], flows: tuple[str, ...], *, dry_run: bool, yes: bool, json_: bool, **options: Any
) -> None:
    """Submits again what was rejected because its type or flow was unknown.

    Register the types, or upload the flows, first. The status is 4 if nothing was rejected. Run
    twice, the command makes no second task or flow: a submission without an idempotency key gets
    one from its place in the topic.
    """
    if bool(types) == bool(flows):
        raise click.UsageError("give task types, or --flow, but not both")
    kind, names = (replay.FLOWS, flows) if flows else (replay.TASKS, types)
    with deployment_settings(Kafka, options, "kafka") as settings:
        records = asyncio.run(replay.rejected_of(settings, kind, names))
        if not records:
            raise NotFound(
                f"no submission of {', '.join(names)} was rejected because its {kind.field} was unknown"
            )
        if not dry_run:
            if not yes:
                confirm(f"{len(records):,} submissions would be submitted again")
            asyncio.run(replay.submit_again(settings, kind, records))
    print_answer(
        {"dry_run": dry_run, "submissions": len(records)},
        f"{len(records):,} submissions {'would be' if dry_run else 'are'} submitted again",
        json_=json_,
    )
