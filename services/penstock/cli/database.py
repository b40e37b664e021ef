"""The verbs about the database: its tables, and the roles of the services."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from typing import Any

import click

from penstock.cli.deployment import deployment_settings
from penstock.cli.groups import Group
from penstock.cli.options import json_option, postgres_options
from penstock.cli.output import print_answer, print_document
from penstock.cli.passwords import given_passwords
from penstock.cli.serving import extra
from penstock.core.migration_steps import Step
from penstock.settings import Platform

# The exit status when the roles lack rights.
EXIT_RIGHTS_MISSING = 7

role_prefix_option = click.option(
    "--role-prefix",
    default="penstock_",
    show_default=True,
    help="The beginning of the roles' names. Deployments that share a server need different ones.",
)


@click.command()
@click.option(
    "--step",
    type=click.Choice([step.value for step in Step]),
    help="The step of a rolling upgrade: `pre` before services of the new version start, `post` after services of the old "
    "version have stopped. Default: both.",
)
@click.option(
    "--roles",
    is_flag=True,
    help="Then apply the rights of the roles, as `penstock roles apply` does; in step `post` with --revoke.",
)
@role_prefix_option
@postgres_options
def migrate(*, step: str | None, roles: bool, role_prefix: str, json_: bool, **options: Any) -> None:
    """Applies the migrations that the database lacks; running it again changes nothing."""
    with extra("services", "migrating"):
        from penstock.postgres.migrations import migrate as run_migrate  # noqa: PLC0415 (optional packages)
        from penstock.postgres.roles import apply as apply_roles  # noqa: PLC0415 (optional packages)
    report: dict[str, Any] = {}
    with deployment_settings(Platform, options, "postgres") as settings:
        report["applied"] = asyncio.run(run_migrate(settings.sessions, Step(step) if step else None))
        if roles:
            revoke = step == Step.POST.value
            plan = asyncio.run(apply_roles(settings.sessions, role_prefix, revoke=revoke))
            report["roles"] = [*plan.add, *(plan.revoke if revoke else ())]
    if not json_:
        click.echo(f"applied {', '.join(report['applied'])}" if report["applied"] else "already up to date")
    _print_statements(report, report.get("roles", ()), json_=json_)


def _print_statements(document: Any, statements: Iterable[str], *, json_: bool) -> None:
    if json_:
        print_document(document)
        return
    for statement in statements:
        click.echo(f"{statement};")


@click.group(cls=Group)
def roles() -> None:
    """Manages a PostgreSQL role for each service, with exactly the rights that it needs.

    A role cannot log in until you allow it: with `penstock roles login`, or with ALTER ROLE
    penstock_stages LOGIN PASSWORD '…'.
    """


@roles.command("plan")
@role_prefix_option
@postgres_options
def plan(role_prefix: str, *, json_: bool, **options: Any) -> None:
    """Compares the roles' rights with their declaration; the status is 7 if a right is missing."""
    with extra("services", "roles"):
        from penstock.postgres.roles import plan as compare  # noqa: PLC0415 (optional packages)
    with deployment_settings(Platform, options, "postgres") as settings:
        difference = asyncio.run(compare(settings.sessions, role_prefix))
    lines = [f"{statement};" for statement in difference.add]
    lines += [f"{statement};  -- with --revoke" for statement in difference.revoke]
    document = {"add": difference.add, "revoke": difference.revoke}
    print_answer(document, "\n".join(lines) or "the roles are as declared", json_=json_)
    click.get_current_context().exit(EXIT_RIGHTS_MISSING if difference.add else 0)


@roles.command("apply")
@click.option(
    "--revoke",
    is_flag=True,
    help="Revoke rights that are not declared. Do not use it while an older version runs.",
)
@role_prefix_option
@postgres_options
def apply(role_prefix: str, *, revoke: bool, json_: bool, **options: Any) -> None:
    """Creates the roles and grants the rights that they lack; running it again changes nothing."""
    with extra("services", "roles"):
        from penstock.postgres.roles import apply as apply_roles  # noqa: PLC0415 (optional packages)
    with deployment_settings(Platform, options, "postgres") as settings:
        difference = asyncio.run(apply_roles(settings.sessions, role_prefix, revoke=revoke))
    done = [*difference.add, *(difference.revoke if revoke else ())]
    beyond = [] if revoke else difference.revoke
    lines = [f"{statement};" for statement in done]
    if beyond:
        lines.append("these rights are not declared and were kept (--revoke revokes them):")
        lines += [f"  {statement};" for statement in beyond]
    if not done:
        lines.append("the roles are as declared")
    print_answer({"done": done, "beyond": beyond}, "\n".join(lines), json_=json_)


@roles.command("login")
@click.option(
    "--owner",
    metavar="ROLE",
    help="Also create this role, which may create the tables, and let it log in. Migrations run as it.",
)
@role_prefix_option
@postgres_options
def login(owner: str | None, role_prefix: str, *, json_: bool, **options: Any) -> None:
    """Creates the roles as a superuser, and lets those with a password log in.

    The password of the role penstock_task_sync is PENSTOCK_PASSWORD_TASK_SYNC, and so on; that of
    the owner is PENSTOCK_PASSWORD_OWNER. Roles without one stay as they are. Rights on tables
    follow with `penstock migrate --roles`, as the owner.
    """
    with extra("services", "roles"):
        from penstock.postgres import logins  # noqa: PLC0415 (optional packages)
        from penstock.postgres.roles import role_names  # noqa: PLC0415 (optional packages)
    by_service = {role.removeprefix(role_prefix): role for role in role_names(role_prefix)}
    if owner is not None:
        by_service["owner"] = owner
    passwords = {by_service[name]: password for name, password in given_passwords(by_service).items()}
    with deployment_settings(Platform, options, "postgres") as settings:
        done = asyncio.run(
            logins.apply(settings.sessions, passwords, secrets.token_bytes, prefix=role_prefix, owner=owner)
        )
    _print_statements({"done": done}, done, json_=json_)


@roles.command("sql")
@click.option(
    "--database", required=True, help="The name of the database, to which the settings of the roles apply."
)
@role_prefix_option
@json_option
def sql(role_prefix: str, database: str, *, json_: bool) -> None:
    """Prints the statements that create the roles, so that an administrator can run them."""
    with extra("services", "roles"):
        from penstock.postgres.roles import script  # noqa: PLC0415 (optional packages)
    statements = script(role_prefix, '"' + database.replace('"', '""') + '"')
    _print_statements({"add": statements}, statements, json_=json_)
