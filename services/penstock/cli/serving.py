"""The verbs that run and look after a deployment."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from penstock import logs, process
from penstock.cli.deployment import Found, data_dir_option
from penstock.cli.gateway import without_nothing
from penstock.cli.numbers import Whole
from penstock.cli.output import as_json, counts_text, print_json, table
from penstock.cli.topics import kafka_option, prefix_option
from penstock.discovery import DATA_DIR_VARIABLE
from penstock.errors import CannotStart, PenstockError
from penstock.settings import Platform

# A check found something in limbo.
EXIT_LIMBO = 7

# Names as people write them, and the packages that hold them.
SERVICES = {
    "gateway": "gateway",
    "task-sync": "task_sync",
    "heartbeats": "heartbeats",
    "stages": "stages",
    "callbacks": "callbacks",
}

postgres_option = click.option("--postgres", metavar="URL", help="Database. Default: $PENSTOCK_POSTGRES.")


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Names the command that installs what is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "penstock":
            raise
        raise CannotStart(
            f"{what} needs {error.name}, which is not installed: pip install 'penstock[{name}]'"
        ) from error


@click.command()
@click.option("--kafka", metavar="SERVERS", help="Use this cluster instead of starting a broker.")
@click.option("--postgres", metavar="URL", help="Use this database instead of starting a server.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=DATA_DIR_VARIABLE,
    help=f"Where everything that lasts is kept. Default: ${DATA_DIR_VARIABLE}, else .penstock",
)
@click.option("--fresh", is_flag=True, help="Drop what an earlier run left in the data directory.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), help="The gateway's; another is taken if it is not free."
)
@click.option("--prefix", help="Of topics and groups.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(SERVICES)),
    help="Start only these services; repeatable.",
)
@click.pass_context
def up(ctx: click.Context, /, port: int | None, only: tuple[str, ...], **given: Any) -> None:
    """Runs a whole deployment on this machine until Ctrl-C.

    Starts a Kafka broker, a PostgreSQL server and every service, each as a process of its own, restarted when it
    dies. Data is kept between runs.
    """
    with extra("embedded", "a local deployment"):
        from penstock.local.deployment import Options  # noqa: PLC0415 (optional packages)
        from penstock.local.up import up as run_up  # noqa: PLC0415 (optional packages)
    options = without_nothing(**given, gateway_port=port, replicas=dict.fromkeys(only, 1) if only else None)
    with extra("embedded", "a local deployment"):
        ctx.exit(asyncio.run(run_up(Options(**options))))


@click.command()
@click.argument("service", type=click.Choice(list(SERVICES)))
@click.pass_context
def run(ctx: click.Context, service: str) -> None:
    """Runs one service in this process, with settings from PENSTOCK_* variables, until SIGTERM."""
    try:
        with extra("services", f"the service {service}"):
            app = importlib.import_module(f"penstock.{SERVICES[service]}.app")
        status = app.main()
    except PenstockError as error:
        # In text it is told as every verb tells it.
        if not logs.in_json():
            raise
        status = process.cannot_begin(service, error)
    ctx.exit(status)


@click.command()
@click.option(
    "--repair/--dry-run",
    default=False,
    help="Put offenders back the normal way, then check again. Default: only say what is amiss.",
)
@click.option(
    "--show",
    type=Whole(1),
    default=20,
    show_default=True,
    help="How many offenders against each rule to name; all are counted.",
)
@kafka_option
@postgres_option
@prefix_option
@data_dir_option
@as_json
@click.pass_context
def check(ctx: click.Context, /, *, repair: bool, show: int, json_: bool, **given: Any) -> None:
    """Proves that no task and no callback is in limbo; status 7 if one is, or still is after --repair."""
    with extra("services", "the check"):
        from penstock.checks.app import check as run_check  # noqa: PLC0415 (optional packages)
    with Found(Platform, given).telling("kafka", "postgres") as settings:
        report = asyncio.run(run_check(settings, repair=repair, show=show))
    wire = report.to_wire()
    if json_:
        print_json(wire)
    else:
        click.echo(f"tasks: {counts_text(report.tasks)}")
        click.echo(f"callbacks: {counts_text(report.callbacks)}")
        if report.clean:
            click.echo("clean: nothing is in limbo")
        else:
            table(
                ("rule", "what", "id", "lacks"),
                ((o.rule.value, o.what, str(o.id), o.lacks) for o in report.offenders),
            )
            click.echo(f"in limbo: {counts_text(wire['counts'])}")
        if report.repaired is not None:
            click.echo(f"put back: {counts_text(wire['repaired'])}")
            click.echo(f"still in limbo: {counts_text(wire['remaining'])}")
    ctx.exit(0 if report.well else EXIT_LIMBO)
