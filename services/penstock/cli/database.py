"""The verbs about the database itself: its tables, and who may do what with them."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from penstock.cli.deployment import Found, data_dir_option
from penstock.cli.output import as_json, print_json
from penstock.cli.serving import extra, postgres_option
from penstock.core.migrating import Step
from penstock.settings import Platform

# A plan found something to do.
EXIT_LACKING = 7

role_prefix_option = click.option(
    "--role-prefix",
    default="penstock_",
    show_default=True,
    help="Of the roles' names: roles belong to a server, and it may have several deployments.",
)


@click.command()
@click.option(
    "--step",
    type=click.Choice([step.value for step in Step]),
    help="Of a rolling upgrade: `pre` before services of the new version start, `post` once those of the old one are gone. "
    "Default: both.",
)
@click.option(
    "--roles",
    is_flag=True,
    help="Then give each service's role its rights: `penstock roles apply`, with --revoke in `post`.",
)
@role_prefix_option
@postgres_option
@data_dir_option
@as_json
def migrate(*, step: str | None, roles: bool, role_prefix: str, json_: bool, **given: Any) -> None:
    """Brings the database's tables up to date; harmless when they are."""
    with extra("services", "migrating"):
        from penstock.postgres.migrations import migrate as run_migrate  # noqa: PLC0415 (optional packages)
        from penstock.postgres.roles import apply as apply_roles  # noqa: PLC0415 (optional packages)
    said: dict[str, Any] = {}
    with Found(Platform, given).telling("postgres") as settings:
        said["applied"] = asyncio.run(run_migrate(settings.sessions, Step(step) if step else None))
        if roles:
            revoke = step == Step.POST.value
            plan = asyncio.run(apply_roles(settings.sessions, role_prefix, revoke=revoke))
            said["roles"] = [*plan.add, *(plan.revoke if revoke else ())]
    if json_:
        print_json(said)
        return
    click.echo(f"applied {', '.join(said['applied'])}" if said["applied"] else "already up to date")
    for statement in said.get("roles", ()):
        click.echo(f"{statement};")


@click.group()
def roles() -> None:
    """A role for each service, with the rights it needs and no others.

    They cannot log in until they are let in, for instance by ALTER ROLE penstock_stages LOGIN PASSWORD '…'.
    """


@roles.command("plan")
@role_prefix_option
@postgres_option
@data_dir_option
@as_json
def plan(role_prefix: str, *, json_: bool, **given: Any) -> None:
    """Shows what the roles lack, and what they have beyond; status 7 if they lack something. Changes nothing."""
    with extra("services", "roles"):
        from penstock.postgres.roles import plan as look  # noqa: PLC0415 (optional packages)
    with Found(Platform, given).telling("postgres") as settings:
        found = asyncio.run(look(settings.sessions, role_prefix))
    if json_:
        print_json({"add": found.add, "revoke": found.revoke})
    else:
        for statement in found.add:
            click.echo(f"{statement};")
        for statement in found.revoke:
            click.echo(f"{statement};  -- with --revoke")
        if not (found.add or found.revoke):
            click.echo("the roles are as declared")
    click.get_current_context().exit(EXIT_LACKING if found.add else 0)


@roles.command("apply")
@click.option(
    "--revoke", is_flag=True, help="Also take away what is not declared: not while an older version runs."
)
@role_prefix_option
@postgres_option
@data_dir_option
@as_json
def apply(role_prefix: str, *, revoke: bool, json_: bool, **given: Any) -> None:
    """Makes the roles and gives them what they lack; harmless when they are as declared."""
    with extra("services", "roles"):
        from penstock.postgres.roles import apply as carry_out  # noqa: PLC0415 (optional packages)
    with Found(Platform, given).telling("postgres") as settings:
        found = asyncio.run(carry_out(settings.sessions, role_prefix, revoke=revoke))
    done = [*found.add, *(found.revoke if revoke else ())]
    if json_:
        print_json({"done": done, "beyond": [] if revoke else found.revoke})
        return
    for statement in done:
        click.echo(f"{statement};")
    if found.revoke and not revoke:
        click.echo("beyond what is declared, and left (--revoke takes it away):")
        for statement in found.revoke:
            click.echo(f"  {statement};")
    if not done:
        click.echo("the roles are as declared")


@roles.command("sql")
@click.option("--database", required=True, help="Its name: settings of the roles are made for it alone.")
@role_prefix_option
@as_json
def sql(role_prefix: str, database: str, *, json_: bool) -> None:
    """Prints the statements that make the roles, for whoever may not let this program do it."""
    with extra("services", "roles"):
        from penstock.postgres.roles import script  # noqa: PLC0415 (optional packages)
    statements = script(role_prefix, '"' + database.replace('"', '""') + '"')
    if json_:
        print_json({"add": statements})
        return
    for statement in statements:
        click.echo(f"{statement};")
