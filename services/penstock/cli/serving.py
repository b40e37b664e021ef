"""The verbs that run a service and check a deployment."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from penstock import process
from penstock.cli.deployment import deployment_settings
from penstock.cli.options import platform_options
from penstock.cli.output import counts_text, print_document, table
from penstock.cli.param_types import Whole
from penstock.errors import CannotStart, PenstockError
from penstock.kafka.topology.services import SERVICES
from penstock.settings import Platform

# The exit status when a task or callback is in limbo.
EXIT_LIMBO = 7


@contextmanager
def extra(name: str, feature: str) -> Iterator[None]:
    """Turns a missing package into an error that names the command which installs it.

    Args:
        name: optional dependency group of the distribution, such as `services`.
        feature: what needs the package, in words.

    Raises:
        CannotStart: a package of the group is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "penstock":
            raise
        raise CannotStart(
            f"{feature} needs {error.name}, which is not installed: pip install 'penstock[{name}]'"
        ) from error


@click.command()
@click.argument("service", type=click.Choice(list(SERVICES)))
@click.pass_context
def run(ctx: click.Context, service: str) -> None:
    """Runs one service in this process until SIGTERM; its settings are PENSTOCK_* variables."""
    try:
        with extra("services", f"the service {service}"):
            app = importlib.import_module(f"penstock.{SERVICES[service].package}.app")
        status = app.main()
    except PenstockError as error:
        # A log entry, as the errors of a service that has started are.
        status = process.report_start_failure(service, error)
    ctx.exit(status)


@click.command()
@click.option(
    "--repair/--dry-run",
    default=False,
    help="Repair what is in limbo in the normal way, then check again. Default: only check.",
)
@click.option(
    "--show",
    type=Whole(1),
    default=20,
    show_default=True,
    help="The most findings of each rule to name; all are counted.",
)
@platform_options
@click.pass_context
def check(ctx: click.Context, /, *, repair: bool, show: int, json_: bool, **options: Any) -> None:
    """Proves that no task or callback is in limbo; the status is 7 if one stays in limbo."""
    with extra("services", "the check"):
        from penstock.checks.app import check as run_check  # noqa: PLC0415 (optional packages)
    with deployment_settings(Platform, options, "kafka", "postgres") as settings:
        report = asyncio.run(run_check(settings, repair=repair, show=show))
    wire = report.to_wire()
    if json_:
        print_document(wire)
    else:
        click.echo(f"tasks: {counts_text(report.tasks)}")
        click.echo(f"callbacks: {counts_text(report.callbacks)}")
        if report.moved:
            click.echo(f"offsets of submitted that did not fit, in 7 days: {counts_text(report.moved)}")
        if report.missing:
            click.echo(
                f"tasks of the last day that are missing, since the database went back: {len(report.missing):,}, "
                f"{', '.join(map(str, report.missing[:show]))}"
            )
        if report.clean:
            click.echo("clean: nothing is in limbo")
        else:
            table(
                ("rule", "what", "id", "lacks"),
                (
                    (offender.rule.value, offender.what, str(offender.id), offender.lacks)
                    for offender in report.offenders
                ),
            )
            click.echo(f"in limbo: {counts_text(wire['counts'])}")
        if report.repaired is not None:
            click.echo(f"repaired: {counts_text(wire['repaired'])}")
            click.echo(f"still in limbo: {counts_text(wire['remaining'])}")
    ctx.exit(0 if report.well else EXIT_LIMBO)
