"""The verbs about a deployment on this machine: start, stop, show."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from penstock import discovery
from penstock.cli.confirmation import confirm, yes_option
from penstock.cli.gateway import without_empty
from penstock.cli.options import Verb, json_option
from penstock.cli.output import fields, print_answer, print_document, state_text, table
from penstock.cli.serving import extra
from penstock.discovery import DATA_DIR_VARIABLE, DEFAULT_DATA_DIR
from penstock.kafka.topology.services import SERVICES

# The exit status of `penstock status` when a program does not serve, or nothing runs.
EXIT_NOT_SERVING = 1


def _directory_option(what: str) -> Callable[[Verb], Verb]:
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar=DATA_DIR_VARIABLE,
        help=f"The directory of {what}. Default: ${DATA_DIR_VARIABLE}, or else .penstock",
    )


@click.command()
@click.option(
    "--kafka",
    metavar="SERVERS",
    help="The bootstrap servers of a Kafka cluster to use instead of starting a broker.",
)
@click.option(
    "--postgres", metavar="URL", help="The address of a database to use instead of starting a server."
)
@_directory_option("all data")
@click.option(
    "--detach",
    "-d",
    is_flag=True,
    help="Return once every service serves; `penstock down` stops the deployment.",
)
@click.option("--in-background", is_flag=True, hidden=True)
@click.option(
    "--fresh", is_flag=True, help="Delete the data of earlier runs in the data directory, after asking."
)
@yes_option
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    help="The port of the gateway. The gateway takes another one if this port is in use.",
)
@click.option("--prefix", help="The prefix of topics and groups.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(SERVICES)),
    help="Start only this service. The option is repeatable.",
)
@click.pass_context
def up(
    ctx: click.Context,
    /,
    *,
    port: int | None,
    only: tuple[str, ...],
    yes: bool,
    detach: bool,
    in_background: bool,
    **options: Any,
) -> None:
    """Runs a whole deployment on this machine until Ctrl-C.

    The command starts a Kafka broker, a PostgreSQL server and every service, each as a process of
    its own, and restarts a process that dies. Data and ports are kept between runs. With --detach
    it returns once all services serve; `penstock status` shows the deployment, and `penstock down`
    stops it.
    """
    with extra("embedded", "a local deployment"):
        from penstock.local.background import start_in_background  # noqa: PLC0415 (optional packages)
        from penstock.local.deployment import Options  # noqa: PLC0415 (optional packages)
        from penstock.local.up import up as run_up  # noqa: PLC0415 (optional packages)
    data_dir = (options["data_dir"] or DEFAULT_DATA_DIR).absolute()
    if options["fresh"] and not yes and (data_dir / "lock").exists():
        confirm(f"all tasks, records and objects in {data_dir} would be deleted")
    if detach:
        ctx.exit(start_in_background(data_dir))
    settings = without_empty(**options, gateway_port=port, replicas=dict.fromkeys(only, 1) if only else None)
    with extra("embedded", "a local deployment"):
        ctx.exit(asyncio.run(run_up(Options(**settings), in_background=in_background)))


@click.command()
@_directory_option("the deployment")
@json_option
def down(data_dir: Path | None, *, json_: bool) -> None:
    """Stops the deployment of a directory, as Ctrl-C does; its data stays."""
    with extra("embedded", "a local deployment"):
        from penstock.local.background import stop  # noqa: PLC0415 (optional packages)
    directory = discovery.absolute(data_dir or DEFAULT_DATA_DIR)
    stopped = stop(directory)
    print_answer(
        {"data_dir": str(directory), "stopped": stopped},
        "stopped" if stopped else f"no deployment runs in {directory}",
        json_=json_,
    )


@click.command()
@_directory_option("the deployment")
@json_option
@click.pass_context
def status(ctx: click.Context, data_dir: Path | None, *, json_: bool) -> None:
    """Shows the deployment of a directory; the status is 1 unless every program of it serves."""
    with extra("embedded", "a local deployment"):
        from penstock.local.background import programs  # noqa: PLC0415 (optional packages)
        from penstock.postgres.connection import without_password  # noqa: PLC0415 (optional packages)
    directory = discovery.absolute(data_dir or DEFAULT_DATA_DIR)
    addresses = discovery.running(directory)
    owner = discovery.owner_of(directory)
    found = programs(directory) if addresses else {}
    serving = bool(found) and all(found.values())
    if json_:
        wire = dataclasses.asdict(addresses) if addresses else None
        if wire is not None:
            wire["postgres"] = without_password(wire["postgres"])
        print_document({"data_dir": str(directory), "process": owner, "addresses": wire, "serving": found})
    elif addresses is None and owner is not None:
        click.echo(f"the deployment in {directory} (process {owner}) is starting or stopping")
    elif addresses is None:
        click.echo(f"no deployment runs in {directory}: start one with `penstock up`")
    else:
        fields(
            (
                ("gateway", addresses.gateway),
                ("kafka", addresses.kafka),
                ("objects", addresses.objects),
                ("data", str(directory)),
                ("log", str(directory / "log" / "penstock.log")),
                ("process", str(addresses.pid)),
            )
        )
        table(
            ("program", "state"),
            ((name, state_text("serving" if serves else "starting")) for name, serves in found.items()),
        )
    ctx.exit(0 if serving else EXIT_NOT_SERVING)
