"""The verbs about topics: creating them, laying them beside their declaration, and who may use them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import click

from penstock.cli.deployment import Found, data_dir_option
from penstock.cli.output import as_json, print_json, table
from penstock.kafka import acls as access
from penstock.kafka import planning
from penstock.kafka.connection import create_topics
from penstock.kafka.topics import PLATFORM
from penstock.settings import Kafka

# The topics are not as declared.
EXIT_DIFFERENT = 8

_PRINCIPAL = "User:penstock-{service}"

kafka_option = click.option("--kafka", metavar="SERVERS", help="Bootstrap servers. Default: $PENSTOCK_KAFKA.")
prefix_option = click.option("--prefix", help="Of topics and groups. Default: $PENSTOCK_PREFIX or penstock.")


@click.group(invoke_without_command=True)
@kafka_option
@prefix_option
@click.option(
    "--replication", type=click.IntRange(1, 32_767), help="Copies of each partition. Default: as declared."
)
@data_dir_option
@as_json
@click.pass_context
def topics(ctx: click.Context, /, replication: int | None, json_: bool, **given: Any) -> None:
    """Creates the platform's topics that do not exist; harmless when they do.

    How they are made is declared in schemas/topics.toml and in the file of PENSTOCK_TOPICS_FILE. Ready topics are created
    by task-sync when their types are registered.
    """
    if ctx.invoked_subcommand is not None:
        return
    with Found(Kafka, given).telling("kafka") as settings:
        asyncio.run(create_topics(settings, PLATFORM, replication=replication))
    names = [settings.prefix + topic.name for topic in PLATFORM]
    if json_:
        print_json({"topics": names})
    else:
        click.echo("\n".join(names))


@topics.command("plan")
@kafka_option
@prefix_option
@data_dir_option
@as_json
@click.pass_context
def plan(ctx: click.Context, /, *, json_: bool, **given: Any) -> None:
    """Shows what differs from the declaration and changes nothing; status 8 if anything does."""
    with Found(Kafka, given).telling("kafka") as settings:
        unlike = asyncio.run(planning.plan(settings))
    _show(unlike, applied=(), json_=json_)
    ctx.exit(EXIT_DIFFERENT if unlike else 0)


@topics.command("apply")
@kafka_option
@prefix_option
@data_dir_option
@as_json
@click.pass_context
def apply(ctx: click.Context, /, *, json_: bool, **given: Any) -> None:
    """Creates, alters and enlarges topics as declared, as far as that is safe; status 8 if something had to be left."""

    async def work(settings: Kafka) -> tuple[list[planning.Difference], list[planning.Difference]]:
        unlike = await planning.plan(settings)
        left = await planning.apply(settings, unlike)
        return [one for one in unlike if one.refused is None], left

    with Found(Kafka, given).telling("kafka") as settings:
        applied, left = asyncio.run(work(settings))
    _show(left, applied=applied, json_=json_)
    ctx.exit(EXIT_DIFFERENT if left else 0)


def _show(
    unlike: Sequence[planning.Difference], *, applied: Sequence[planning.Difference], json_: bool
) -> None:
    if json_:
        print_json(
            {
                "differences": [one.to_wire() for one in unlike],
                "applied": [one.to_wire() for one in applied],
            }
        )
        return
    for heading, some in (("applied", applied), ("differs", unlike)):
        if some:
            table(
                ("topic", heading, "was" if some is applied else "is", "declared", "left because"),
                ((one.topic, one.what, one.now or "", one.declared, one.refused or "") for one in some),
            )
    if not unlike:
        click.echo("the topics are as declared")


@topics.command("acls")
@click.argument("services", nargs=-1, type=click.Choice(access.SERVICES))
@click.option(
    "--principal",
    default=_PRINCIPAL,
    show_default=True,
    help="Whom the cluster takes a service for; {service} stands for its name.",
)
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="TYPE",
    help="The worker's task types; repeatable. Default: all.",
)
@prefix_option
@data_dir_option
@as_json
def acls(
    services: tuple[str, ...], principal: str, types: tuple[str, ...], json_: bool, **given: Any
) -> None:
    """Prints what each service may do on Kafka, as commands of kafka-acls; changes nothing and asks nobody.

    With --json it prints, for each service, the `authorization` of a Strimzi KafkaUser.
    """
    settings = Found(Kafka, given).settings
    allowed = access.acls(settings.prefix, services or access.SERVICES, types=types)
    if json_:
        print_json(access.strimzi(allowed))
    else:
        click.echo("\n".join(access.commands(allowed, principal)))
