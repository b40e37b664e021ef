"""The verb that submits rejected submissions again."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from penstock.cli.confirmation import confirm, yes_option
from penstock.cli.deployment import DeploymentSettings, data_dir_option
from penstock.cli.output import json_option, print_document
from penstock.cli.topics import kafka_option, prefix_option
from penstock.errors import NotFound
from penstock.kafka import replay
from penstock.settings import Kafka


@click.command("replay-rejected")
@click.argument("types", metavar="TYPE...", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Count the submissions, but submit none.")
@yes_option
@kafka_option
@prefix_option
@data_dir_option
@json_option
def replay_rejected(types: tuple[str, ...], *, dry_run: bool, yes: bool, json_: bool, **options: Any) -> None:
    """Submits again what was rejected because its type was not registered; status 4 if nothing was.

    Register the types first. Run twice, the command makes no second task: a submission without an
    idempotency key gets one from its place in the topic.
    """
    with DeploymentSettings(Kafka, options).explaining_errors("kafka") as settings:
        records = asyncio.run(replay.rejected_of_types(settings, types))
        if not records:
            raise NotFound(f"no submission of {', '.join(types)} was rejected because its type was unknown")
        if not dry_run:
            if not yes:
                confirm(f"{len(records):,} submissions would be submitted again")
            asyncio.run(replay.submit_again(settings, records))
    if json_:
        print_document({"dry_run": dry_run, "submissions": len(records)})
    else:
        click.echo(f"{len(records):,} submissions {'would be' if dry_run else 'are'} submitted again")
