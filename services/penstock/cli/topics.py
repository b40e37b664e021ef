"""The verbs about topics: create, compare with the declaration, print access lists, bind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import click

from penstock.cli.confirmation import confirm, yes_option
from penstock.cli.deployment import data_dir_option, deployment_settings
from penstock.cli.groups import Group
from penstock.cli.options import (
    json_option,
    kafka_option,
    kafka_options,
    platform_options,
    prefix_option,
    together,
)
from penstock.cli.output import print_answer, print_document, table
from penstock.cli.passwords import given_passwords
from penstock.cli.serving import extra
from penstock.core.access import DEFAULT_NAMESPACE, parse_namespaces
from penstock.kafka.topology import acls as access
from penstock.kafka.topology import binding, topic_plan, users
from penstock.kafka.topology.acls import AccessRule
from penstock.kafka.topology.topics import PLATFORM
from penstock.settings import Kafka, Platform

# The exit status when the topics differ from their declaration.
EXIT_DIFFERENT = 8

_USER = "User:"
_PRINCIPAL = "User:penstock-{service}"


@click.group(cls=Group, invoke_without_command=True)
@kafka_option
@prefix_option
@click.option(
    "--replication",
    type=click.IntRange(1, 32_767),
    help="The replicas of each partition. Default: the declared number.",
)
@data_dir_option
@json_option
@click.pass_context
def topics(ctx: click.Context, /, replication: int | None, json_: bool, **options: Any) -> None:
    """Creates the platform's topics that do not exist; running it again changes nothing.

    schemas/topics.toml and the file of PENSTOCK_TOPICS_FILE declare the topics. Task-sync creates
    ready topics when their types are registered.
    """
    if ctx.invoked_subcommand is not None:
        return
    with deployment_settings(Kafka, options, "kafka") as settings:
        created = asyncio.run(topic_plan.create(settings, replication=replication))
    names = [settings.prefix + topic.name for topic in PLATFORM]
    text = "\n".join(f"created {name}" for name in created) or f"all {len(names)} topics exist"
    print_answer({"topics": names, "created": created}, text, json_=json_)


@topics.command("plan")
@kafka_options
@click.pass_context
def plan(ctx: click.Context, /, *, json_: bool, **options: Any) -> None:
    """Shows how the topics differ from their declaration; the status is 8 if one differs."""
    with deployment_settings(Kafka, options, "kafka") as settings:
        differences = asyncio.run(topic_plan.plan(settings))
    _print_differences(differences, applied=(), json_=json_)
    ctx.exit(EXIT_DIFFERENT if differences else 0)


@topics.command("apply")
@kafka_options
@click.pass_context
def apply(ctx: click.Context, /, *, json_: bool, **options: Any) -> None:
    """Creates and changes topics as declared; the status is 8 if an unsafe change is left."""

    async def work(settings: Kafka) -> tuple[list[topic_plan.Difference], list[topic_plan.Difference]]:
        differences = await topic_plan.plan(settings)
        remaining = await topic_plan.apply(settings, differences)
        return [difference for difference in differences if difference.refused is None], remaining

    with deployment_settings(Kafka, options, "kafka") as settings:
        applied, remaining = asyncio.run(work(settings))
    _print_differences(remaining, applied=applied, json_=json_)
    ctx.exit(EXIT_DIFFERENT if remaining else 0)


def _print_differences(
    differences: Sequence[topic_plan.Difference], *, applied: Sequence[topic_plan.Difference], json_: bool
) -> None:
    if json_:
        print_document(
            {
                "differences": [difference.to_wire() for difference in differences],
                "applied": [difference.to_wire() for difference in applied],
            }
        )
        return
    for heading, group in (("applied", applied), ("differs", differences)):
        if group:
            table(
                ("topic", heading, "was" if group is applied else "is", "declared", "not changed because"),
                (
                    (
                        difference.topic,
                        difference.what,
                        difference.now or "",
                        difference.declared,
                        difference.refused or "",
                    )
                    for difference in group
                ),
            )
    if not differences:
        click.echo("the topics are as declared")


_access_options = together(
    click.option(
        "--namespace",
        "namespaces",
        multiple=True,
        metavar="NAMESPACE",
        help="A namespace of the worker, in place of types. The option is repeatable.",
    ),
    click.option(
        "--type",
        "types",
        multiple=True,
        metavar="TYPE",
        help="A task type of the worker. The option is repeatable. Default: all types.",
    ),
    click.option(
        "--principal",
        default=_PRINCIPAL,
        show_default=True,
        help="The principal of a service; {service} stands for its name.",
    ),
    click.argument("services", nargs=-1, type=click.Choice(access.SERVICES)),
)


def _rules(
    prefix: str, services: tuple[str, ...], types: tuple[str, ...], namespaces: tuple[str, ...]
) -> list[AccessRule]:
    if namespaces:
        try:
            allowed = parse_namespaces(namespaces)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        if allowed is None or types:
            raise click.UsageError("--namespace names namespaces, and excludes * and --type")
        if DEFAULT_NAMESPACE in allowed:
            raise click.UsageError(
                f"types of the namespace {DEFAULT_NAMESPACE} have no common beginning: name them with --type"
            )
    return access.acls(prefix, services or access.SERVICES, types=types, namespaces=namespaces)


@topics.command("acls")
@_access_options
@prefix_option
@data_dir_option
@json_option
def acls(
    services: tuple[str, ...],
    principal: str,
    types: tuple[str, ...],
    namespaces: tuple[str, ...],
    json_: bool,
    **options: Any,
) -> None:
    """Prints the rights of each service on Kafka, as commands of kafka-acls.

    The command needs no connection to Kafka. With --json it prints the `authorization` of a Strimzi
    KafkaUser for each service.
    """
    with deployment_settings(Kafka, options) as settings:
        allowed = _rules(settings.prefix, services, types, namespaces)
    print_answer(access.strimzi(allowed), "\n".join(access.commands(allowed, principal)), json_=json_)


@topics.command("grant")
@_access_options
@click.option(
    "--revoke",
    is_flag=True,
    help="Also remove entries of these principals that their lists do not have. Do not use it while an "
    "older version runs.",
)
@kafka_options
def grant(
    services: tuple[str, ...],
    principal: str,
    types: tuple[str, ...],
    namespaces: tuple[str, ...],
    revoke: bool,
    json_: bool,
    **options: Any,
) -> None:
    """Adds the rights of each service to Kafka, and sets the passwords of their users.

    The user of Kafka must be one that may alter the cluster. The password of the service task-sync
    is PENSTOCK_PASSWORD_TASK_SYNC, and so on; it is set for SCRAM-SHA-512. Users of services
    without one keep theirs. Running the verb again adds nothing.
    """
    given = given_passwords(services or access.SERVICES)
    if given and not principal.startswith(_USER):
        raise click.UsageError(f"--principal must begin with {_USER} to get a password")
    passwords = {
        principal.removeprefix(_USER).replace("{service}", name): password for name, password in given.items()
    }
    if len(passwords) < len(given):
        raise click.UsageError("--principal must have {service}, because services have different passwords")

    async def work(settings: Kafka) -> users.Plan:
        rules = _rules(settings.prefix, services, types, namespaces)
        await users.set_passwords(settings, passwords, secrets.token_bytes)
        return await users.grant(settings, rules, principal, revoke=revoke)

    with deployment_settings(Kafka, options, "kafka") as settings:
        plan = asyncio.run(work(settings))
    document = {
        "added": [entry.to_wire() for entry in plan.add],
        "beyond": [entry.to_wire() for entry in plan.beyond],
        "revoked": revoke,
        "passwords": sorted(passwords),
    }
    lines = [f"set the password of {user}" for user in sorted(passwords)]
    for verb, entries in (("added", plan.add), ("removed" if revoke else "not in the list:", plan.beyond)):
        lines += [
            f"{verb} {entry.principal} {entry.operation} {entry.kind} {entry.name} ({entry.pattern})"
            for entry in entries
        ]
    if not plan.add:
        lines.append("the access lists have every entry")
    print_answer(document, "\n".join(lines), json_=json_)


@topics.command("bind")
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

    with deployment_settings(Platform, options, "kafka", "postgres") as settings:
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
