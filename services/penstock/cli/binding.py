"""The verb that binds the prefix of topics and groups to a database."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from penstock.cli.confirmation import confirm, yes_option
from penstock.cli.deployment import DeploymentSettings
from penstock.cli.options import platform_options
from penstock.cli.output import print_document
from penstock.cli.serving import extra
from penstock.cli.topics import EXIT_DIFFERENT
from penstock.kafka.topology import binding
from penstock.settings import Platform


@click.command("bind")
@click.option(
    "--replace",
    is_flag=True,
    help="Bind the prefix also when it belongs to another database, whose place this one takes for good.",
)
@yes_option
@platform_options
@click.pass_context
def bind(ctx: click.Context, /, *, replace: bool, yes: bool, json_: bool, **options: Any) -> None:
    """Binds the prefix to the database, and shows to which one it belongs; status 8 if to another.

    The first service to start does the same. A service refuses a prefix that belongs to another
    database. A restored copy of a database needs no binding: it is the same database.
    """
    with extra("services", "binding"):
        from penstock.postgres.deployment import read_deployment_id  # noqa: PLC0415 (optional packages)

    async def work(settings: Platform, *, replace: bool) -> tuple[str, str | None]:
        database = await read_deployment_id(settings.sessions)
        return database, await binding.bind(settings, database, replace=replace)

    with DeploymentSettings(Platform, options).explaining_errors("kafka", "postgres") as settings:
        database, found = asyncio.run(work(settings, replace=False))
        if replace and found not in (None, database):
            if not yes:
                confirm(
                    f"the services of the database {found} would be refused from their next start on, and those of "
                    f"{database} accepted"
                )
            database, found = asyncio.run(work(settings, replace=True))
    if json_:
        print_document({"database": database, "bound_to": found})
    elif found is None:
        click.echo("the prefix is not bound, because its topic is missing: run `penstock topics`")
    elif found == database:
        click.echo(f"the prefix {settings.prefix!r} belongs to this database ({database})")
    else:
        click.echo(binding.mismatch(settings, database, found))
    ctx.exit(0 if found == database else EXIT_DIFFERENT)
